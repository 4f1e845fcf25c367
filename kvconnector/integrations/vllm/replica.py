"""The worker half of a rank whose cache is a copy of another's, as prefill context parallelism alone leaves it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvconnector.integrations.vllm.host_buffer import CopyBlocks
from kvconnector.integrations.vllm.messages import ConnectorStep, WorkerReport
from kvconnector.integrations.vllm.worker import Finished
from kvconnector.runtime.steps import HoldRequest
from kvconnector.session import WorkerStats


class ReplicaHalf:
    """Takes no part in transfers, and registers nothing. vLLM frees a request's blocks when every worker reports it
    sent, so this one reports at once what the others hold.
    """

    def __init__(self) -> None:
        self._held: set[str] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Nobody reads these."""

    def set_copy_blocks(self, copy_blocks: CopyBlocks) -> None:
        """Nothing is copied."""

    def handshake(self) -> None:
        """No other engine hears of this worker."""

    def start_step(self, step: ConnectorStep) -> None:
        """Remember what is to be reported."""
        self._held.update(
            order.request_id
            for order in step.decode().orders
            if isinstance(order, HoldRequest) and order.is_complete
        )

    def finished(self, *, is_idle: bool = False) -> Finished:
        """Every request that was handed over since the last call."""
        held, self._held = self._held, set()
        return Finished(sending=held)

    def take_report(self) -> WorkerReport:
        """Others say what has begun."""
        return WorkerReport()

    def sleep(self) -> None:
        """Nothing is under way."""

    def wake(self) -> None:
        """Nothing was given up."""

    def take_stats(self) -> WorkerStats:
        """None."""
        return WorkerStats()

    def close(self) -> None:
        """Nothing runs."""
