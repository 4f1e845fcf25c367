"""The classes that SGLang requires of a transfer backend. Only this file imports SGLang's transfer interface.

`transfers.py` has the life of a request. SGLang's calls lack some of what a transfer needs, and hooks in SGLang's
queues write that to its sender or receiver. `note_length` adds the lengths of the prompt and of the window before
`send_metadata`. `create_sender` and `create_receiver` add what the prompt's cache depends on.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from sglang.srt.arg_groups.fields.mm import Mm
from sglang.srt.configs.mamba_utils import mamba2_state_dtype
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVArgs,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, prepare_abort
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.layers.rotary_embedding import factory as rotary_embeddings
from sglang.srt.layers.rotary_embedding.mrope import YaRNScalingMRotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqOutput,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import (
    attention_backends,
    get_disagg,
    get_mm,
    get_model,
    get_parallel,
    get_serving,
    get_spec,
)
from sglang.srt.speculative.spec_utils import load_token_map
from sglang.srt.utils.common import cpu_has_amx_support, is_cuda
from sglang.srt.utils.network import get_local_ip_auto
from torch import distributed

from kvconnector.control.address import HostPort, parse_address
from kvconnector.errors import GeometryError, LocalError
from kvconnector.integrations.identity import Identity, content_digest
from kvconnector.integrations.model_values import (
    config_fields,
    longrope_length,
    position_encodings,
    revision_of,
)
from kvconnector.integrations.sglang.caches import Heads, Shape
from kvconnector.integrations.sglang.fields import problem_of
from kvconnector.integrations.sglang.media import feature_namespace
from kvconnector.integrations.sglang.metadata import forget_earlier_request, name_columns
from kvconnector.integrations.sglang.numbers import ELEMENTS, numbers_of_pool
from kvconnector.integrations.sglang.prompt_end import (
    context_of,
    name_of_weights,
    prompt_end_of,
)
from kvconnector.integrations.sglang.rank import RankTransfers
from kvconnector.integrations.sglang.rotation import fused_encodings, rotates_with_norms
from kvconnector.integrations.sglang.settings import (
    cache_facts,
    connector_config,
    refuse_unsupported,
)
from kvconnector.integrations.sglang.shared import NOT_RELEASED, check_release
from kvconnector.integrations.sglang.split import check_option
from kvconnector.integrations.sglang.stages import list_successes, release_alike
from kvconnector.integrations.sglang.transfers import (
    LoadedPrompt,
    SentPrompt,
    agree,
    next_room,
)
from kvconnector.topology import ModelDescription

logger = logging.getLogger(__name__)

DECODE_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
PREFILL_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
CREATE_RECEIVER = f"{DECODE_QUEUE}._create_receiver_and_enqueue"
CREATE_SENDER = f"{PREFILL_QUEUE}.create_sender"
SEND_METADATA = f"{DECODE_QUEUE}._send_kv_metadata"
DEFER_RELEASE = "sglang.srt.disaggregation.decode.DecodeTransferQueue._defer_release"
BUFFERS = "sglang.srt.disaggregation.utils.MetadataBuffers"
METADATA, COLUMNS = f"{BUFFERS}.set_buf", f"{BUFFERS}.get_buf_infos"
REDUCTION = "sglang.srt.disaggregation.utils.poll_and_all_reduce_attn_cp_tp_group"
STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
LIST_ENDED, RELEASE_ENDED = f"{STAGES}.get_rids", f"{STAGES}.process_decode_transfer_queue"
ADMISSIONS = (
    f"{DECODE_QUEUE}._check_if_req_exceed_kv_capacity",
    f"{PREFILL_QUEUE}._check_if_req_exceed_kv_capacity",
)
"""What both queues call with each new request, before anything else looks at its fields."""
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
RELEASE, RESUME = f"{UPDATER}.release_memory_occupation", f"{UPDATER}.resume_memory_occupation"
MAMBA_2 = ("granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2")
"""Model types whose recurrent layers are SGLang's `MambaMixer2`."""
DOTS_3 = "dots3_note"
"""The model type whose indexer turns pairs of neighbours without a field that says so."""

FEATURE_PACKAGES = (
    *("sglang", "torch", "torchvision", "transformers", "pillow", "numpy"),
    *("decord", "decord2", "torchcodec", "av", "opencv-python-headless"),
)
FEATURE_OPTIONS = (
    *("model_path", "revision", "tokenizer_path", "trust_remote_code"),
    *("dtype", "rl_on_policy_target"),
)
"""What else decides which numbers an image becomes: packages, and options that SGLang lists elsewhere."""


