"""Counting across ranks: a request is finished when every worker of the engine has reported it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta, structs

from kvconnector.errors import LocalError, require_counts

MAX_INCOMPLETE_EVENTS = 1 << 16
"""The most cache events that only some workers have reported; beyond it the oldest are forgotten."""


class Phase(msgspec.Struct, frozen=True, array_like=True):
    """A part of a transfer: its name, and its start and end in seconds since 1970."""

    name: str
    start_s: float
    end_s: float


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's finished transfer, and the times of its parts.

    The phases of a load are `want`, while the request is queued and the peer may be greeted; `greeting`, while the
    request's blocks wait for the peer; and `read`. A packed load also has `wire`, from the first to the last chunk's
    arrival, and `unpack`, from the first chunk's arrival until the last chunk is in place; the part of `read` before
    these is the producer's time. The phases of a lease are `fill`, while its prompt is being computed, `hold`, and for
    all packed reads together `send`, with `pack` and `wire` until the last chunk is packed and sent.

    The `outcome` of a load is "done" or an error's type, that of a lease "released", "expired" or "aborted". `waited_s`
    is the time for which a load's blocks waited, the exposed part of the handover; for a streamed prompt only the wait
    for its last part counts. A load that moved bytes names its `path`, see `events.ReceiveFinished`; several are joined
    by "+". `seconds` is the duration of its slowest read, from the posted receive or the first copy to the last byte in
    place.
    """

    request_id: str
    kind: Literal["load", "hold"]
    outcome: str
    phases: tuple[Phase, ...]
    peer: str = ""
    nbytes: int = 0
    path: str = ""
    waited_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = ", ".join(f"{p.name} {p.end_s - p.start_s:.3f} s" for p in self.phases)
        what = f"{self.nbytes} bytes from {self.peer} by {self.path or 'no path'}"
        return f"request {self.request_id}, {what}, {self.outcome}; {parts}"


class LoadInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of an unfinished load: `nbytes` of the `total_bytes` requested so far have arrived in the
    `seconds` since its first read began. A streamed prompt requests more as it is computed.
    """

    request_id: str
    rank: str
    peer: str
    path: str
    nbytes: int
    total_bytes: int
    seconds: float


class WorkerStats(msgspec.Struct, kw_only=True):
    """A worker's transfers since its last output. `failures` counts failed loads by error type; `packed` counts the
    greeted producer ranks that it cannot read directly, by reason; `contained` counts unexpected exceptions that ended
    one request or connection, by type. Only some outputs have `loading`.
    """

    failures: dict[str, int] = {}
    leases_expired: int = 0
    traces: list[RequestTrace] = []
    loading: tuple[LoadInFlight, ...] = ()
    packed: dict[str, int] = {}
    contained: dict[str, int] = {}

    def merged(self, other: WorkerStats) -> WorkerStats:
        """Return the sum of both."""
        return WorkerStats(
            failures=dict(Counter(self.failures) + Counter(other.failures)),
            leases_expired=self.leases_expired + other.leases_expired,
            traces=self.traces + other.traces,
            loading=self.loading + other.loading,
            packed=dict(Counter(self.packed) + Counter(other.packed)),
            contained=dict(Counter(self.contained) + Counter(other.contained)),
        )

    @property
    def transfers(self) -> list[RequestTrace]:
        """The traces of loads that moved bytes."""
        return [trace for trace in self.traces if trace.path]

    @property
    def is_empty(self) -> bool:
        """Returns True if there is nothing to report."""
        return self == WorkerStats()


class WorkerOutput(msgspec.Struct, kw_only=True):
    """The report of one worker to the scheduler after a step, or after aggregation of the whole engine. A worker fills
    it until the engine takes it; it does not change after that.

    `failed_recving` has the reason of each load that failed, and `failed_sending` that of each request whose blocks
    could not be offered or whose lease ended before all consumers had confirmed. A reason begins with the error's class
    and a colon. These requests are in the finished sets too, loads as soon as nothing writes to their blocks.
    `filled_tokens` is the number of leading tokens of a failed load that are in its blocks nevertheless, if that is
    known and all groups keep every token. `producer_started` are followed requests whose load may now be asked for,
    because the producer has started them or never will. `extras` are the bytes that the producer's engine gave to
    `Scheduler.offer` for them, in the first worker's report.

    The next three are for engines that count more than transfers. `invalid_block_ids` are blocks whose content must be
    computed again. `kv_cache_events` are names that the engine chooses, passed on once every worker has reported them.
    `expected_finished_count`, if not 0, is how many workers report each request that is first reported later.
    """

    finished_sending: set[str] = set()
    finished_recving: set[str] = set()
    failed_recving: dict[str, str] = {}
    stats: WorkerStats = msgspec.field(default_factory=WorkerStats)
    failed_sending: dict[str, str] = {}
    producer_started: set[str] = set()
    invalid_block_ids: frozenset[int] = frozenset()
    kv_cache_events: tuple[str, ...] = ()
    expected_finished_count: Annotated[int, Meta(ge=0)] = 0
    filled_tokens: dict[str, int] = {}
    extras: dict[str, bytes] = {}

    def merged(self, other: WorkerOutput) -> WorkerOutput:
        """Return the sum of two outputs. Neither is changed.

        Args:
            other: The output of another step, or of another worker.
        """
        return WorkerOutput(
            finished_sending=self.finished_sending | other.finished_sending,
            finished_recving=self.finished_recving | other.finished_recving,
            failed_recving={**self.failed_recving, **other.failed_recving},
            failed_sending={**self.failed_sending, **other.failed_sending},
            stats=self.stats.merged(other.stats),
            producer_started=self.producer_started | other.producer_started,
            invalid_block_ids=self.invalid_block_ids | other.invalid_block_ids,
            kv_cache_events=self.kv_cache_events + other.kv_cache_events,
            expected_finished_count=other.expected_finished_count or self.expected_finished_count,
            filled_tokens=_smallest(self.filled_tokens, other.filled_tokens),
            extras={**self.extras, **other.extras},
        )

    @property
    def is_empty(self) -> bool:
        """Returns True if there is nothing to report."""
        return self == WorkerOutput()


def _smallest(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {key: min(first.get(key, n), n) for key, n in {**first, **second}.items()}


class FinishedCounter(Protocol):
    """A connector that knows how many workers report each request; None or 0 means all workers of the engine."""

    def get_finished_count(self) -> int | None: ...


class _Reports:
    """The workers that have reported each request, and the reason if it failed. The first report of a request
    determines how many workers must report it.
    """

    def __init__(self) -> None:
        self._awaited: dict[str, tuple[int, set[int]]] = {}
        self._failed: dict[str, tuple[str, int]] = {}

    def failed(self, reasons: Mapping[str, str], filled: Mapping[str, int]) -> None:
        """Record why requests failed, and how many of their tokens a worker has: the first reason counts, and the
        smallest number, which is unknown if a failed worker does not know its own.
        """
        for request_id, reason in reasons.items():
            count = filled.get(request_id, _UNKNOWN)
            first, smallest = self._failed.get(request_id, (reason, count))
            self._failed[request_id] = first, min(smallest, count)

    def finished(
        self, worker: int, request_ids: Iterable[str], expected: int
    ) -> tuple[set[str], dict[str, tuple[str, int]]]:
        """Record one worker's report. Returns the requests that are complete now, and the reasons and tokens of failed
        ones.
        """
        complete = set()
        for request_id in request_ids:
            needed, workers = self._awaited.setdefault(request_id, (expected, set()))
            workers.add(worker)
            if len(workers) >= needed:
                del self._awaited[request_id]
                complete.add(request_id)
        return complete, {r: self._failed.pop(r) for r in complete if r in self._failed}


_UNKNOWN = -1


class _Events:
    """The cache events that only some workers have reported, each with every worker's count."""

    def __init__(self) -> None:
        self._reports: dict[str, Counter[int]] = {}

    def take(self, worker: int, events: Iterable[str], num_workers: int) -> tuple[str, ...]:
        """Record one worker's events. Returns those that every worker has reported now. Repeated ones count again."""
        complete = []
        for event in events:
            reports = self._reports.setdefault(event, Counter())
            reports[worker] += 1
            if len(reports) == num_workers:
                complete.append(event)
                reports -= Counter(list(reports))
            if not reports:
                del self._reports[event]
        while len(self._reports) > MAX_INCOMPLETE_EVENTS:
            del self._reports[next(iter(self._reports))]
        return tuple(complete)


