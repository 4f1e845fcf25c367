"""What the SGLang backend uses of SGLang, for `contract.py`: names, and the code that says where bytes lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from kvconnector.integrations.contract import (
    Entry,
    Fields,
    Imported,
    Mentioned,
    Name,
    Passed,
    Sources,
    Unchanged,
    Used,
    Values,
    members,
    parameters,
)

UTILS = "srt/disaggregation/utils.py"
CONN = "srt/disaggregation/base/conn.py"
COMMON = "srt/disaggregation/common/conn.py"
DECODE = "srt/disaggregation/decode.py"
PREFILL = "srt/disaggregation/prefill.py"
CALLERS = (PREFILL, DECODE, "srt/managers/scheduler.py")
POOLS = "srt/mem_cache/memory_pool.py"
WINDOWS = "srt/mem_cache/swa_memory_pool.py"
CONTEXT = "srt/runtime_context.py"
UPDATER = "srt/managers/scheduler_components/weight_updater.py:SchedulerWeightUpdaterManager"
OF_REFUSED = frozenset(
    {
        "_ensure_prefill_recompute_executor",  # prefill engines of which nothing is known
        "try_ensure_parallel_info",
        "_staging_handler",  # the staging buffer
        "set_kv_buffer_tensors",
        "transfer_infos",  # prefill context parallelism
        "conclude_state",  # allocation once a prompt is computed
    }
)
"""Names that SGLang uses only with what does not occur here."""


@functools.cache
def _own() -> Sources:
    return Sources(Path(__file__).parent)


def _names(*places: str) -> Callable[[], frozenset[str]]:
    def names() -> frozenset[str]:
        found = [_own().find(place) for place in places]
        return frozenset(name for each in found if each is not None for name in members(each))

    return names


def _taken(place: str) -> Callable[[], tuple[tuple[str, ...], bool]]:
    def taken() -> tuple[tuple[str, ...], bool]:
        found = _own().find(place)
        if found is None:
            return (), False
        made = next((each for each in found.body if getattr(each, "name", "") == "__init__"), None)
        return parameters(found), getattr(getattr(made, "args", None), "kwarg", None) is not None

    return taken


ROOM = "transfers.py:RoomTransfer"
SENDER = _names(ROOM, "transfers.py:SentPrompt", "backend.py:KVSender")
RECEIVER = _names(ROOM, "transfers.py:LoadedPrompt", "backend.py:KVReceiver")
MANAGER = _names("rank.py:RankTransfers", "backend.py:KVManager")

ENTRIES: tuple[Entry, ...] = (
    # how a backend is found
    Mentioned("srt/arg_groups/choices.py", ("add_disagg_transfer_backend_choices",)),
    Values(f"{UTILS}:TransferBackend", {"NIXL": "nixl", "FAKE": "fake"}),
    Values(
        f"{UTILS}:KVClassType",
        {
            "KVARGS": "kvargs",
            "MANAGER": "manager",
            "SENDER": "sender",
            "RECEIVER": "receiver",
            "BOOTSTRAP_SERVER": "bootstrap_server",
        },
    ),
    Name(f"{UTILS}:get_kv_class", ("transfer_backend", "class_type")),
    Name("srt/plugins/hook_registry.py:HookRegistry.register", ("target", "hook", "hook_type")),
    Name("srt/plugins/hook_registry.py:HookRegistry.apply_hooks"),
    Values(
        "srt/plugins/hook_registry.py:HookType",
        {"BEFORE": "before", "AFTER": "after", "AROUND": "around", "REPLACE": "replace"},
    ),
    # what it is called with, and what it answers
    Values(
        f"{CONN}:KVPoll",
        {"Failed": 0, "Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3, "Success": 4},
    ),
    Fields(
        f"{CONN}:KVArgs",
        (
            *("pp_rank", "page_size", "kv_cache_dtype_str", "system_dp_rank", "num_draft_entries"),
            *("kv_data_ptrs", "kv_data_lens", "kv_item_lens", "kv_layer_ids"),
            *("aux_data_ptrs", "aux_data_lens", "aux_item_lens", "is_hybrid_mla_backend"),
            *("state_types", "state_data_ptrs", "state_data_lens", "state_item_lens"),
            *("state_layer_ids", "state_dim_per_tensor", "state_slice_outer_counts"),
            "state_conv_shard_groups",
        ),
    ),
    Fields(f"{CONN}:KVTransferMetric", ("transfer_latency_s", "transfer_total_bytes")),
    Name(f"{CONN}:BaseKVManager", ("args", "disaggregation_mode", "server_args")),
    Name(f"{CONN}:BaseKVSender"),
    Name(f"{CONN}:BaseKVReceiver"),
    Passed(f"{COMMON}:CommonKVSender", _taken("transfers.py:SentPrompt")),
    Passed(f"{COMMON}:CommonKVReceiver", _taken("transfers.py:LoadedPrompt")),
    Used(CALLERS, "disagg_kv_sender", f"{CONN}:BaseKVSender", SENDER, OF_REFUSED),
    Used(CALLERS, "kv_receiver", f"{CONN}:BaseKVReceiver", RECEIVER, OF_REFUSED),
    Used(CALLERS, "kv_manager", f"{CONN}:BaseKVManager", MANAGER, OF_REFUSED),
    # what it hooks and asks
    Name(f"{DECODE}:DecodePreallocQueue._send_kv_metadata", ("decode_req", "kv_indices")),
    Name(f"{DECODE}:DecodeTransferQueue._defer_release", ("decode_req",)),
    Mentioned(DECODE, ("deferred_kv_release_timeout",)),
    Name(f"{DECODE}:DecodePreallocQueue._check_if_req_exceed_kv_capacity", ("req",)),
    Name(f"{PREFILL}:PrefillBootstrapQueue.create_sender", ("req",)),
    Name(f"{PREFILL}:SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk", ("req",)),
    Mentioned(
        "srt/arg_groups/field_order.py",
        (
            "enable_hierarchical_cache",
            "enable_fused_qk_norm_rope",
            "enable_lmcache",
            "enable_flexkv",
            "radix_cache_backend",
            "enable_unified_cache_external_linker",
            "enable_streaming_session",
        ),
    ),
    Name(f"{PREFILL}:PrefillBootstrapQueue._check_if_req_exceed_kv_capacity", ("req",)),
    Name(f"{UTILS}:poll_and_all_reduce_attn_cp_tp_group", ("pollers",)),
    Name(f"{UTILS}:MetadataBuffers.set_buf", ("req",)),
    # what its columns are is asked at start
    Name(f"{UTILS}:MetadataBuffers.get_buf_infos"),
    Fields(
        f"{UTILS}:MetadataBuffers",
        ("output_ids", "bootstrap_room", "output_top_logprobs_val", "output_token_logprobs_val"),
    ),
    Mentioned(PREFILL, ("metadata_buffers",)),
    Mentioned(DECODE, ("metadata_buffers",)),
    Mentioned("srt/managers/schedule_batch.py", ("top_logprobs_num",)),
    Name(f"{UPDATER}.release_memory_occupation", ("recv_req",)),
    Name(f"{UPDATER}.resume_memory_occupation", ("recv_req",)),
    Mentioned("srt/managers/scheduler_components/weight_updater.py", ("offload_tags", "scheduler")),
    Fields("srt/managers/io_struct.py:BaseReq", ("rid",)),
    Name("srt/managers/io_struct.py:ReleaseMemoryOccupationReqOutput"),
    Name("srt/managers/io_struct.py:ResumeMemoryOccupationReqOutput"),
    Unchanged(
        "srt/managers/tokenizer_control_mixin.py:TokenizerControlMixin.release_memory_occupation",
        ("dcbcf270d5cfce38",),
    ),
    Name(f"{UTILS}:prepare_abort", ("req", "error_message", "status_code")),
    Name(f"{CONTEXT}:get_parallel"),
    Name(f"{CONTEXT}:get_disagg"),
    Name(f"{CONTEXT}:get_serving"),
    Name(f"{CONTEXT}:get_model"),
    Name(f"{CONTEXT}:get_spec"),
    Mentioned("srt/arg_groups/field_order.py", ("speculative_token_map", "speculative_algorithm")),
    Mentioned(
        "srt/arg_groups/field_order.py",
        ("speculative_draft_model_path", "speculative_draft_model_revision"),
    ),
    Mentioned("srt/models/llama_eagle3.py", ("draft_vocab_size",)),
    Name("srt/speculative/spec_utils.py:load_token_map", ("token_map_path",)),
    Name(f"{CONTEXT}:attention_backends"),
    Mentioned("srt/arg_groups/field_order.py", ("quantization_param_path", "weight_version")),
    Mentioned(
        CONTEXT,
        (
            *("attn_tp_size", "attn_tp_rank", "attn_dp_size", "attn_dp_rank"),
            *("attn_cp_size", "attn_cp_rank"),
            *("attn_dcp_size", "dp_size", "pp_size"),
        ),
    ),
    Mentioned("srt/distributed/parallel_state.py", ("world_group",)),
    Mentioned(
        "srt/arg_groups/field_order.py",
        ("nnodes", "dist_init_addr", "load_balance_method", "api_key"),
    ),
    Mentioned(
        "srt/environ.py",
        (
            "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK",
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE",
            "SGLANG_RUST_SERVER",
            "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX",
        ),
    ),
    Name(f"{DECODE}:DecodePreallocQueue._create_receiver_and_enqueue", ("req", "is_rebootstrap")),
    Name(f"{COMMON}:CommonKVBootstrapServer", ("host", "port")),
    # for which requests an engine of another kind sends too little
    Mentioned(
        "srt/managers/schedule_batch.py",
        (
            *("return_logprob", "return_hidden_states", "return_routed_experts"),
            *("multimodal_inputs", "input_embeds", "origin_input_ids", "output_ids"),
            *("sampling_params", "disagg_kv_sender", "custom_logit_processor"),
        ),
    ),
    # what a prompt's cache depends on, and what a retracted prompt is computed again from
    Mentioned("srt/managers/schedule_batch.py", ("lora_id", "cache_salt", "extra_key")),
    Name("srt/managers/schedule_batch.py:Req.build_rebootstrap_payload"),
    Fields("srt/managers/io_struct.py:GenerateReqInput", ("lora_path", "extra_key", "cache_salt")),
    Mentioned("srt/managers/scheduler.py", ("tp_worker", "model_runner", "lora_manager")),
    # the stream of the steps, which pipeline stages do not wait for before they publish a chunk
    Mentioned("srt/managers/scheduler_pp_mixin.py", ("forward_stream",)),
    Mentioned("srt/lora/lora_manager.py", ("lora_refs",)),
    Fields("srt/lora/lora_registry.py:LoRARef", ("lora_id", "lora_name")),
    Fields("srt/managers/schedule_batch.py:MultimodalInputs", ("mm_items",)),
    Fields("srt/managers/schedule_batch.py:MultimodalDataItem", ("modality", "hash")),
    Mentioned("srt/managers/schedule_batch.py", ("MM_PAD_SHIFT_VALUE",)),
    Name("srt/arg_groups/fields/mm.py:Mm"),
    Name(f"{CONTEXT}:get_mm"),
    Mentioned(
        COMMON,
        (
            *("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
            *("bootstrap_rooms", "bootstrap_room", "dp_rank", "follow_bootstrap_room"),
        ),
    ),
    Imported(Path(__file__).parent, "sglang"),
    Fields(
        "srt/configs/model_config.py:ModelConfig",
        (
            *("from_server_args", "num_hidden_layers", "get_total_num_kv_heads"),
            *("get_swa_num_kv_heads", "swa_attention_layer_ids", "dtype", "hf_config"),
            *("quantization", "vocab_size", "hf_text_config", "model_path", "revision"),
            "context_len",
        ),
    ),
    Mentioned("srt/layers/rotary_embedding/factory.py", ("_ROPE_DICT",)),
    Mentioned("srt/layers/rotary_embedding/yarn.py", ("mscale",)),
    Name("srt/distributed/utils.py:get_pp_indices", ("num_hidden_layers", "pp_rank", "pp_size")),
    Name("srt/utils/network.py:get_local_ip_auto", ("fallback",)),
    # where bytes lie
    Unchanged(f"{POOLS}:MHATokenToKVPool._create_buffers", ("e443a65646164191",)),
    Unchanged(f"{POOLS}:MHATokenToKVPool.get_contiguous_buf_infos", ("6274d371993ad514",)),
    Unchanged(f"{POOLS}:MLATokenToKVPool._create_buffers", ("410dac231897d16f",)),
    Unchanged(f"{POOLS}:MLATokenToKVPool.get_contiguous_buf_infos", ("13155274f816b7e8",)),
    Unchanged(f"{POOLS}:HybridLinearKVPool.get_contiguous_buf_infos", ("9c1de9793d68de84",)),
    Unchanged(f"{POOLS}:HybridLinearKVPool.get_state_buf_infos", ("2552c3d870037038",)),
    Unchanged(f"{POOLS}:MambaPool.get_contiguous_buf_infos", ("ca7e4088996b5b15",)),
    Unchanged(f"{POOLS}:MambaPool._iter_transfer_state_entries", ("50448600ac4065ef",)),
    Unchanged(f"{WINDOWS}:SWAKVPool.get_contiguous_buf_infos", ("97dee9ed328f69ed",)),
    Unchanged(f"{WINDOWS}:SWAKVPool.get_state_buf_infos", ("de58d8adf6cb34c1",)),
)

V4 = "srt/mem_cache/deepseek_v4_memory_pool.py:DeepSeekV4TokenToKVPool"
SPARSE: tuple[Entry, ...] = (
    # when keys of an indexer are rotated
    Mentioned("srt/environ.py", ("SGLANG_DISABLE_DSA_INDEXER_FUSION",)),
    Mentioned("srt/models/deepseek_v2.py", ("indexer_rope_interleave",)),
    Unchanged(
        "srt/layers/attention/dsa/dsa_indexer.py:Indexer._maybe_rotate", ("e63ffba67512b290",)
    ),
    Unchanged(f"{POOLS}:DSATokenToKVPool.get_state_buf_infos", ("80f8dd238f345cc9",)),
    Unchanged(
        "srt/mem_cache/index_key_cache.py:IndexKeyCache.state_buf_infos", ("2db209a094c53f63",)
    ),
    Unchanged(f"{V4}.get_contiguous_buf_infos", ("218f845e7bfe45ed", "e1f7cb3794b8db58")),
    Unchanged(f"{V4}.get_state_buf_infos", ("033c41708bea4e2d", "9b37c41e7af29751")),
    Unchanged(f"{V4}.get_request_state_buf_infos", ("5feed0f89d9d749a",)),
    Unchanged(f"{V4}.get_unified_swa_ring_buf_infos", ("2c417142758d7a7d", "b108d521071c9979")),
)
"""What only models with sparse attention and DeepSeek-V4 use: elsewhere it may differ."""

SPLITS = "srt/mem_cache/dsa_cache_layer_split.py"
SPLIT: tuple[Entry, ...] = (
    # which layers a rank has, and that it lists these alone
    Fields(f"{CONN}:KVArgs", ("prefill_start_layer", "prefill_end_layer")),
    Mentioned("srt/arg_groups/field_order.py", ("enable_dsa_cache_layer_split",)),
    Unchanged(f"{SPLITS}:LayerSplitDSATokenToKVPool._create_buffers", ("4bf2ec646c12caa6",)),
    Unchanged(
        f"{SPLITS}:LayerSplitDSATokenToKVPool.get_contiguous_buf_infos", ("4c8b1c81473223da",)
    ),
    Unchanged(
        f"{SPLITS}:LayerSplitDSATokenToKVPool._owned_local_layer_range", ("ee2b7970a3b3b790",)
    ),
    Unchanged(f"{SPLITS}:LayerSplitIndexKeyCache.state_buf_infos", ("41ce83d33417e1f1",)),
    # that its options pass with a backend of another name
    Name("srt/arg_groups/resolution_hooks.py:register_resolution_hook", ("name",)),
    Mentioned("srt/arg_groups/resolution_hooks.py", ("handle_model_specific_adjustments",)),
    Unchanged(
        "srt/arg_groups/model_override_base.py:ResolvingConfig.__getattr__", ("03ce32d3ce80294c",)
    ),
)
"""What only a sparse cache uses whose layers are split among the ranks of context parallelism."""

PIPELINE = "srt/managers/scheduler_pp_mixin.py:SchedulerPPMixin"
STAGES: tuple[Entry, ...] = (
    # that lists of ids go from stage to stage, each leaving out what it lacks, and then round: see `stages.py`
    Unchanged(f"{PIPELINE}.get_rids", ("7c933f4bdb560481",)),
    Unchanged(f"{PIPELINE}._pp_pd_get_decode_transferred_ids", ("5d9258ef81bc855e",)),
    Unchanged(f"{PIPELINE}._pp_pd_send_consensus_release_ids", ("69a0a4b6eb70c950",)),
    Unchanged(f"{PIPELINE}.process_decode_transfer_queue", ("a60ed587ffcdaf1b",)),
)
"""What only decode engines with pipeline parallelism use."""