class PrefillInfos:
    """SGLang's table of prefill engines. Its answer is the same for each: our workers greet engines themselves."""

    def get(self, bootstrap_addr: str) -> SimpleNamespace:
        """Return what SGLang must know of an engine before a request's receiver can begin."""
        return SimpleNamespace(dp_size=1)


class KVManager(RankTransfers, BaseKVManager):
    """One rank's caches and transfers. SGLang passes the same arguments to all backends.

    Raises:
        KVConnectorError: A setting is wrong, or this deployment's caches cannot be transferred.
    """

    def __init__(
        self, args: KVArgs, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        self.prefill_info_table = PrefillInfos()
        is_prefill = disaggregation_mode.value == "prefill"
        if _is_sparse(args):
            check_release("SPARSE")
        refuse_unsupported(_facts(args, server_args, is_prefill=is_prefill))
        model = ModelConfig.from_server_args(server_args)
        shape = _shape(args, server_args, model, has_latent=is_mla_backend, is_prefill=is_prefill)
        parallel = get_parallel()
        if parallel.pp_size > 1 and not is_prefill:
            check_release("STAGES")
            hook_stages()
        self._group = group = parallel.world_group.cpu_group
        own = secrets.token_hex(8), get_disagg().disaggregation_bootstrap_port
        first, *_ = gather(msgspec.json.encode(own), group)
        token, port = msgspec.json.decode(first, type=tuple[str, int])
        dp_rank, dp_size = _data_parallel(args)
        config = connector_config(
            is_prefill=is_prefill,
            host=get_serving().host,
            bootstrap_port=port,
            unique_name=f"sglang-decode-{token}",
            own_address=get_local_ip_auto(fallback="127.0.0.1"),
            environ=os.environ,
            dp_rank=dp_rank,
            dp_size=dp_size,
            num_nodes=parallel.nnodes,
        )
        must_query = bool(envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get())
        super().__init__(
            config,
            args=args,
            shape=shape,
            model=description(
                model,
                shape,
                server_args.served_model_name or server_args.model_path,
                rotates_with_norms=rotates_with_norms(
                    server_args.device,
                    is_asked=bool(server_args.enable_fused_qk_norm_rope),
                    is_rocm=bool(torch.version.hip),
                ),
            ),
            gather=lambda payload: of_engine(payload, dp_rank, group),
            directory_port=port + 1 + dp_rank,
            must_query=must_query,
            dp_rank=dp_rank,
            has_metrics=bool(getattr(server_args, "enable_metrics", False)),
            has_spans=bool(getattr(server_args, "enable_trace", False)),
            api_key=get_serving().api_key or "",
        )
        self.dp_size = dp_size
        self.media_namespace = _namespace_of(server_args)
        self.enable_deferred_decode_kv_release = not is_prefill
        if is_prefill:
            method = parallel.load_balance_method
            self.follows_rooms = method == "follow_bootstrap_room" and not must_query
            self._register(port, group)

    def _register(self, port: int, group: distributed.ProcessGroup) -> None:
        """Register this rank with its server's registry, under its engine's directory service."""
        found = of_engine(msgspec.json.encode(self.directory), self.dp_rank, group)
        (directory,) = filter(None, (msgspec.json.decode(each, type=str) for each in found))
        parallel, args = get_parallel(), self.kv_args
        where = parse_address(directory)
        is_attention = parallel.attn_dp_size > 1
        row = {
            "attn_tp_size": parallel.attn_tp_size,
            "attn_tp_rank": parallel.attn_tp_rank,
            "attn_cp_size": parallel.attn_cp_size,
            "attn_cp_rank": parallel.attn_cp_rank,
            "attn_dp_size": self.dp_size if is_attention else 1,
            "attn_dp_rank": self.dp_rank if is_attention else 0,
            "pp_size": parallel.pp_size,
            "pp_rank": args.pp_rank,
            "system_dp_size": 1 if is_attention else self.dp_size,
            "system_dp_rank": 0 if is_attention else self.dp_rank,
            "rank_ip": where.host,
            "rank_port": where.port,
            "page_size": args.page_size,
            "kv_cache_dtype": args.kv_cache_dtype_str,
            "load_balance_method": parallel.load_balance_method,
            "prefill_http_port": get_serving().port,
        }
        host = get_serving().host
        if parallel.nnodes > 1 and parallel.dist_init_addr:
            host = parallel.dist_init_addr.rpartition(":")[0].strip("[]")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - wildcards
        self.register(HostPort(host, port), row)

    def why_none_may_sleep(self) -> str:
        """End the transfers of all ranks, each of which calls this. Returns "", or why no rank may release its pools'
        memory, which not all could let go of. Then transfers go on.
        """
        found = gather(msgspec.json.encode(self.why_in_use()), self._group)
        problems = [text for each in found if (text := msgspec.json.decode(each, type=str))]
        if problems:
            self.register_buffer_to_engine()
        return "; ".join(problems)

    def weight_version(self) -> str:
        """Return `--weight-version`, or what the last update of the weights named."""
        return str(getattr(get_serving(), "weight_version", None) or "")

    def register_to_bootstrap(self) -> None:
        """Do nothing: the rank has registered."""

    def submit_prefill_recompute(self, *_: object) -> None:
        """Do nothing: the receiver has asked the prefill server; see `recompute.py`."""


class KVSender(SentPrompt, BaseKVSender):
    """One request on one rank of the prefill engine."""

    def get_transfer_metric(self) -> KVTransferMetric:
        """Return the bytes of the prompt's tokens in this rank's KV pools, and how long their transfer took.

        A decode engine that has cached a part of the prompt reads less.
        """
        page_bytes = sum(self.kv_mgr.kv_args.kv_item_lens)
        nbytes = self.num_tokens * page_bytes // self.kv_mgr.layout.page_size
        return KVTransferMetric(transfer_latency_s=self.held_s or None, transfer_total_bytes=nbytes)


class KVReceiver(LoadedPrompt, BaseKVReceiver):
    """One request on one rank of the decode engine."""


class BootstrapServer(CommonKVBootstrapServer):
    """SGLang's own registry of prefill ranks: see `registry.py`."""


CLASSES = {
    "kvargs": KVArgs,
    "manager": KVManager,
    "sender": KVSender,
    "receiver": KVReceiver,
    "bootstrap_server": BootstrapServer,
}
"""The backend's classes by the values of SGLang's `KVClassType`."""


@cache
def hook_queues() -> None:
    """Put our hooks into SGLang's queues, once in a process. This is done when a queue asks for the class of its
    `KVArgs`: it lists the columns of its metadata in them next, and `name_columns` must be in place by then.
    """
    HookRegistry.register(COLUMNS, name_columns, HookType.AFTER)
    HookRegistry.register(SEND_METADATA, note_length, HookType.BEFORE)
    HookRegistry.register(DEFER_RELEASE, keep_until_safe, HookType.BEFORE)
    HookRegistry.register(METADATA, forget_earlier_request, HookType.BEFORE)
    HookRegistry.register(METADATA, note_end, HookType.BEFORE)
    HookRegistry.register(CREATE_SENDER, create_sender, HookType.AROUND)
    HookRegistry.register(CREATE_RECEIVER, create_receiver, HookType.AROUND)
    HookRegistry.register(REDUCTION, agree, HookType.AROUND)
    HookRegistry.register(RELEASE, release_memory, HookType.AROUND)
    HookRegistry.register(RESUME, resume_memory, HookType.AROUND)
    for method in ADMISSIONS:
        HookRegistry.register(method, refuse_malformed, HookType.AROUND)
    HookRegistry.apply_hooks()


@cache
def hook_stages() -> None:
    """Put our hooks between the pipeline stages of a decode engine, once in a process."""
    HookRegistry.register(LIST_ENDED, list_successes, HookType.AROUND)
    HookRegistry.register(RELEASE_ENDED, release_alike, HookType.AROUND)
    HookRegistry.apply_hooks()


def refuse_malformed(original: Callable[[Any, Any], bool], queue: Any, req: Any) -> bool:
    """Answer a request whose fields are malformed with an error, and return True, as SGLang does for one that is too
    long: a hook around `_check_if_req_exceed_kv_capacity`.
    """
    problem = problem_of(
        req,
        is_prefill=not isinstance(queue, DecodePreallocQueue),
        max_top_logprobs=queue.metadata_buffers.output_top_logprobs_val.shape[1],
    )
    if problem is None or req.bootstrap_host == FAKE_BOOTSTRAP_HOST:
        is_refused = original(queue, req)
        if not is_refused:
            _note_trace(queue, req)
        return is_refused
    problem = f"Request {req.rid}: {problem}"
    logger.error(problem)
    prepare_abort(req, problem, status_code=HTTPStatus.BAD_REQUEST)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)
    return True