class KVOutputAggregator:
    """Merges the outputs of all workers of an engine, step by step.

    Sending and receiving are counted separately, and a worker counts once, no matter how often it reports a request. If
    a load failed in any worker, it is reported as failed once every worker has reported it, because then none of them
    writes to its blocks any more. Cache events are counted by worker too. Invalid blocks and statistics are passed on
    at once.

    Args:
        expected_finished_count: Number of workers that report each request, until an output changes it.

    Raises:
        LocalError: An expected count is below one.
    """

    def __init__(self, expected_finished_count: int) -> None:
        require_counts(LocalError, expected_finished_count=expected_finished_count)
        if expected_finished_count < 1:
            raise LocalError(
                "at least one worker must report a request",
                expected_finished_count=expected_finished_count,
            )
        self._expected = self._least = expected_finished_count
        self._sending, self._recving, self._events = _Reports(), _Reports(), _Events()
        self._pending = WorkerOutput()

    @classmethod
    def from_connector(cls, connector: FinishedCounter, world_size: int) -> KVOutputAggregator:
        """Return an aggregator for the workers of a connector.

        Args:
            connector: A scheduler, or anything else that has `get_finished_count`.
            world_size: The number of workers, unless the connector names another one.

        Raises:
            LocalError: as the class.
        """
        return cls(connector.get_finished_count() or world_size)

    def aggregate(
        self, outputs: Sequence[WorkerOutput | None], output_rank: int = 0
    ) -> WorkerOutput | None:
        """Merge one step of all workers.

        Args:
            outputs: The output of each worker, or None; the workers must always be in the same order.
            output_rank: The worker with whose output the engine's output is returned.

        Returns:
            The engine's output. None if the worker `output_rank` has no output in this step; the reports of the others
            are then kept for the next one.

        Raises:
            LocalError: there are fewer outputs than the workers that report each request, one is none, `output_rank`
                is not among them, or an output expects a negative count. Then no output of the step counts.
        """
        if not isinstance(outputs, Sequence) or not all(
            output is None or isinstance(output, WorkerOutput) for output in outputs
        ):
            kinds = outputs if isinstance(outputs, list | tuple) else [outputs]
            raise LocalError(
                "aggregate needs a list with the output of each worker, or None where it has none",
                got=sorted({type(each).__name__ for each in kinds}),
            )
        if len(outputs) < self._least:
            raise LocalError(
                "aggregate needs the output of every worker, or None where it has none: requests that fewer report"
                " never end",
                outputs=len(outputs),
                workers=self._least,
            )
        if not 0 <= output_rank < len(outputs):
            raise LocalError("no such worker", output_rank=output_rank, workers=len(outputs))
        present = [(worker, output) for worker, output in enumerate(outputs) if output is not None]
        for _, output in present:
            if (count := output.expected_finished_count) < 0:
                raise LocalError("a count must not be negative", expected_finished_count=count)
        # a failure counts even if another worker completes the request
        for _, output in present:
            self._sending.failed(output.failed_sending, {})
            self._recving.failed(output.failed_recving, output.filled_tokens)
        for worker, output in present:
            own = self._counted(worker, output, len(outputs))
            self._pending = self._pending.merged(own)
        if outputs[output_rank] is None:
            return None
        merged, self._pending = self._pending, WorkerOutput()
        return merged

    def _counted(self, worker: int, output: WorkerOutput, num_workers: int) -> WorkerOutput:
        """Return one worker's output with only those requests and events that are complete now."""
        expected = self._expected = output.expected_finished_count or self._expected
        sent, unsent = self._sending.finished(worker, output.finished_sending, expected)
        received, failed = self._recving.finished(worker, output.finished_recving, expected)
        return structs.replace(
            output,
            finished_sending=sent,
            finished_recving=received,
            failed_recving={request_id: reason for request_id, (reason, _) in failed.items()},
            failed_sending={request_id: reason for request_id, (reason, _) in unsent.items()},
            filled_tokens={r: count for r, (_, count) in failed.items() if count != _UNKNOWN},
            kv_cache_events=self._events.take(worker, output.kv_cache_events, num_workers),
        )
