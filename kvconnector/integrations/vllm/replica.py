"""The worker half of a rank whose cache is a copy of another's, as prefill context parallelism alone leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvconnector.integrations.vllm.messages import ConnectorStep
from kvconnector.integrations.vllm.worker import WorkerHalf
from kvconnector.runtime.steps import HoldRequest

if TYPE_CHECKING:
    import torch


class ReplicaHalf(WorkerHalf):
    """Takes no part in transfers, and registers nothing. vLLM frees a request's blocks when every worker reports it
    sent, so this one reports at once what the others hold.
    """

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Nobody reads these."""

    def handshake(self) -> None:
        """No other engine hears of this worker."""

    def start_step(self, step: ConnectorStep) -> None:
        """Remember what is to be reported."""
        self._unreported.sending.update(
            order.request_id
            for order in step.decode().orders
            if isinstance(order, HoldRequest) and order.is_complete
        )

    def _collect(self) -> None:
        """There is no one to ask."""

    def sleep(self) -> None:
        """Nothing is under way."""