def release_memory(original: Callable[[Any, Any], Any], updater: Any, request: Any) -> Any:
    """Release no memory, on no rank, if a transfer on one of them does not end: a hook around SGLang's method of the
    scheduler, which an exception would end. The request's answer says so (see `release_or_raise`).
    """
    manager = _manager_of(updater.scheduler)
    tags = request.tags or GPU_MEMORY_ALL_TYPES
    if manager is None or GPU_MEMORY_TYPE_KV_CACHE not in tags:
        return original(updater, request)
    problem = manager.why_none_may_sleep()
    if not problem:
        return original(updater, request)
    logger.error("no memory is released: %s", problem)
    return ReleaseMemoryOccupationReqOutput(rid=f"{NOT_RELEASED}{problem}")


def resume_memory(original: Callable[[Any, Any], Any], updater: Any, request: Any) -> Any:
    """Resume only what was released, since SGLang's scheduler ends if that is less than what it is to resume: a hook
    around its method.
    """
    asked = request.tags or GPU_MEMORY_ALL_TYPES
    released = [tag for tag in asked if tag in updater.offload_tags]
    if len(released) == len(asked):
        return original(updater, request)
    logger.warning("of %s only %s was released, and is resumed", asked, released or "nothing")
    if not released:
        return ResumeMemoryOccupationReqOutput()
    return original(updater, msgspec.structs.replace(request, tags=released))


