"""What the vLLM integration uses of vLLM, for `contract.py`: names, and the code that says where bytes lie."""

from __future__ import annotations

from pathlib import Path

from kvconnector.integrations.contract import (
    Entry,
    Fields,
    Implemented,
    Imported,
    Mentioned,
    Name,
    Unchanged,
)

CONNECTOR = "distributed/kv_transfer/kv_connector"
SPECS = "v1/kv_cache_interface.py"
OWN = Path(__file__).parent

MULTI = f"{CONNECTOR}/v1/multi_connector.py"

ENTRIES: tuple[Entry, ...] = (
    Imported(OWN, "vllm"),
    Implemented(f"{CONNECTOR}/v1/base.py:KVConnectorBase_V1", OWN / "connector.py", "KVConnector"),
    Name(f"{CONNECTOR}/factory.py:KVConnectorFactory.register_connector", ("name", "module_path")),
    Fields(f"{CONNECTOR}/factory.py:KVConnectorFactory", ("_registry",)),
    Mentioned("config/kv_transfer.py", ("kv_producer", "kv_consumer", "kv_both")),
    Fields(
        "config/kv_transfer.py:KVTransferConfig",
        ("engine_id", "kv_role", "kv_connector_extra_config", "get_from_extra_config"),
    ),
    Fields(
        "config/model.py:ModelConfig",
        (
            *("model", "revision", "dtype", "max_model_len", "hf_text_config"),
            *("get_total_num_hidden_layers", "multimodal_config", "uses_mrope"),
        ),
    ),
    Fields(
        "config/parallel.py:ParallelConfig",
        (
            *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_index"),
            *("prefill_context_parallel_size", "decode_context_parallel_size"),
            *("data_parallel_size", "distributed_executor_backend", "world_size"),
        ),
    ),
    Fields(
        "config/vllm.py:VllmConfig",
        ("max_concurrent_batches", "num_prefill_lookahead_tokens", "aux_output_config"),
    ),
    Fields("config/aux_output.py:AuxOutputConfig", ("enabled",)),
    Fields("config/multimodal.py:MultiModalConfig", ("video_pruning_rate",)),
    Fields(f"{MULTI}:MultiConnector", ("sub_connectors",)),
    Fields(f"{SPECS}:KVCacheConfig", ("num_blocks", "kv_cache_groups")),
    Fields("v1/outputs.py:KVConnectorOutput", ("finished_sending", "finished_recving")),
    Fields(
        "v1/core/sched/output.py:SchedulerOutput",
        ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"),
    ),
    Unchanged(f"{SPECS}:AttentionSpec.page_size_bytes", ("93ce186f507dfdf2",)),
    Unchanged(f"{SPECS}:AttentionSpec.unpadded_page_size_bytes", ("91a6da2723e8877b",)),
    Unchanged(f"{SPECS}:AttentionSpec.real_page_size_bytes", ("704f95ad13042634",)),
    Unchanged(f"{SPECS}:MambaSpec.page_size_bytes", ("efc73b97d9d8ef40",)),
    Unchanged(f"{SPECS}:UniformTypeKVCacheSpecs.page_size_bytes", ("40f014a2aba683d5",)),
)

RANGES: tuple[Entry, ...] = (
    Fields(f"{MULTI}:MultiKVConnectorMetadata", ("metadata", "extra_async_saves")),
    Implemented(f"{MULTI}:MultiConnector", OWN / "ranges.py", "RangeConnector"),
    Fields(f"{MULTI}:MultiConnector", ("_connectors",)),
)
"""What our `MultiConnector` uses of vLLM's: without it, that one alone is refused."""

EC = "distributed/ec_transfer/ec_connector"
ENCODER: tuple[Entry, ...] = (
    Imported(OWN / "encoder", "vllm"),
    Implemented(f"{EC}/base.py:ECConnectorBase", OWN / "encoder/connector.py", "EncoderConnector"),
    Fields(
        "config/ec_transfer.py:ECTransferConfig",
        ("engine_id", "ec_role", "ec_connector_extra_config", "mm_encoder_output_widths"),
    ),
    Mentioned("config/ec_transfer.py", ("ec_producer", "ec_consumer", "ec_both")),
)
"""What our `EncoderConnector` uses besides: without it, that one alone is refused."""
