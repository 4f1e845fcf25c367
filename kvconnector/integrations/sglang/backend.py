"""What SGLang asks a transfer backend for: the only file that imports SGLang's protocol.

What happens to a request is in `transfers.py`. The decode side learns the prompt's length and the window by a hook,
since `send_metadata` has neither: it names pages.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVArgs,
    KVTransferMetric,
)
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving
from sglang.srt.utils.network import get_local_ip_auto
from torch import distributed

from kvconnector.errors import GeometryError, KVConnectorError, LocalError
from kvconnector.integrations.sglang.caches import Heads, Shape
from kvconnector.integrations.sglang.rank import RankTransfers
from kvconnector.integrations.sglang.settings import (
    connector_config,
    refuse_unsupported,
)
from kvconnector.integrations.sglang.transfers import LoadedPrompt, SentPrompt

logger = logging.getLogger(__name__)

SEND_METADATA = "sglang.srt.disaggregation.decode.DecodePreallocQueue._send_kv_metadata"
MAMBA_2 = ("granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2")
"""Model types of SGLang's `MambaMixer2`."""


class KVManager(RankTransfers, BaseKVManager):
    """One rank's caches and transfers. Raises KVConnectorError: what cannot be transferred, or a wrong setting."""

    def __init__(
        self, args: KVArgs, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        self.prefill_info_table: dict[str, Any] = {}
        is_prefill = disaggregation_mode.value == "prefill"
        try:
            self._open(args, server_args, has_latent=is_mla_backend, is_prefill=is_prefill)
        except KVConnectorError as error:
            logger.error("kvconnector does not start: %s: %s", type(error).__name__, error)
            raise
        if not is_prefill:
            HookRegistry.register(SEND_METADATA, note_length, HookType.BEFORE)
            HookRegistry.apply_hooks()

    def _open(self, args: KVArgs, server_args: Any, *, has_latent: bool, is_prefill: bool) -> None:
        refuse_unsupported(_facts(server_args))
        shape = _shape(args, server_args, has_latent=has_latent, is_prefill=is_prefill)
        group = get_parallel().world_group.cpu_group
        own = secrets.token_hex(8), get_disagg().disaggregation_bootstrap_port
        first, *_ = gather(msgspec.msgpack.encode(own), group)
        token, port = msgspec.msgpack.decode(first, type=tuple[str, int])
        config = connector_config(
            is_prefill=is_prefill,
            host=get_serving().host,
            bootstrap_port=port,
            unique_name=f"sglang-decode-{token}",
            own_address=get_local_ip_auto(fallback="127.0.0.1"),
            environ=os.environ,
        )
        super().__init__(
            config,
            args=args,
            shape=shape,
            model=server_args.served_model_name or server_args.model_path,
            gather=lambda payload: gather(payload, group),
        )

    def register_to_bootstrap(self) -> None:
        """The directory service was started with rank 0's worker."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whoever is there is met, and compared, when the first request is wanted."""
        info = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
        self.prefill_info_table.setdefault(bootstrap_addr, info)
        return True

    def submit_prefill_recompute(self, *_: object) -> NoReturn:
        """Raises LocalError."""
        raise LocalError(
            "kvconnector does not have prompts computed again after a retraction with new weights"
        )


class KVSender(SentPrompt, BaseKVSender):
    """A request of the prefill side."""

    def get_transfer_metric(self) -> KVTransferMetric:
        num_pages = -(-self.num_tokens // self.kv_mgr.layout.page_size)
        nbytes = num_pages * sum(self.kv_mgr.kv_args.kv_item_lens)
        return KVTransferMetric(transfer_total_bytes=nbytes)


class KVReceiver(LoadedPrompt, BaseKVReceiver):
    """A request of the decode side."""


class BootstrapServer(BaseKVBootstrapServer):
    """Nothing: rank 0 answers at the bootstrap port, with the directory service."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)

    def close(self) -> None:
        """Nothing is open."""


CLASSES = {
    "kvargs": KVArgs,
    "manager": KVManager,
    "sender": KVSender,
    "receiver": KVReceiver,
    "bootstrap_server": BootstrapServer,
}
"""By the values of SGLang's `KVClassType`."""


def note_length(queue: Any, decode_req: Any, kv_indices: Any, *_: object, **options: Any) -> None:
    """Hook before `DecodePreallocQueue._send_kv_metadata`: `kv_indices` are one for each token past the prefix."""
    receiver, scheduler = decode_req.kv_receiver, queue.scheduler
    receiver.num_tokens = len(kv_indices) + (options.get("decode_prefix_len") or 0)
    receiver.window_tokens = scheduler.sliding_window_size
    # what overlapped scheduling still computes may write to blocks that were freed meanwhile
    receiver.stream = scheduler.forward_stream if scheduler.enable_overlap else None


def gather(payload: bytes, group: distributed.ProcessGroup) -> list[bytes]:
    """Hand each rank's bytes to all ranks; the group's own timeout ends the wait.

    Args:
        payload: Of this rank; not empty.
        group: All ranks of the engine.

    Returns:
        In the order of the ranks.
    """
    size = distributed.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    distributed.all_gather(lengths, torch.tensor([len(payload)]), group=group)
    longest = int(max(length.item() for length in lengths))
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    distributed.all_gather(parts, own, group=group)
    return [
        part[: int(length.item())].numpy().tobytes()
        for part, length in zip(parts, lengths, strict=True)
    ]


def _facts(server_args: Any) -> dict[str, object]:
    parallel, disagg = get_parallel(), get_disagg()
    pool = os.environ.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL")
    return {
        "dp_size": parallel.dp_size,
        "attention dp_size": parallel.attn_dp_size,
        "attn_cp_size": parallel.attn_cp_size,
        "dcp_size": parallel.attn_dcp_size,
        "enable_kv_cache_sharding": parallel.enable_kv_cache_sharding,
        "enable_pd_role_switch": disagg.enable_pd_role_switch,
        "enable_hisparse": server_args.enable_hisparse,
        "metadata on a GPU": pool == "INTRA_NODE_NVLINK",
    }


def _shape(args: KVArgs, server_args: Any, *, has_latent: bool, is_prefill: bool) -> Shape:
    parallel = get_parallel()
    model = ModelConfig.from_server_args(server_args)
    tp_rank, tp_size = args.engine_rank, parallel.attn_tp_size
    pp_rank, pp_size = args.pp_rank, parallel.pp_size
    num_layers = model.num_hidden_layers
    stage = range(*get_pp_indices(num_layers, pp_rank, pp_size))
    has_latent = has_latent or args.is_hybrid_mla_backend
    windows: set[int] = set()
    if "swa" in args.state_types:
        windows = {*(model.swa_attention_layer_ids or ())}
    dtype = args.kv_cache_dtype_str
    dtype = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    kv_heads = 1 if has_latent else model.get_total_num_kv_heads()
    device = server_args.device
    if device == "cpu" and is_prefill and not has_latent and tp_size > kv_heads:
        raise GeometryError(
            "on a CPU SGLang adds heads of zeros where there are fewer KV heads than ranks, and these are not read",
            heads=kv_heads,
            tp_size=tp_size,
        )
    shape = Shape(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        is_prefill=is_prefill,
        num_layers=num_layers,
        kv_heads=kv_heads,
        window_heads=model.get_swa_num_kv_heads(1),
        kv_layers=[layer for layer in stage if layer not in windows],
        window_layers=[layer for layer in stage if layer in windows],
        has_latent=has_latent,
        device="cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}",
        dtype=f"{dtype}/{args.kv_layout}" if args.kv_layout else dtype,
    )
    if "mamba" not in args.state_types or model.hf_config.model_type not in MAMBA_2:
        return shape
    return replace(shape, conv_heads=_conv_heads(model.hf_config, shape))


def _conv_heads(config: Any, shape: Shape) -> list[Heads]:
    """Of models with SGLang's `MambaMixer2`, which repeats the B and C of a single group in every rank."""
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    states = config.mamba2_cache_params.shape
    whole = Heads(states.state_size, range(states.state_size))
    group = whole if groups == 1 else shape.cut(groups * states.state_size)
    return [shape.cut(states.intermediate_size), group, group]