def _manager_of(scheduler: Any) -> KVManager | None:
    """Return the rank's manager, None if it has none."""
    for name in ("disagg_decode_prealloc_queue", "disagg_prefill_bootstrap_queue"):
        manager = getattr(getattr(scheduler, name, None), "kv_manager", None)
        if isinstance(manager, KVManager):
            return manager
    return None


def create_sender(
    original: Callable[..., bool], queue: Any, req: Any, *arguments: Any, **options: Any
) -> bool:
    """Begin with what the end of a prompt will say of it, and name the stream that writes its chunks: a hook around
    SGLang's method of this name.
    """
    is_created = original(queue, req, *arguments, **options)
    sender = getattr(req, "disagg_kv_sender", None)
    if is_created and isinstance(sender, SentPrompt):
        sender.identity = _begin_identity(queue, req, req.origin_input_ids)
        # pipeline stages run their steps on this stream, and publish a chunk right after its step was launched
        if get_parallel().pp_size > 1:
            sender.stream = queue.scheduler.forward_stream
    return is_created


def _begin_identity(queue: Any, req: Any, tokens: Sequence[int]) -> Callable[[], Identity]:
    """Begin to make the identity of a request's prompt, or of what it had so far when SGLang retracted it."""
    manager: KVManager = queue.kv_manager
    context = context_of(
        req, adapter=_adapter_of(queue.scheduler, req), namespace=manager.media_namespace
    )
    return manager.identities.begin(tokens, context, req.input_embeds)


def _adapter_of(scheduler: Any, req: Any) -> str:
    """Return the name by which clients ask for a request's adapter, which has another id in each server; "" if it has
    none, or SGLang keeps the names elsewhere.
    """
    if req.lora_id is None:
        return ""
    try:
        loaded = scheduler.tp_worker.model_runner.lora_manager.lora_refs
        return loaded[req.lora_id].lora_name or ""
    except (AttributeError, KeyError):
        return ""


def create_receiver(
    original: Callable[..., Any], queue: Any, req: Any, is_rebootstrap: bool = False
) -> Any:
    """Give the receiver what its constructor has no arguments for: a hook around `_create_receiver_and_enqueue`.

    That is the prefill rank that the router named, what the prompt's cache depends on and, if SGLang retracted the
    request and has its prompt computed again (`is_rebootstrap`), what to ask the prefill server for. This is a transfer
    of its own, with a room of its own.
    """
    is_again = is_rebootstrap and req.bootstrap_host != FAKE_BOOTSTRAP_HOST
    if is_again and req.bootstrap_room is not None:
        req.bootstrap_room = next_room(req.bootstrap_room)
        _note_trace(queue, req)
    decode_req = original(queue, req, is_rebootstrap=is_rebootstrap)
    receiver = decode_req.kv_receiver
    if not isinstance(receiver, LoadedPrompt):
        return decode_req
    receiver.dp_rank = req.disagg_prefill_dp_rank
    if not is_again:
        receiver.identity = _begin_identity(queue, req, req.origin_input_ids)
        return decode_req
    problem, payload = _recomputation_of(queue, req, receiver)
    if problem:
        receiver.fail(LocalError(problem, rid=req.rid))
        return decode_req
    receiver.identity = _begin_identity(queue, req, payload["input_ids"])
    if queue.kv_manager.leads:
        receiver.recompute = payload
    return decode_req


