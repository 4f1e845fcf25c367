"""The worker half: translates between vLLM's tensors, steps and results and `runtime.Worker`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvconnector.errors import (
    ConfigError,
    GeometryError,
    KVConnectorError,
    LocalError,
    MemoryInUseError,
    RemoteError,
)
from kvconnector.integrations.identity import Identity, check_identity
from kvconnector.integrations.vllm.caches import (
    RegisteredGroup,
    layer_number,
    register_groups,
    scales_in_use,
)
from kvconnector.integrations.vllm.cores import parents_cores
from kvconnector.integrations.vllm.host_buffer import CopyBlocks, HostBuffer
from kvconnector.integrations.vllm.messages import (
    ConnectorStep,
    Handshake,
    HandshakeMetadata,
    WorkerReport,
)
from kvconnector.integrations.vllm.placement import Placement, engine_groups, is_any
from kvconnector.integrations.vllm.settings import Settings, model_description, traces_endpoint
from kvconnector.integrations.vllm.unwritten import FailedParts, clear_unwritten
from kvconnector.layout import Watermark
from kvconnector.runtime import StepMetadata, Worker
from kvconnector.session import WorkerOutput, WorkerStats
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LeaseOrder,
    LoadRequest,
    Order,
    WithdrawRequest,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

REACHABLE_DEVICES = ("cpu", "cuda")
IDLE_WAIT_S = 0.002
"""Seconds that a step which computes nothing waits for a transfer. vLLM sleeps 1 ms after each such step, and plans two
before it takes the first one's results."""
_in_use: list[list[RegisteredGroup]] = []
"""Caches that transfers still used when their worker closed, and that therefore must not be freed."""

AGREE_S = 10.0
"""Seconds for which a rank that could sleep waits for the others of its engine, beside those that these may take."""


