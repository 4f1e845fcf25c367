"""The scheduler half's memory of requests beyond their own lives. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REMEMBERED_REPORTS = 16384


class Reports:
    """Finished requests that workers reported lately, to distinguish a repeated report from another connector's."""

    def __init__(self, capacity: int = REMEMBERED_REPORTS) -> None:
        self._capacity = capacity
        self._seen: dict[str, None] = {}
        self._reasons: dict[str, str] = {}

    def explain(self, request_id: str, reason: str) -> None:
        """Remember why a request failed that not every worker has reported."""
        self._reasons.setdefault(request_id, reason)

    def take_reason(self, request_id: str) -> str:
        """Return why a request failed that all have reported; empty if none of them gave a reason."""
        return self._reasons.pop(request_id, "")

    def add(self, request_ids: Iterable[str]) -> None:
        """Remember these, and forget the oldest."""
        for request_id in request_ids:
            self._seen.pop(request_id, None)
            self._seen[request_id] = None
        while len(self._seen) > self._capacity:
            del self._seen[next(iter(self._seen))]

    def forget(self, request_id: str) -> None:
        """The request may be reported anew."""
        self._seen.pop(request_id, None)

    def repeated(self, request_ids: Iterable[str]) -> set[str]:
        """Those that were reported before."""
        return {request_id for request_id in request_ids if request_id in self._seen}


class IdleSteps:
    """Counts steps, to find those in which nothing is computed, nor in flight."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        is_async = vllm_config.scheduler_config.async_scheduling
        # steps that are planned before the first one's results are taken
        self._at_once = max(2 if is_async else 1, int(parallel.pipeline_parallel_size))
        self._num_empty = self._at_once  # before the first one nothing is in flight
        # ranks of data parallelism run in step: an empty one here may hold up another's tokens
        self._has_peers = parallel.data_parallel_size > 1

    def plan(self, num_tokens: int) -> bool:
        """Count a step that computes `num_tokens` tokens. Returns True if it is idle."""
        self._num_empty = 0 if num_tokens else self._num_empty + 1
        return self._num_empty >= self._at_once and not self._has_peers


class Siblings:
    """Requests that name one and the same producer request, as several completions of one prompt do.

    A producer's blocks are read once: the first request reads them, and the others wait until it has them and find
    them in the prefix cache.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], str] = {}
        self._source: dict[str, tuple[str, str]] = {}
        self._waiting: dict[str, str] = {}

    def add(self, request_id: str, engine_id: str, transfer_id: str) -> bool:
        """Returns True if the request is the first of its kind, and so the one that reads."""
        source = (engine_id, transfer_id)
        first = self._first.setdefault(source, request_id)
        if first == request_id:
            self._source[request_id] = source
            return True
        self._waiting[request_id] = first
        return False

    def first_of(self, request_id: str) -> str | None:
        """The request that another one waits for; None for one that reads itself."""
        return self._waiting.get(request_id)

    def remove(self, request_id: str) -> None:
        """The request is over. Unknown ones are ignored."""
        self._waiting.pop(request_id, None)
        source = self._source.pop(request_id, None)
        if source is not None:
            del self._first[source]