def _recomputation_of(
    queue: Any, req: Any, receiver: LoadedPrompt
) -> tuple[str, Mapping[str, Any]]:
    """Return why a retracted prompt cannot be computed again, or "" and what to ask its prefill server for.

    SGLang's own payload lacks adapters, media and embeddings, so the server would compute another prompt. It also has
    the request's own id each time, and the server refuses a second request with an id until the first one has ended.
    """
    if receiver.is_of_named_engine:
        return (
            "a retracted prompt is computed again by an SGLang server only, and this request's prefill engine is of"
            " another kind"
        ), {}
    if req.multimodal_inputs is not None or req.input_embeds is not None:
        return (
            "SGLang would have a prompt with images or embeddings computed again without them",
            {},
        )
    payload = req.build_rebootstrap_payload()
    # it begins with the request's own id, since SGLang aborts all requests whose ids begin with the one that it gets
    payload["rid"] = f"{req.rid}-{next(queue.kv_manager.numbers)}"
    if req.lora_id is None:
        return "", payload
    adapter = _adapter_of(queue.scheduler, req)
    if not adapter:
        return "a retracted prompt's adapter is not loaded any more", {}
    # each server appends its own id of the adapter
    key = (req.extra_key or "").removesuffix(req.lora_id) or None
    return "", payload | {"lora_path": adapter, "extra_key": key}


def _note_trace(queue: Any, req: Any) -> None:
    """Record the trace of a request. If a release keeps it elsewhere, its spans are in no trace."""
    stats = queue.kv_manager.stats
    if stats.spans is not None:
        trace = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
        stats.note_trace(req.bootstrap_room, getattr(trace, "root_span_context", None))


def note_length(queue: Any, decode_req: Any, kv_indices: Any, *_: object, **options: Any) -> None:
    """Record a prompt's length, window and stream on its receiver: a hook before `_send_kv_metadata`.

    `kv_indices` has one entry for each token after the cached prefix, which has `decode_prefix_len` tokens.
    """
    receiver, scheduler = decode_req.kv_receiver, queue.scheduler
    receiver.num_tokens = len(kv_indices) + (options.get("decode_prefix_len") or 0)
    if isinstance(receiver, LoadedPrompt):
        receiver.vocab_size = scheduler.model_config.vocab_size
    receiver.window_tokens = scheduler.sliding_window_size
    # with overlapped scheduling, a step that is still running may write to blocks that were freed after it began
    receiver.stream = scheduler.forward_stream if scheduler.enable_overlap else None


def keep_until_safe(queue: Any, decode_req: Any) -> None:
    """Let a failed request keep its pages until nothing writes to them, however long that takes: a hook before
    `_defer_release`. SGLang would free them after a time, which also passes while this process is stopped. A load of
    ours ends by deadlines of its own.
    """
    if isinstance(decode_req.kv_receiver, LoadedPrompt):
        queue.deferred_kv_release_timeout = math.inf


def note_end(buffers: Any, req: Any) -> None:
    """Record the end of a prompt on its sender: a hook before `set_buf`, which fills the row of metadata."""
    sender = req.disagg_kv_sender
    if isinstance(sender, SentPrompt) and sender.identity is not None:
        sender.prompt_tokens = len(req.origin_input_ids)
        versions = {*sender.weights, sender.kv_mgr.weight_version()}
        sender.prompt_end = prompt_end_of(req, sender.identity(), name_of_weights(versions))


def gather(payload: bytes, group: distributed.ProcessGroup) -> list[bytes]:
    """Exchange JSON texts between all ranks. The group's own timeout bounds the wait.

    Args:
        payload: This rank's text, not empty.
        group: All ranks of the engine.

    Returns:
        The ranks' texts in rank order, padded with spaces to one length.
    """
    longest = torch.tensor(len(payload))
    distributed.all_reduce(longest, distributed.ReduceOp.MAX, group=group)
    own = torch.frombuffer(bytearray(payload.ljust(int(longest))), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, own, group=group)
    return [part.numpy().tobytes() for part in parts]


