"""Counting across ranks: a request is finished when every worker of the engine has said so."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import structs

from kvconnector.errors import LocalError


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one worker: payload bytes, and seconds of its slowest read, from the posted receive or the first copy
    to the last byte in place. `path` is how it came, see `events.ReceiveFinished`; several are joined by "+".
    """

    request_id: str
    nbytes: int
    seconds: float
    path: str


class Phase(msgspec.Struct, frozen=True, array_like=True):
    """A part of a transfer: its name, and its start and end in seconds since 1970."""

    name: str
    start_s: float
    end_s: float


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer of one worker that is over, and when its parts happened.

    A load's are `want`, while it is queued and its peer may be greeted; `greeting`, while its blocks wait for the peer;
    and `read`. A packed load also has `wire`, from its first chunk's arrival to its last's, and `unpack`, to the last
    one in place; what is in front of them in `read` is the producer's. A lease's are `fill`, while its prompt is
    computed, `hold`, and for each packed read a `send` with `pack` and `wire`, to the last chunk packed and sent. The
    `outcome` of a load is "done" or an error's type, that of a lease "released", "expired" or "aborted". A load kept
    its blocks waiting for `waited_s`: what is exposed of the handover. Of a streamed prompt, its last part counts.
    """

    request_id: str
    kind: Literal["load", "hold"]
    outcome: str
    phases: tuple[Phase, ...]
    peer: str = ""
    nbytes: int = 0
    path: str = ""
    waited_s: float = 0.0

    def __str__(self) -> str:
        parts = ", ".join(f"{p.name} {p.end_s - p.start_s:.3f} s" for p in self.phases)
        what = f"{self.nbytes} bytes from {self.peer} by {self.path or 'no path'}"
        return f"request {self.request_id}, {what}, {self.outcome}; {parts}"


class LoadInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of a load that is not over: how many of its bytes have come in the seconds since it began.
    `total_bytes` are asked for so far: of a prompt that is streamed more as it is computed.
    """

    request_id: str
    rank: str
    peer: str
    path: str
    nbytes: int
    total_bytes: int
    seconds: float


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did since its last output. `failures` counts by error type. `loading` is there now and then."""

    transfers: tuple[TransferStats, ...] = ()
    failures: dict[str, int] = {}
    leases_expired: int = 0
    traces: tuple[RequestTrace, ...] = ()
    loading: tuple[LoadInFlight, ...] = ()

    def merged(self, other: WorkerStats) -> WorkerStats:
        """Both, as one."""
        return WorkerStats(
            transfers=self.transfers + other.transfers,
            failures=dict(Counter(self.failures) + Counter(other.failures)),
            leases_expired=self.leases_expired + other.leases_expired,
            traces=self.traces + other.traces,
            loading=self.loading + other.loading,
        )

    @property
    def is_empty(self) -> bool:
        """Nothing to report."""
        return self == WorkerStats()


class WorkerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker, or after aggregation the engine, tells the scheduler after a step.

    `failed_recving` and `failed_sending` map loads that failed, and requests whose blocks could not be offered or whose
    lease ended unconfirmed, to the reason, which begins with the error's class and a colon. They are among the finished
    ones too, loads once nothing writes their blocks. `begun` are followed requests whose load may be asked for.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: dict[str, str] = {}
    stats: WorkerStats = WorkerStats()
    failed_sending: dict[str, str] = {}
    begun: frozenset[str] = frozenset()

    def merged(self, other: WorkerOutput) -> WorkerOutput:
        """Both, as one."""
        return WorkerOutput(
            finished_sending=self.finished_sending | other.finished_sending,
            finished_recving=self.finished_recving | other.finished_recving,
            failed_recving={**self.failed_recving, **other.failed_recving},
            failed_sending={**self.failed_sending, **other.failed_sending},
            stats=self.stats.merged(other.stats),
            begun=self.begun | other.begun,
        )

    @property
    def is_empty(self) -> bool:
        """Nothing to report."""
        return self == WorkerOutput()


class _Reports:
    """Which workers have reported which request, and why it failed, until enough have."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._workers: defaultdict[str, set[int]] = defaultdict(set)
        self._failed: dict[str, str] = {}

    def take(
        self, worker: int, finished: Iterable[str], failed: Mapping[str, str]
    ) -> tuple[set[str], dict[str, str]]:
        """One worker's report: the requests that are complete with it, and why those of them failed that did."""
        self._failed = {**failed, **self._failed}
        complete = set()
        for request_id in finished:
            self._workers[request_id].add(worker)
            if len(self._workers[request_id]) >= self._expected:
                del self._workers[request_id]
                complete.add(request_id)
        return complete, {r: self._failed.pop(r) for r in complete if r in self._failed}


class KVOutputAggregator:
    """Merges the outputs of all workers of an engine, step by step.

    Sending and receiving are counted apart, and a worker counts once, however often it reports a request. What any
    worker failed to receive is failed once every worker has reported it, so that none still writes its blocks.

    Raises:
        LocalError: an expected count below one.
    """

    def __init__(self, expected_finished_count: int) -> None:
        if expected_finished_count < 1:
            raise LocalError(
                "at least one worker must report a request",
                expected_finished_count=expected_finished_count,
            )
        self._sending = _Reports(expected_finished_count)
        self._recving = _Reports(expected_finished_count)
        self._pending = WorkerOutput()

    def aggregate(
        self, outputs: Sequence[WorkerOutput | None], output_rank: int = 0
    ) -> WorkerOutput | None:
        """The engine's output of one step, from one output (or None) a worker, workers always in the same order.

        None when the worker `output_rank` has none in this step: what the others said is kept for the next one.

        Raises:
            LocalError: `output_rank` is not among the workers.
        """
        if not 0 <= output_rank < len(outputs):
            raise LocalError("no such worker", output_rank=output_rank, workers=len(outputs))
        for worker, output in enumerate(outputs):
            if output is not None:
                self._pending = self._merge(self._pending, worker, output)
        if outputs[output_rank] is None:
            return None
        merged, self._pending = self._pending, WorkerOutput()
        return merged

    def _merge(self, merged: WorkerOutput, worker: int, output: WorkerOutput) -> WorkerOutput:
        sent, unsent = self._sending.take(worker, output.finished_sending, output.failed_sending)
        received, failed = self._recving.take(
            worker, output.finished_recving, output.failed_recving
        )
        return merged.merged(
            structs.replace(
                output,
                finished_sending=frozenset(sent),
                finished_recving=frozenset(received),
                failed_recving=failed,
                failed_sending=unsent,
            )
        )