class WorkerHalf:
    """The part of the connector that registers one rank's caches and moves their blocks."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: Settings,
        placement: Placement,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._placement = placement
        self._worker: Worker | None = None
        self._groups: list[RegisteredGroup] = []
        self._scales: dict[str, Any] = {}
        """The scales of fp8 caches that other engines know."""
        self._host_buffer: HostBuffer | None = None
        self._unreported = KVConnectorTransferResults()
        self._stats = WorkerStats()
        self._is_started = False
        self._is_asleep = False
        self._layers: dict[str, int] = {}
        """Global indices, by name, of the layers that are reported while a step is computed."""
        self._begun: ConnectorStep | None = None
        self._parts: FailedParts | None = None
        self._report = WorkerReport()
        self._identities: dict[str, tuple[Identity, ...]] = {}
        """What the prompts of streamed loads depend on, until these have ended."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register vLLM's tensors, or mirrors of them in host memory if transfers cannot reach the device. Raises
        KVConnectorError: a layout is not supported, or the transport cannot start.
        """
        if not kv_caches or self._worker is not None:
            raise LocalError(
                "register the caches exactly once, and at least one cache",
                rank=str(self._placement.rank),
            )
        device = next(iter(kv_caches.values())).device
        buffer = self._vllm_config.kv_transfer_config.kv_buffer_device
        if device.type != "cpu" and buffer == "cpu":
            self._host_buffer = HostBuffer(kv_caches)
            kv_caches = self._host_buffer.mirrors
            device = torch.device("cpu")
        if device.type not in REACHABLE_DEVICES:
            raise ConfigError(
                "KVConnector can reach caches on this device only through host memory: set kv_buffer_device to cpu",
                device=str(device),
            )
        self._groups = register_groups(
            self._vllm_config, self._kv_cache_config, kv_caches, self._placement
        )
        worker = Worker(
            self._settings.config,
            rank=self._placement.rank,
            model=model_description(self._vllm_config, self._settings.model_name),
        )
        with parents_cores():
            worker.register(
                [group.cache for group in self._groups],
                num_optional=sum(group.is_optional for group in self._groups),
            )
        self._worker = worker
        if self._settings.config.convert != "never":
            self._scales = scales_in_use(self._vllm_config, self._groups)
        policy = self._vllm_config.kv_transfer_config.kv_load_failure_policy
        if self._host_buffer is None and policy == "recompute":
            self._parts = FailedParts.of(self._groups, len(self._kv_cache_config.kv_cache_groups))
        # a mirror gets a step's blocks only at its end, and both halves of a split batch call `save_kv_layer`
        if self._host_buffer is None and not self._vllm_config.parallel_config.use_ubatching:
            self._layers = {
                name: layer_number(name) for group in self._groups for name in group.tensors
            }

    def set_copy_blocks(self, copy_blocks: CopyBlocks) -> None:
        """Take vLLM's operation that copies blocks between the device and its mirror."""
        if self._host_buffer is not None:
            self._host_buffer.copy_blocks = copy_blocks

    def handshake(self) -> HandshakeMetadata | None:
        """Return this worker's registration, or None if other engines need not know this worker."""
        return HandshakeMetadata.of(
            Handshake(
                worker=self._registered().handshake(),
                groups=tuple(group.info for group in self._groups),
            )
        )

    def start_step(self, step: ConnectorStep) -> None:
        """Take a step's orders; never blocks. An order that cannot be carried out fails only its own request."""
        self._begun = step
        self._start(step, step.decode())

    def take_failed_step(self, step: ConnectorStep) -> None:
        """Take the orders of a step whose kernels have failed on this rank. What they were to compute of prompts that
        consumers follow is not there.
        """
        taken = step.decode()
        orders = tuple(each for each in taken.orders if not isinstance(each, GrowRequest))
        self._start(step, replace(taken, orders=orders))

    def _start(self, step: ConnectorStep, taken: StepMetadata) -> None:
        if taken.is_empty:
            return
        orders = taken.orders
        loads = {each.request_id for each in orders if isinstance(each, LoadRequest)}
        streamed = step.identities.keys() & loads
        self._identities |= {name: step.identities[name] for name in streamed}
        if not self._is_asleep:  # else those with blocks are refused: there is nothing to prepare
            problem = self._other_scales() if orders else None
            prepared = (self._prepared(each, problem) for each in _without_beginnings(orders))
            orders = tuple(prepared)
        try:
            self._take(replace(taken, orders=orders))
        except KVConnectorError as error:
            for order in orders:
                self._refuse(order, error)
            return
        if self._parts is not None:
            # which prompt a streamed load brings shows only at its end: before that, nothing of it can be kept
            self._parts.expect([each for each in orders if each.request_id not in streamed])

    def withdraw(self, step: ConnectorStep) -> None:
        """Carry out the step's orders that take blocks back, before its kernels are launched. `start_step` repeats
        them, which changes nothing.
        """
        if not step.withdraws or self._is_asleep:
            return
        taken = step.decode()
        orders = tuple(each for each in taken.orders if isinstance(each, WithdrawRequest))
        try:
            self._take(replace(taken, orders=orders))
        except KVConnectorError as error:
            logger.debug("blocks are taken back only after the step's kernels: %s", error)

    def _take(self, step: StepMetadata) -> None:
        with nullcontext() if self._is_started else parents_cores():
            self._registered().start_step(step)
        self._is_started = True

    def layer_written(self, step: ConnectorStep, name: str) -> None:
        """Report that a layer's kernel is launched, so that consumers may read the layer; never blocks.

        A step's first call gives the worker its orders that grow prompts; `start_step`, after the kernels, all orders.
        """
        if not step.payload or self._is_asleep or name not in self._layers:
            return
        if step is not self._begun:
            self._begun, taken = step, step.decode()
            ahead = tuple(filter(_grows_ahead, taken.orders))
            try:
                if ahead:
                    self._take(replace(taken, orders=ahead))
            except KVConnectorError as error:
                logger.debug("the step is not reported by layers, only at its end: %s", error)
        self._registered().layer_written(self._layers[name])

    def _other_scales(self) -> GeometryError | None:
        """Return an error if new weights brought layers other scales than those by which other engines convert."""
        if not self._scales:
            return None
        now = scales_in_use(self._vllm_config, self._groups)
        changed = [name for name, scales in self._scales.items() if now[name] != scales]
        if not changed:
            return None
        return GeometryError(
            "new weights have changed the scales of fp8 caches, and other engines would convert by the old ones: start"
            " this engine again, or set convert=never if both engines always get the same scales",
            layer=changed[0],
            stated=self._scales[changed[0]],
            now=now[changed[0]],
            num_layers=len(changed),
        )

    def _prepared(self, order: Order, problem: GeometryError | None) -> Order:
        """Prepare the caches for an order and return it. If that fails, or there is a `problem` with all caches, return
        the order to give up its request.
        """
        try:
            if problem is not None and isinstance(order, LoadRequest | LeaseOrder):
                raise problem
            if isinstance(order, LoadRequest):
                if self._kv_cache_config.needs_kv_cache_zeroing:
                    clear_unwritten(self._groups, order)
                if self._host_buffer is not None:
                    self._host_buffer.before_load(order, self._groups)
            elif isinstance(order, GrowRequest):  # the step's kernels are launched
                order = replace(order, watermark=Watermark(order.watermark.step_stop))
            if self._host_buffer is not None and isinstance(order, LeaseOrder | WithdrawRequest):
                self._host_buffer.before_lease(order, self._groups)
        except KVConnectorError as error:
            self._refuse(order, error)
            is_load = isinstance(order, LoadRequest)
            return (DropRequest if is_load else WithdrawRequest)(order.request_id)
        return order

    def _refuse(self, order: Order, error: KVConnectorError) -> None:
        # the scheduler half logs the reason, once for all ranks
        logger.debug("request %s is refused", order.request_id, exc_info=error)
        self._registered().refuse((order,), error)

    def finished(self, *, is_idle: bool = False) -> KVConnectorTransferResults:
        """Return the transfers that have ended since the last call. Blocks while loads are copied out of a host buffer.

        In an `is_idle` step it also waits up to `IDLE_WAIT_S` until a load ends, or blocks may be allocated for one.
        """
        self._collect()
        has_news = self._unreported.finished_recving or self._report.producer_started
        if is_idle and not has_news and self._registered().is_waiting:
            self._registered().wait(IDLE_WAIT_S)
            self._collect()
        finished, self._unreported = self._unreported, KVConnectorTransferResults()
        if self._host_buffer is not None:
            for request_id in finished.finished_recving:
                is_filled = request_id not in finished.failed_recving
                self._host_buffer.after_load(request_id, is_filled=is_filled)
        return finished

    def _collect(self) -> None:
        output = self._registered().poll()
        self._stats = self._stats.merged(output.stats)
        self._report.producer_started.update(output.producer_started)
        self._report.failed.update(output.failed_recving)
        self._report.unsent.update(output.failed_sending)
        self._report.extras.update(output.extras)
        others = self._other_prompts(output)
        if traces_endpoint(self._vllm_config) is not None:
            self._report.traces += output.stats.traces
        self._unreported.finished_sending.update(output.finished_sending)
        self._unreported.finished_recving.update(output.finished_recving)
        failed = set(output.failed_recving)
        if self._parts is not None:
            failed -= self._parts.ended(output)
        self._unreported.failed_recving.update(failed, others)

    def _other_prompts(self, output: WorkerOutput) -> set[str]:
        """Return the streamed loads that have ended well, but brought the cache of another prompt: they fail. What a
        prompt is shows at its end, so its blocks were read before.
        """
        others = set()
        for request_id in self._identities.keys() & output.finished_recving:
            own = self._identities.pop(request_id)
            if request_id in output.failed_recving:
                continue
            try:
                check_identity(output.extras.get(request_id, b""), own)
            except RemoteError as error:
                name = type(error).__name__
                others.add(request_id)
                self._report.failed[request_id] = f"{name}: {error}"
                self._report.extras.pop(request_id, None)
                self._stats = self._stats.merged(WorkerStats(failures={name: 1}))
        return others

    def take_unfilled(self) -> set[int]:
        """Return vLLM's ids of the blocks that failed loads did not fill, since the last call."""
        return set() if self._parts is None else self._parts.take_unfilled()

    def sleep(self) -> None:
        """End all loads and leases, and wait until nothing reads or writes the caches. Idempotent.

        vLLM releases the caches' memory, and restores it at the same addresses. Connections and staging memory stay.
        The ended transfers are reported as usual, loads as failed, because their data is lost.

        Raises:
            MemoryInUseError: a transfer did not end in time, or a consumer has not unmapped the caches, in this rank or
                another one of this engine. All must keep their memory, and transfers go on: vLLM wakes up no rank of an
                engine whose sleep has failed.
        """
        self._is_asleep = True
        if self._host_buffer is not None:
            self._host_buffer.forget_prompts()
        problem: KVConnectorError | None = None
        try:
            self._registered().quiesce(self._settings.config.peer.transfer_timeout_s)
        except KVConnectorError as error:
            problem = error
        self._agree_to_sleep(problem)

    def _agree_to_sleep(self, problem: KVConnectorError | None) -> None:
        """Return once all ranks of this engine may sleep. Raises `problem`, or MemoryInUseError: one may not."""
        wait_s = self._settings.config.peer.transfer_timeout_s + AGREE_S
        try:
            if is_any(problem is not None, engine_groups(), wait_s) and problem is None:
                problem = MemoryInUseError(
                    "another rank of this engine cannot release its caches: see that rank's log"
                )
        except RuntimeError as error:
            problem = problem or MemoryInUseError(
                f"another rank of this engine did not say in time whether it can sleep: {error}",
                waited_s=wait_s,
            )
        if problem is not None:
            logger.error("the caches' memory is not released: %s", problem)
            self.wake()
            raise problem

    def wake(self) -> None:
        """Resume transfers, because the caches have memory again. Idempotent."""
        self._is_asleep = False
        if self._worker is not None:
            self._worker.resume()

    def take_report(self) -> WorkerReport:
        """Return the report for the scheduler half since the last call."""
        report, self._report = self._report, WorkerReport()
        return report

    def take_stats(self) -> WorkerStats:
        """Return the statistics of the time since the last call."""
        stats, self._stats = self._stats, WorkerStats()
        return stats

    def close(self) -> None:
        """Stop the driver in bounded time. Idempotent. Caches still in use stay allocated. This raises no error, which
        would keep vLLM from shutting down the scheduler's half and the other workers.
        """
        if self._worker is not None:
            try:
                self._worker.close()
            except MemoryInUseError as error:
                logger.error("the KV caches stay allocated until this process ends: %s", error)
                _in_use.append(self._groups)

    def _registered(self) -> Worker:
        if self._worker is None:
            raise LocalError("call register_kv_caches first", rank=str(self._placement.rank))
        return self._worker