def of_engine(payload: bytes, dp_rank: int, group: distributed.ProcessGroup) -> list[bytes]:
    """Exchange JSON texts between the ranks of one data-parallel rank. All ranks of the group call this.

    Args:
        payload: This rank's text.
        dp_rank: This rank's data-parallel rank.
        group: All ranks of the server, or of a replica.

    Returns:
        The texts of the ranks of this one's engine, in rank order.
    """
    own = msgspec.json.encode((dp_rank, msgspec.Raw(payload)))
    texts = [msgspec.json.decode(each, type=tuple[int, msgspec.Raw]) for each in gather(own, group)]
    return [bytes(text) for rank, text in texts if rank == dp_rank]


def _data_parallel(args: KVArgs) -> tuple[int, int]:
    """Return the data-parallel rank and how many there are: of attention, or of whole replicas."""
    parallel = get_parallel()
    size = max(parallel.dp_size, parallel.attn_dp_size)  # 0.5.21 sets both for attention
    if parallel.attn_dp_size > 1:
        return parallel.attn_dp_rank, size
    return args.system_dp_rank or 0, size


def _facts(args: KVArgs, server_args: Any, *, is_prefill: bool) -> dict[str, object]:
    parallel, disagg = get_parallel(), get_disagg()
    pool = os.environ.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL")
    layout = str(envs.SGLANG_AITER_KV_CACHE_LAYOUT.get()).lower()
    is_compressed = getattr(args, "mla_compression_ratios", None) is not None
    state_dtype = str(envs.SGLANG_DSV4_COMPRESS_STATE_DTYPE.get()).strip().lower()
    return {
        # SGLang lists the values of nvfp4 and fp4_mx_block16 without their scales
        "kv_cache_dtype": (
            "" if args.kv_cache_dtype_str in {"auto", *ELEMENTS} else args.kv_cache_dtype_str
        ),
        # K and V are stored in tiles there, where neither a partly filled page nor a single head is a range of bytes
        "SGLANG_AITER_KV_CACHE_LAYOUT": "" if layout == "nhd" else layout,
        # a ring of 16 such states has as many bytes as one of 8 in float32, and SGLang lists neither number nor type
        "SGLANG_DSV4_COMPRESS_STATE_DTYPE": (
            state_dtype if is_compressed and state_dtype not in {"float32", "fp32"} else ""
        ),
        # each rank then has a registry of its own
        "SGLANG_RUST_SERVER with data-parallel attention": (
            parallel.attn_dp_size > 1 and bool(envs.SGLANG_RUST_SERVER.get())
        ),
        # a failed request's pages would be free while a load writes to them
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE off": not (
            is_prefill or envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
        ),
        # its recurrent states are split among ranks whose attention is not
        "enable_cp_tp_group_sharing": getattr(parallel, "enable_cp_tp_group_sharing", False),
        # the number of data-parallel ranks changes
        "max_ep_size": getattr(parallel, "max_ep_size", None),
        "ep_join_mode": getattr(parallel, "ep_join_mode", None),
        # each rank of a prefill engine has a copy of the caches, or some of the layers (`split.py`). In a decode
        # engine, and in a model with both latents and recurrent states, SGLang splits the tokens over the ranks
        "attn_cp_size": (
            parallel.attn_cp_size if not is_prefill or args.is_hybrid_mla_backend else 1
        ),
        "dcp_size": parallel.attn_dcp_size,
        "enable_kv_cache_sharding": getattr(
            parallel, "enable_kv_cache_sharding", False
        ),  # since 0.5.22
        "enable_pd_role_switch": disagg.enable_pd_role_switch,
        # its digest covers whole pages and a cached prefix, but only tokens that the decode engine lacks are read
        "disaggregation_enable_kv_checksum": disagg.disaggregation_enable_kv_checksum,
        **cache_facts(
            is_prefill=is_prefill,
            states=args.state_types,
            page_size=args.page_size,
            has_host_cache=bool(server_args.enable_hierarchical_cache),
            has_radix_cache=bool(disagg.disaggregation_decode_enable_radix_cache),
            early_send=(
                SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk
                if envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.get()
                else None
            ),
        ),
        # some load a prefix while it is published as one that is cached, and of others nobody has read when they write
        "enable_flexkv": server_args.enable_flexkv,
        "radix_cache_backend": server_args.radix_cache_backend,
        "enable_lmcache": server_args.enable_lmcache,
        "enable_unified_cache_external_linker": server_args.enable_unified_cache_external_linker,
        "enable_hisparse": server_args.enable_hisparse,
        # a decode engine would end at a session's second turn, for which it allocates pages again
        "enable_streaming_session": server_args.enable_streaming_session,
        "metadata on a GPU": pool == "INTRA_NODE_NVLINK",
        # their kernels have other pages there
        "sparse attention on ROCm": bool(torch.version.hip) and _is_sparse(args),
        "SGLANG_OPT_SM120_DIRECT_SWA_KV": (
            _is_sparse(args) and bool(envs.SGLANG_OPT_SM120_DIRECT_SWA_KV.get())
        ),
    }


