"""`KVOutputAggregator` against a model that remembers every report and looks at all of them again each time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import LocalError
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
    reasons = st.dictionaries(requests, st.sampled_from(["lost", "refused"]))
    return WorkerOutput(
        finished_sending=draw(some_requests),
        finished_recving=draw(some_requests),
        failed_sending=draw(reasons),
        failed_recving=draw(reasons),
        stats=draw(stats),
    )


@dataclass
class Kind:
    """One of sending and receiving: `(request, worker)` reports and first reasons of incomplete requests, and those
    that were completed since the last time.
    """

    expected: int
    reports: set[tuple[str, int]] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, worker: int, finished: frozenset[str], failed: dict[str, str]) -> None:
        self.reasons = failed | self.reasons
        for request in finished:
            self.reports.add((request, worker))
            if sum(what == request for what, _ in self.reports) == self.expected:
                self.reports = {report for report in self.reports if report[0] != request}
                self.finished.add(request)
                if request in self.reasons:
                    self.failed[request] = self.reasons.pop(request)

    def said(self) -> tuple[set[str], dict[str, str]]:
        """What was completed since the last time."""
        said, self.finished, self.failed = (self.finished, self.failed), set(), {}
        return said


class Model:
    def __init__(self, expected: int) -> None:
        self.sending, self.recving = Kind(expected), Kind(expected)
        self.stats: list[WorkerStats] = []

    def take(self, worker: int, output: WorkerOutput) -> None:
        self.stats.append(output.stats)
        self.sending.take(worker, output.finished_sending, output.failed_sending)
        self.recving.take(worker, output.finished_recving, output.failed_recving)

    def check(self, engine: WorkerOutput) -> None:
        """Compare with what the engine was told since the last time, and start anew."""
        assert (set(engine.finished_sending), engine.failed_sending) == self.sending.said()
        assert (set(engine.finished_recving), engine.failed_recving) == self.recving.said()
        stats, self.stats = self.stats, []
        assert engine.stats.transfers == tuple(t for each in stats for t in each.transfers)
        assert engine.stats.leases_expired == sum(each.leases_expired for each in stats)
        errors = {name for each in stats for name in each.failures}
        assert engine.stats.failures == {
            name: sum(each.failures.get(name, 0) for each in stats) for name in errors
        }


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


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(LocalError, match="at least one"):
        KVOutputAggregator(0)
    aggregator = KVOutputAggregator(1)
    with pytest.raises(LocalError, match="no such worker"):
        aggregator.aggregate([WorkerOutput(finished_sending=frozenset({"r"}))], output_rank=1)
    engine = aggregator.aggregate([WorkerOutput()])
    assert engine is not None
    assert engine.is_empty