def _without_beginnings(orders: Sequence[Order]) -> list[Order]:
    """Drop the order that begins a prompt's lease if the same step grows it. `layer_written` may have given the worker
    the growth already, and a lease without blocks would then take these blocks back.
    """
    newest = {each.request_id: each for each in orders if isinstance(each, GrowRequest)}
    return [
        each
        for each in orders
        if not isinstance(each, GrowRequest) or newest[each.request_id] is each
    ]


def _grows_ahead(order: Order) -> bool:
    """Return True if the order is for a prompt of which the step computes more tokens."""
    return isinstance(order, GrowRequest) and order.watermark.step_stop > order.watermark.num_tokens


class ReplicaHalf(WorkerHalf):
    """The worker half of a rank whose cache is a copy of another's, as with prefill context parallelism alone. It
    transfers nothing. vLLM frees a request's blocks once every worker has reported it sent, so this one reports at once
    the requests that the others hold.
    """

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: no rank reads these caches."""

    def handshake(self) -> None:
        """Return None: other engines need not know this worker."""

    def start_step(self, step: ConnectorStep) -> None:
        self._unreported.finished_sending.update(
            order.request_id for order in step.decode().orders if isinstance(order, HoldRequest)
        )

    def take_failed_step(self, step: ConnectorStep) -> None:
        """Take a step's orders: this rank's part in them does not depend on its kernels."""
        self.start_step(step)

    def withdraw(self, step: ConnectorStep) -> None:
        """Do nothing: no rank reads these caches."""

    def finished(self, *, is_idle: bool = False) -> KVConnectorTransferResults:
        """Return at once the requests that the others hold. This rank has no transfers to wait for."""
        return super().finished()

    def _collect(self) -> None:
        """Do nothing: there is no worker to poll."""

    def sleep(self) -> None:
        """Sleep if all others do: no transfer is under way here. Raises MemoryInUseError: another rank cannot."""
        self._agree_to_sleep(None)