def _namespace_of(server_args: Any) -> str:
    """Return `feature_namespace` of this server; "" also where encoders of their own send what media become."""
    if getattr(get_disagg(), "language_only", False):
        return ""
    options = get_mm()
    device = server_args.device
    made_by = [
        *map(_installed, FEATURE_PACKAGES),
        *(getattr(server_args, name, None) for name in FEATURE_OPTIONS),
        torch.cuda.get_device_name() if device == "cuda" else device,
        torch.backends.cpu.get_cpu_capability(),
    ]
    found = {name: getattr(options, name, None) for name in Mm.__struct_fields__}
    return feature_namespace(found, os.environ, made_by=made_by)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _is_sparse(args: KVArgs) -> bool:
    return "dsa" in args.state_types or getattr(args, "mla_compression_ratios", None) is not None


def description(
    model: ModelConfig, shape: Shape, name: str, *, rotates_with_norms: bool = False
) -> ModelDescription:
    """Return what another engine must have in common with this one, beside its cache's shape.

    Args:
        model: SGLang's configuration of the model.
        shape: The rank's shape.
        name: The model's name.
        rotates_with_norms: As `rotation.rotates_with_norms` says.
    """
    config = model.hf_text_config
    fields = config_fields(config)
    if (length := longrope_length(config)) is not None:
        # SGLang takes the long factors for a whole batch if one of its tokens is beyond that length
        is_short = model.context_len <= length
        fields += (("longrope factors", "short_factor" if is_short else "of each batch"),)
    return ModelDescription(
        model=name,
        dtype=shape.dtype,
        num_layers=shape.num_layers,
        position_encodings=(
            fused_encodings(config)
            if rotates_with_norms
            else position_encodings(config, yarn_scale=_yarn_scale())
        ),
        revision=revision_of(model.model_path, model.revision),
        config=fields,
    )


def _yarn_scale() -> float | None:
    """Return by how much the loaded model's YaRN multiplies; None without it, or if its layers differ in that.

    Most models leave `attention_factor` out, which others use, so the modules say it and not the configuration.
    """
    scales = {
        each.mscale
        for each in rotary_embeddings._ROPE_DICT.values()
        if isinstance(each, YaRNScalingRotaryEmbedding | YaRNScalingMRotaryEmbedding)
    }
    return scales.pop() if len(scales) == 1 else None


