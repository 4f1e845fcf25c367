"""`KVConnector`: implements vLLM's connector interface by calling a scheduler half or a worker half."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvconnector.errors import ConfigError, LocalError
from kvconnector.integrations.vllm.host_buffer import CopyBlocks
from kvconnector.integrations.vllm.messages import (
    ConnectorStep,
    HandshakeMetadata,
    WorkerReport,
)
from kvconnector.integrations.vllm.outputs import AddsToOutputs
from kvconnector.integrations.vllm.placement import Placement
from kvconnector.integrations.vllm.scheduler import SchedulerHalf
from kvconnector.integrations.vllm.settings import Settings, check_deployment
from kvconnector.integrations.vllm.stats import ConnectorStats, PromMetrics
from kvconnector.integrations.vllm.worker import ReplicaHalf, WorkerHalf
from kvconnector.topology import required_cache_layout

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_LAYOUT_NAMES = {"HND": "LBHNC", "NHD": "LBNHC"}
"""The names that vLLM's own connectors return. `MultiConnector` compares those of its children."""

RIVALS = frozenset({"MoRIIOConnector", "MooncakeConnector", "NixlBaseConnector"})
"""vLLM's connectors that transfer between engines. Each takes any request with `do_remote_prefill` for its own."""


class KVConnector(KVConnectorBase_V1, SupportsHMA, AddsToOutputs):
    """Moves KV caches between prefill and decode engines of any tensor, pipeline and decode context parallelism, block
    size and layout.

    vLLM makes one in each process of a role. Methods of the other role raise LocalError.
    """

    # vLLM 0.31 counts hits without their sources
    if hasattr(KVConnectorBase_V1, "_cache_hit_source"):
        _cache_hit_source = type(KVConnectorBase_V1._cache_hit_source).P2P

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_vllm_handlers()
        settings = Settings.of(vllm_config)
        check_deployment(vllm_config, settings.config.role)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        self._has_ended_loads = False
        self._untaken: ConnectorStep | None = None
        """A step that this rank has begun, and whose orders it has not taken yet."""
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_half = SchedulerHalf(vllm_config, settings)
            return
        placement = Placement.here(vllm_config.parallel_config)
        half = ReplicaHalf if placement.is_replica else WorkerHalf
        self._worker_half = half(vllm_config, kv_cache_config, settings, placement)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True if a load brings all that the local prefix hit lacks: it does for recurrent states, not for windows."""
        return self._scheduler.completes_divergent_hits

    @property
    def requires_kv_delivery(self) -> bool:
        """True if this engine offers blocks to others, including a decode engine's to the next turn's prefill. vLLM
        then computes a request that is preempted at its end again.
        """
        return self._scheduler.delivers

    @property
    def _scheduler(self) -> SchedulerHalf:
        if self._scheduler_half is None:
            raise LocalError("a connector with the role of a worker has no scheduler half")
        return self._scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        if self._worker_half is None:
            raise LocalError("a connector with the role of a scheduler has no worker half")
        return self._worker_half

    # -- worker --

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        check_siblings()
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Stop transfers, because the engine goes to sleep (vLLM 0.33)."""
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """Resume transfers, because the caches have their memory again (vLLM 0.33)."""
        self._worker.wake()

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocks) -> None:
        self._worker.set_copy_blocks(copy_operation)

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        return self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. If this rank has failed in the step before, without the end of its engine (vLLM 0.33's
        `--enable-fault-tolerance`), take what is left of that step's orders: the others have them, and no later step
        repeats them.
        """
        if self._untaken is not None:
            self._worker.take_failed_step(self._untaken)
        is_ours = isinstance(connector_metadata, ConnectorStep)
        self._untaken = connector_metadata if is_ours else None
        super().bind_connector_metadata(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """End the leases on blocks that the step gives to other requests, before its kernels write to them."""
        if isinstance(kv_connector_metadata, ConnectorStep):
            self._worker.withdraw(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Take the step's orders, after its kernels are launched, or before if another connector loads for the step."""
        step = self._get_connector_metadata()
        if not isinstance(step, ConnectorStep):
            raise LocalError("this is another connector's metadata", found=type(step).__name__)
        self._untaken = None
        self._worker.start_step(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, so a running request has all of its layers."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Let consumers read the layer: they read blocks in place, and each layer as soon as it is written."""
        step = self._connector_metadata
        if isinstance(step, ConnectorStep):
            self._worker.layer_written(step, layer_name)

    def wait_for_save(self) -> None:
        """Do nothing: consumers read the blocks in place."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        step = self._connector_metadata
        is_idle = isinstance(step, ConnectorStep) and step.is_idle
        # asynchronous scheduling has planned this step before it takes the last one's results: if loads ended in that
        # step, waiting for other loads in this one would delay the requests that can begin now
        results = self._worker.finished(is_idle=is_idle and not self._has_ended_loads)
        self._has_ended_loads = bool(results.finished_recving)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_unfilled()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        report = self._worker.take_report()
        return None if report == WorkerReport() else report

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker_half is None:
            return None
        stats = ConnectorStats.of(self._worker_half.take_stats())
        return None if stats.is_empty() else stats

    # -- scheduler --

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, ...], HandshakeMetadata]
    ) -> None:
        self._scheduler.set_handshake(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.partly_filled.evict_blocks = kv_cache_manager.evict_blocks

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the groups whose blocks vLLM need not zero before a load. In windows of which it keeps more tokens
        than the next one sees, a load leaves whole blocks as they were.
        """
        groups = self._kv_cache_config.kv_cache_groups
        return tuple(
            each
            for each in self._kv_cache_config.transfer_group_ids
            if not _keeps_more(groups[each].kv_cache_spec)
        )

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorStep:
        return self._scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update(connector_output)

    def reset_cache(self) -> bool:
        """Withdraw what this engine offers, and load nothing that was offered before. Returns False while loads are
        under way. vLLM calls it for `reset_prefix_cache(reset_connector=True)`, as when a pause empties its caches.
        """
        return self._scheduler.reset()

    def has_pending_push_work(self) -> bool:
        """True if workers must learn of a reset: a paused engine plans a step only if somebody has work for it."""
        return self._scheduler.has_orders_of_reset

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def add_to_outputs(self, scheduler: Scheduler, outputs: dict[int, EngineCoreOutputs]) -> None:
        self._scheduler.first_tokens.emit(scheduler, outputs)
        self._scheduler.explain(outputs)

    # -- both --

    def shutdown(self) -> None:
        if self._worker_half is not None:
            self._worker_half.close()
        if self._scheduler_half is not None:
            self._scheduler_half.close()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True: every configuration can sleep (vLLM 0.33)."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout in which a head slice is contiguous, or None if any will do: latents have a single head."""
        if vllm_config.model_config.use_mla:
            return None
        return _LAYOUT_NAMES[required_cache_layout({"kv_connector": cls.__name__})]

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def check_siblings() -> None:
    """Raise ConfigError if this worker's connector is a `MultiConnector` with another child that transfers between
    engines. It would wait for the cache of our requests, which then never end, free what we still read, or clash with
    our `kv_transfer_params`.
    """
    whole = get_kv_transfer_group() if has_kv_transfer_group() else None
    children = whole.sub_connectors if isinstance(whole, MultiConnector) else ()
    between_engines = RIVALS | {KVConnector.__name__}
    found = [
        type(child).__name__
        for child in children
        if between_engines.intersection(base.__name__ for base in type(child).__mro__)
    ]
    if len(found) > 1:
        raise ConfigError(
            "only one child of a MultiConnector may transfer between engines", children=found
        )


def _keeps_more(spec: Any) -> bool:
    """Return True for windows of a model with several draft modules, which may compute a prompt's end again."""
    of_layers = getattr(spec, "kv_cache_specs", {}).values()
    return any(getattr(each, "extra_retained_tokens", 0) for each in (spec, *of_layers))


def share_vllm_handlers() -> None:
    """Log through vLLM's handlers, at vLLM's level, unless the operator has configured our logger."""
    ours, theirs = logging.getLogger("kvconnector"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
