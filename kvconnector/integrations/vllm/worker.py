"""The worker half: vLLM's tensors, steps and results in the terms of `runtime.Worker`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from kvconnector.errors import ConfigError, KVConnectorError, LocalError, MemoryInUseError
from kvconnector.integrations.vllm.caches import RegisteredGroup, register_groups
from kvconnector.integrations.vllm.cores import parents_cores
from kvconnector.integrations.vllm.host_buffer import CopyBlocks, HostBuffer
from kvconnector.integrations.vllm.messages import ConnectorStep, Handshake, HandshakeMetadata
from kvconnector.integrations.vllm.placement import Placement
from kvconnector.integrations.vllm.settings import Settings, model_description
from kvconnector.integrations.vllm.unwritten import clear_unwritten
from kvconnector.runtime import Worker
from kvconnector.runtime.steps import DropRequest, HoldRequest, LoadRequest, Order, WithdrawRequest
from kvconnector.session import WorkerStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

REACHABLE_DEVICES = ("cpu", "cuda")
_in_use: list[list[RegisteredGroup]] = []
"""Caches that could not be freed when their worker closed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What one step reports. Failed receives are also in `recving`."""

    sending: set[str] = field(default_factory=set)
    recving: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


class WorkerHalf:
    """One rank's side."""

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
        self._host_buffer: HostBuffer | None = None
        self._refused = Finished()
        self._stats = WorkerStats()
        self._is_started = False

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register vLLM's tensors, or their mirrors in host memory where the device cannot be reached.

        Raises:
            KVConnectorError: a layout that is not understood, or a transport that cannot start.
        """
        if not kv_caches or self._worker is not None:
            raise LocalError(
                "caches are registered once, and at least one", rank=str(self._placement.rank)
            )
        tensor = next(iter(kv_caches.values()))
        device = tensor.device
        if self._uses_host_buffer(device):
            self._host_buffer = HostBuffer(kv_caches)
            kv_caches = self._host_buffer.mirrors
            device = torch.device("cpu")
        if device.type not in REACHABLE_DEVICES:
            raise ConfigError(
                "KVConnector reaches caches on this device only through host memory: set kv_buffer_device to cpu",
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
            worker.register([group.cache for group in self._groups])
        self._worker = worker

    def _uses_host_buffer(self, device: torch.device) -> bool:
        buffer = self._vllm_config.kv_transfer_config.kv_buffer_device
        return device.type != "cpu" and buffer == "cpu"

    def set_copy_blocks(self, copy_blocks: CopyBlocks) -> None:
        """vLLM's operation that copies blocks between the device and its mirror."""
        if self._host_buffer is not None:
            self._host_buffer.copy_blocks = copy_blocks

    def handshake(self) -> HandshakeMetadata:
        """What the scheduler half must know.

        Raises:
            LocalError: nothing is registered.
        """
        return HandshakeMetadata.of(
            Handshake(
                worker=self._registered().handshake(),
                groups=tuple(group.info for group in self._groups),
            )
        )

    def start_step(self, step: ConnectorStep) -> None:
        """Take a step's orders; never blocks. What cannot be taken fails alone, with its request."""
        taken = step.decode()
        if taken.is_empty:
            return
        orders = tuple(self._prepared(order) for order in taken.orders)
        try:
            with nullcontext() if self._is_started else parents_cores():
                self._registered().start_step(replace(taken, orders=orders))
            self._is_started = True
        except KVConnectorError as error:
            for order in orders:
                self._refuse(order, error)

    def _prepared(self, order: Order) -> Order:
        """The order, once the caches are ready for it; or that to give its request up."""
        try:
            if isinstance(order, LoadRequest):
                if self._kv_cache_config.needs_kv_cache_zeroing:
                    clear_unwritten(self._groups, order)
                if self._host_buffer is not None:
                    self._host_buffer.before_load(order, self._groups)
            elif isinstance(order, HoldRequest) and self._host_buffer is not None:
                self._host_buffer.before_hold(order, self._groups)
        except KVConnectorError as error:
            self._refuse(order, error)
            is_load = isinstance(order, LoadRequest)
            return (DropRequest if is_load else WithdrawRequest)(order.request_id)
        return order

    def _refuse(self, order: Order, error: KVConnectorError) -> None:
        """Report what the engine waits for: the end of a load, or of a lease."""
        logger.error("request %s is refused", order.request_id, exc_info=error)
        if isinstance(order, LoadRequest):
            self._refused.recving.add(order.request_id)
            self._refused.failed[order.request_id] = str(error)
        elif isinstance(order, HoldRequest):
            self._refused.sending.add(order.request_id)

    def finished(self) -> Finished:
        """What finished since the last call; never blocks, but for copies out of a host buffer."""
        refused, self._refused = self._refused, Finished()
        output = self._registered().poll()
        self._stats = self._stats.merged(output.stats)
        finished = Finished(
            sending=refused.sending | output.finished_sending,
            recving=refused.recving | output.finished_recving,
            failed=refused.failed | output.failed_recving,
        )
        if self._host_buffer is not None:
            for request_id in finished.recving:
                self._host_buffer.after_load(
                    request_id, is_filled=request_id not in finished.failed
                )
        return finished

    def take_stats(self) -> WorkerStats:
        """Everything since the last call."""
        stats, self._stats = self._stats, WorkerStats()
        return stats

    def close(self) -> None:
        """Stop the driver; bounded and idempotent. Caches that are still in use stay allocated: at an error vLLM would
        break its shutdown off, in front of the scheduler's half and the other workers.
        """
        if self._worker is not None:
            try:
                self._worker.close()
            except MemoryInUseError as error:
                logger.error("the KV caches stay allocated until this process ends: %s", error)
                _in_use.append(self._groups)

    def _registered(self) -> Worker:
        if self._worker is None:
            raise LocalError("register_kv_caches comes first", rank=str(self._placement.rank))
        return self._worker