def _shape(
    args: KVArgs, server_args: Any, model: ModelConfig, *, has_latent: bool, is_prefill: bool
) -> Shape:
    parallel = get_parallel()
    tp_rank, tp_size = parallel.attn_tp_rank, parallel.attn_tp_size
    pp_rank, pp_size = args.pp_rank, parallel.pp_size
    cp_rank, cp_size = parallel.attn_cp_rank, parallel.attn_cp_size
    num_layers = model.num_hidden_layers
    stage = range(*get_pp_indices(num_layers, pp_rank, pp_size))
    is_split = bool(getattr(parallel, "enable_dsa_cache_layer_split", False))
    if is_split:
        check_release("SPLIT")
        check_option(
            is_prefill=is_prefill,
            states=args.state_types,
            num_ranks=cp_size,
            num_layers=num_layers,
        )
        # the ranks of context parallelism are stages: see `split.py`
        stage = range(args.prefill_start_layer, args.prefill_end_layer)
        pp_rank, pp_size = pp_rank * cp_size + cp_rank, pp_size * cp_size
    has_latent = has_latent or args.is_hybrid_mla_backend
    windows: set[int] = set()
    if "swa" in args.state_types:
        windows = {*(model.swa_attention_layer_ids or ())}
    dtype = args.kv_cache_dtype_str
    dtype = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    kv_heads = 1 if has_latent else model.get_total_num_kv_heads()
    layout = getattr(args, "kv_layout", None)  # since 0.5.23
    device = server_args.device
    if device == "cpu" and is_prefill and not has_latent and tp_size > kv_heads:
        raise GeometryError(
            "on a CPU SGLang adds heads of zeros if there are more ranks than KV heads, and kvconnector"
            " cannot read from such ranks",
            heads=kv_heads,
            tp_size=tp_size,
        )
    shape = Shape(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        is_prefill=is_prefill,
        replica=0 if is_split else cp_rank,
        is_split=is_split,
        num_layers=num_layers,
        kv_heads=kv_heads,
        window_heads=model.get_swa_num_kv_heads(1),
        kv_layers=[layer for layer in stage if layer not in windows],
        window_layers=[layer for layer in stage if layer in windows],
        has_latent=has_latent,
        device="cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}",
        dtype=f"{dtype}/{layout}" if layout else dtype,
        accumulates_c128=bool(envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get()),
        numbers=numbers_of_pool(
            dtype,
            device="cpu" if device == "cpu" else "cuda",
            backends=attention_backends(),
            has_latent=has_latent,
            is_scaled=_is_scaled(model),
        ),
        index_element=_index_element(model.hf_text_config),
        seed_element=_seed_element(server_args),
    )
    if "mamba" not in args.state_types:
        return shape
    types = mamba2_state_dtype(model.hf_config)
    names = [str(each).removeprefix("torch.") for each in (types.conv, types.temporal)]
    transposes = device == "cpu" and cpu_has_amx_support()
    if transposes:
        names.append("amx")
    shape = replace(shape, state_element="_".join(("states", *names)), is_transposed=transposes)
    if model.hf_config.model_type not in MAMBA_2:
        return shape
    return replace(shape, conv_heads=_conv_heads(model.hf_config, shape))


def _index_element(config: Any) -> str:
    """Return which numbers an indexer's keys are. SGLang rotates them by Hadamard's matrix, unless it projects them
    together with their weights. That is done on CUDA, if position encodings turn pairs of neighbours, as in GLM-5.x.
    """
    # DeepSeek-V3.2 has no such field, and turns the first half with the second
    is_dots = getattr(config, "model_type", "") == DOTS_3
    has_pairs = getattr(config, "indexer_rope_interleave", is_dots)
    is_fused = is_cuda() and has_pairs and not envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.get()
    return "index_keys" if is_fused else "rotated_index_keys"


def _seed_element(server_args: Any) -> str:
    """Return by which numbers a draft model's tokens are named: by places in a list of frequent ones, if it has one.

    An engine whose list is shorter than such a number would end. EAGLE3's heads have their lists among their weights,
    so only the length is known here.
    """
    spec = get_spec()
    if spec.speculative_algorithm == "EAGLE3":
        draft = ModelConfig.from_server_args(
            server_args,
            model_path=spec.speculative_draft_model_path,
            model_revision=spec.speculative_draft_model_revision,
            is_draft_model=True,
        )
        size = getattr(draft.hf_config, "draft_vocab_size", None) or draft.vocab_size
        return f"draft_tokens_of_{size}"
    if spec.speculative_token_map is None:
        return "draft_tokens"
    frequent = load_token_map(spec.speculative_token_map)
    return f"draft_tokens_of_map_{content_digest(frequent.numpy().tobytes())[:8]}"


def _is_scaled(model: ModelConfig) -> bool:
    """Return True if a model's layers may have scales for K and V."""
    of_checkpoint = model.quantization or getattr(model.hf_config, "quantization_config", None)
    return bool(of_checkpoint or get_model().quantization_param_path)


def _conv_heads(config: Any, shape: Shape) -> list[Heads]:
    """Return this rank's channels of x, B and C in a `MambaMixer2` convolution. Every rank has B and C of a single
    group whole.
    """
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    states = config.mamba2_cache_params.shape
    whole = Heads(states.state_size, range(states.state_size))
    group = whole if groups == 1 else shape.cut(groups * states.state_size)
    return [shape.cut(states.intermediate_size), group, group]
