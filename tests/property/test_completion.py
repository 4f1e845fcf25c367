"""`KVOutputAggregator` against a model that remembers every report and looks at all of them again each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.session.completion import (
    KVOutputAggregator,
    TransferStats,
    WorkerOutput,
    WorkerStats,
)

MAX_WORKERS = 4
requests = st.sampled_from(["a", "b", "c"])
some_requests = st.frozensets(requests)
stats = st.builds(
    WorkerStats,
    transfers=st.lists(
        st.builds(
            TransferStats,
            request_id=requests,
            nbytes=st.integers(0, 9),
            seconds=st.just(0.5),
            path=st.just("packed"),
        ),
        max_size=2,
    ).map(tuple),
    failures=st.dictionaries(
        st.sampled_from(["LeaseExpiredError", "PeerLostError"]), st.integers(1, 3)
    ),
    leases_expired=st.integers(0, 2),
)


@st.composite
def outputs(draw):
    received = draw(some_requests)
    return WorkerOutput(
        finished_sending=draw(some_requests),
        finished_recving=received,
        failed_recving=draw(st.dictionaries(requests, st.sampled_from(["lost", "refused"]))),
        stats=draw(stats),
    )


@dataclass
class Kind:
    """One of sending and receiving: `(request, worker)` reports of incomplete requests."""

    reports: list[tuple[str, int]] = field(default_factory=list)

    def report(self, worker: int, request: str, expected: int) -> bool:
        self.reports.append((request, worker))
        if len({who for what, who in self.reports if what == request}) < expected:
            return False
        self.reports = [report for report in self.reports if report[0] != request]
        return True


@dataclass
class Model:
    expected: int
    sending: Kind = field(default_factory=Kind)
    recving: Kind = field(default_factory=Kind)
    reasons: dict[str, str] = field(default_factory=dict)
    said: list[WorkerOutput] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, worker: int, output: WorkerOutput) -> None:
        self.said.append(output)
        for request in output.finished_sending:
            if self.sending.report(worker, request, self.expected):
                self.sent.add(request)
        for request, reason in output.failed_recving.items():
            self.reasons.setdefault(request, reason)
        for request in output.finished_recving:
            if self.recving.report(worker, request, self.expected):
                self.received.add(request)
                if request in self.reasons:
                    self.failed[request] = self.reasons.pop(request)

    def check(self, engine: WorkerOutput) -> None:
        """Compare with what the engine was told since the last time, and start anew."""
        assert engine.finished_sending == self.sent
        assert engine.finished_recving == self.received
        assert engine.failed_recving == self.failed
        assert engine.stats.transfers == tuple(t for o in self.said for t in o.stats.transfers)
        assert engine.stats.leases_expired == sum(o.stats.leases_expired for o in self.said)
        errors = {name for o in self.said for name in o.stats.failures}
        assert engine.stats.failures == {
            name: sum(o.stats.failures.get(name, 0) for o in self.said) for name in errors
        }
        self.said, self.sent, self.received, self.failed = [], set(), set(), {}


@given(expected=st.integers(1, MAX_WORKERS), data=st.data())
def test_the_aggregator_says_what_the_model_says(expected, data):
    workers = data.draw(st.integers(1, MAX_WORKERS))
    aggregator, model = KVOutputAggregator(expected), Model(expected)
    for _ in range(data.draw(st.integers(1, 8))):
        step = [data.draw(st.none() | outputs()) for _ in range(workers)]
        output_rank = data.draw(st.integers(0, workers - 1))
        engine = aggregator.aggregate(step, output_rank)
        for worker, output in enumerate(step):
            if output is not None:
                model.take(worker, output)
        assert (engine is None) == (step[output_rank] is None)
        if engine is not None:
            model.check(engine)
