"""What our connector adds to the outputs of vLLM's scheduler: first tokens, and why a load failed.

vLLM's interface lets no connector do either. So one method, `Scheduler.update_from_output`, is wrapped in the process
of a scheduler whose connector loads. The sources of that method, and of everything in vLLM that decides what we may
add, are first compared with those of the known releases. If one differs, nothing is wrapped.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs

# digests of the sources in the known releases, 0.31 to 0.33: each source that occurs in them
_USED: dict[Any, tuple[str, ...]] = {
    Scheduler.update_from_output: ("1f8d6e28ba4c3fcf", "3713fcfee525cd79"),
    Scheduler.finish_requests: ("550697af508ebf26", "aad302ec49507a20"),
    Scheduler._update_from_kv_xfer_finished: ("af2e4964fe6643c5", "5c9fe4e703a01a3d"),
    Scheduler._update_waiting_for_remote_kv: ("7288fd8677855b1b", "e5f67db8390f9398"),
    Request.__init__: ("aa52657c12d36848",),
    Request.append_output_token_ids: ("32def3ae04439bfc",),
    check_stop: ("804ae3ffff783327",),
}


class AddsToOutputs(ABC):
    """A connector that adds to the outputs of vLLM's scheduler. No other connector is called."""

    @abstractmethod
    def add_to_outputs(self, scheduler: Scheduler, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add to a step's outputs, by client. Called by our wrapper of vLLM's scheduler, once all else is done."""


def scheduler_obstacle(vllm_config: VllmConfig) -> str:
    """Wrap the scheduler's method. Returns the reason why it cannot be wrapped; "" if it is."""
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if scheduler not in {Scheduler, AsyncScheduler}:
        return f"the scheduler {scheduler.__qualname__}"
    original = Scheduler.update_from_output
    if getattr(original, "is_added_to", False):
        return ""
    unknown = [
        function.__qualname__
        for function, digests in _USED.items()
        if source_digest(function) not in digests
    ]
    if unknown:
        return f"another {' and '.join(unknown)} than the known releases of vLLM"

    @functools.wraps(original)
    def update_from_output(
        self: Scheduler, *arguments: Any, **named: Any
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = original(self, *arguments, **named)
        is_several = isinstance(self.connector, MultiConnector)
        for connector in self.connector.sub_connectors if is_several else (self.connector,):
            if isinstance(connector, AddsToOutputs):
                connector.add_to_outputs(self, outputs)
        return outputs

    vars(update_from_output)["is_added_to"] = True
    Scheduler.update_from_output = update_from_output
    return ""


def source_digest(function: Any) -> str:
    """Return a digest of a function's own source, not of a function that it wraps."""
    source = inspect.getsource(function.__code__)
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
