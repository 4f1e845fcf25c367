"""What SGLang asks a transfer backend for, and calls of it: the only file that follows its protocol.

What happens to a request is in `transfers.py`. On the prefill side SGLang waits in `poll` for a decode engine before it
computes a prompt. This backend does not let it wait: a decode engine reads whenever it is ready. It does not
ask how long a prefix the decode engine has: what is not needed is not read. `send` comes after each chunk with its
pages, and with the last one hands over states and the row of metadata.

The decode side learns the prompt's length and the window by a hook, since `send_metadata` has neither: it names pages.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from kvconnector.errors import GeometryError, KVConnectorError, LocalError
from kvconnector.ids import Rank
from kvconnector.integrations.sglang.caches import (
    Heads,
    Shape,
    metadata_group,
    registered_groups,
)
from kvconnector.integrations.sglang.gather import gather
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.integrations.sglang.requests import Layout
from kvconnector.integrations.sglang.settings import (
    connector_config,
    prefill_address,
    refuse_unsupported,
)
from kvconnector.integrations.sglang.transfers import LoadedPrompt, RankTransfers, SentPrompt, Stage
from kvconnector.topology import ModelDescription

logger = logging.getLogger(__name__)

SEND_METADATA = "sglang.srt.disaggregation.decode.DecodePreallocQueue._send_kv_metadata"
QUIESCE_S = 30.0
MAMBA_2 = ("granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2")
"""Model types of SGLang's `MambaMixer2`."""


class KVManager(BaseKVManager):
    """One rank's caches and transfers. Raises KVConnectorError: what cannot be transferred, or a wrong setting."""

    def __init__(
        self, args: KVArgs, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        self.kv_args = args
        self.is_prefill = disaggregation_mode.value == "prefill"
        self.prefill_info_table: dict[str, Any] = {}
        try:
            self._open(server_args, has_latent=is_mla_backend)
        except KVConnectorError as error:
            logger.error("kvconnector does not start: %s: %s", type(error).__name__, error)
            raise

    def _open(self, server_args: Any, *, has_latent: bool) -> None:
        args = self.kv_args
        refuse_unsupported(_facts(server_args))
        shape = _shape(args, server_args, has_latent=has_latent, is_prefill=self.is_prefill)
        self.rows = MetadataRows(
            args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, shape.device
        )
        groups, names = registered_groups(args, shape)
        self.layout = Layout((*names, "row"), args.page_size)
        group = get_parallel().world_group.cpu_group
        own = secrets.token_hex(8), get_disagg().disaggregation_bootstrap_port
        first, *_ = gather(msgspec.msgpack.encode(own), group)
        token, port = msgspec.msgpack.decode(first, type=tuple[str, int])
        config = connector_config(
            is_prefill=self.is_prefill,
            host=get_serving().host,
            bootstrap_port=port,
            unique_name=f"sglang-decode-{token}",
            own_address=get_local_ip_auto(fallback="127.0.0.1"),
            environ=os.environ,
        )
        self.transfers = RankTransfers(
            config,
            rank=Rank(shape.pp_rank, shape.tp_rank),
            groups=[*groups, metadata_group(self.rows, shape)],
            model=ModelDescription(
                model=server_args.served_model_name or server_args.model_path,
                dtype=shape.dtype,
                num_layers=shape.num_layers,
            ),
            gather=lambda payload: gather(payload, group),
        )
        self._stream = torch.cuda.Stream() if shape.device != "cpu" else None
        if not self.is_prefill:
            HookRegistry.register(SEND_METADATA, note_length, HookType.BEFORE)
            HookRegistry.apply_hooks()
        logger.info(
            "kvconnector moves %s of %s as engine %s",
            names,
            Rank(shape.pp_rank, shape.tp_rank),
            config.engine_id,
        )

    @contextmanager
    def after(self, *events: Any) -> Iterator[None]:
        """On a GPU, order what is inside after the current stream and these events or streams, and nothing after it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for event in events:
            if isinstance(event, torch.cuda.Stream):
                self._stream.wait_stream(event)
            elif event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

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

    def deregister_buffer_to_engine(self) -> None:
        """The pools' memory goes away. Raises MemoryInUseError: a transfer did not end in time."""
        self.transfers.worker.quiesce(QUIESCE_S)

    def register_buffer_to_engine(self) -> None:
        """It is back, at the same addresses."""
        self.transfers.worker.resume()

    def teardown(self) -> None:
        """Stop."""
        self.transfers.close()


class KVSender(SentPrompt, BaseKVSender):
    """A request of the prefill side."""

    def __init__(
        self,
        mgr: KVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr.transfers, bootstrap_room)
        self.kv_mgr = mgr
        self._early_send_wait_event: Any = None
        self._row = 0

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._row = aux_index or 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Any,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        layout = self.kv_mgr.layout
        if self.stage is not Stage.WAITING:
            return
        early, self._early_send_wait_event = self._early_send_wait_event, None
        pages = [int(page) for page in kv_indices]
        tokens = len(pages) * layout.page_size if num_kv_tokens is None else num_kv_tokens
        with self.failing(), self.kv_mgr.after(early):
            self.grow(pages, tokens, page_groups=layout.kv_groups)
            if state_indices is None:
                self.publish()
                return
            self.kv_mgr.rows.fill(self._row)
            self.complete(layout.last_blocks(state_indices, self._row, self.num_tokens))

    def get_transfer_metric(self) -> KVTransferMetric:
        num_pages = -(-self.num_tokens // self.kv_mgr.layout.page_size)
        nbytes = num_pages * sum(self.kv_mgr.kv_args.kv_item_lens)
        return KVTransferMetric(transfer_total_bytes=nbytes)

    def mark_prefill_complete(self) -> None:
        """Decode engines are not kept from allocating before."""

    def failure_exception(self) -> NoReturn:
        raise self.settle()

    poll_pp_consensus = SentPrompt.poll
    clear = SentPrompt.abort


class KVReceiver(LoadedPrompt, BaseKVReceiver):
    """A request of the decode side. `num_tokens`, `window_tokens` and `stream` are noted by `note_length`."""

    def __init__(
        self, mgr: KVManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        super().__init__(mgr.transfers, bootstrap_room or 0)
        self.kv_mgr = mgr
        self.num_tokens = 0
        self.window_tokens: int | None = None
        self.stream: Any = None
        self._address = bootstrap_addr
        self._row = 0

    def init(self, prefill_dp_rank: int) -> None:
        with self.failing():
            self.want(prefill_address(self._address, self.kv_mgr.transfers.config))

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: object,
    ) -> None:
        self._row = aux_index or 0
        with self.failing(), self.kv_mgr.after(self.stream):
            ranges, blocks = self.kv_mgr.layout.to_load(
                [int(page) for page in kv_indices],
                state_indices or (),
                self._row,
                prefix_tokens=decode_prefix_len or 0,
                num_tokens=self.num_tokens,
                window_tokens=self.window_tokens,
            )
            self.load(ranges, blocks)

    def ended(self, reason: str | None) -> None:
        super().ended(reason)
        if self.stage is Stage.DONE:
            with self.kv_mgr.after():
                self.kv_mgr.rows.spread(self._row)

    def failure_exception(self) -> NoReturn:
        raise self.settle()

    clear = LoadedPrompt.abort

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """`failure_exception` has ended the load, and waited for that."""


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
