"""`KVOutputAggregator` against a model that keeps every report and searches all of them each time."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.session.completion import (
    KVOutputAggregator,
    LoadInFlight,
    RequestTrace,
    WorkerOutput,
    WorkerStats,
)

MAX_WORKERS = 4
EVENTS = "wxyz"
requests = st.sampled_from(["a", "b", "c"])
some_requests = st.frozensets(requests)
failures = st.dictionaries(requests, st.sampled_from(["lost", "refused"]))
counts = st.dictionaries(st.sampled_from(["LeaseExpiredError", "X"]), st.integers(1, 3))
moved = {"request_id": requests, "nbytes": st.integers(0, 9)}
timed = {**moved, "seconds": st.just(0.5), "path": st.just("packed")}
place = {"rank": st.just("pp0tp0"), "peer": st.just("p"), "total_bytes": st.just(9)}
ended = {"kind": st.just("load"), "outcome": st.just("done"), "phases": st.just(())}
stats = st.builds(
    WorkerStats,
    failures=counts,
    leases_expired=st.integers(0, 2),
    traces=st.lists(st.builds(RequestTrace, **timed, **ended), max_size=2),
    loading=st.lists(st.builds(LoadInFlight, **timed, **place), max_size=2).map(tuple),
    packed=counts,
)
outputs = st.builds(
    WorkerOutput,
    finished_sending=some_requests,
    finished_recving=some_requests,
    failed_recving=failures,
    failed_sending=failures,
    producer_started=some_requests,
    stats=stats,
    invalid_block_ids=st.frozensets(st.integers(0, 5)),
    kv_cache_events=st.lists(st.sampled_from(EVENTS), max_size=3).map(tuple),
    expected_finished_count=st.integers(0, MAX_WORKERS),
)


@dataclass
class Direction:
    """Sending or receiving: the reports of incomplete requests, oldest first, each with the count expected then."""

    reports: list = field(default_factory=list)
    reasons: list = field(default_factory=list)

    def take(self, worker, finished, expected):
        complete = {}
        for request in finished:
            self.reports.append((request, worker, expected))
            mine = [report for report in self.reports if report[0] == request]
            if len({worker for _, worker, _ in mine}) >= mine[0][2]:
                self.reports = [report for report in self.reports if report[0] != request]
                complete[request] = next(
                    (why for name, why in self.reasons if name == request), None
                )
                self.reasons = [each for each in self.reasons if each[0] != request]
        return complete


@dataclass
class Model:
    expected: int
    num_workers: int
    sending: Direction = field(default_factory=Direction)
    recving: Direction = field(default_factory=Direction)
    outputs: list = field(default_factory=list)
    sent: dict = field(default_factory=dict)
    received: dict = field(default_factory=dict)

    def __post_init__(self):
        self.events = [Counter() for _ in range(self.num_workers)]
        self.reported_events = Counter()

    def take_step(self, outputs):
        reports = [(worker, output) for worker, output in enumerate(outputs) if output is not None]
        for _, output in reports:
            self.sending.reasons += output.failed_sending.items()
            self.recving.reasons += output.failed_recving.items()
        for worker, output in reports:
            self.take(worker, output)

    def take(self, worker, output):
        self.outputs.append(output)
        self.events[worker].update(output.kv_cache_events)
        self.expected = output.expected_finished_count or self.expected
        for direction, ended, finished in (
            (self.sending, self.sent, output.finished_sending),
            (self.recving, self.received, output.finished_recving),
        ):
            complete = direction.take(worker, finished, self.expected)
            # a name may complete twice before the engine takes it
            for request, reason in complete.items():
                ended[request] = reason or ended.get(request)

    def check(self, engine):
        """Compare with the engine's output since the last check, and forget it."""
        assert engine.finished_sending == set(self.sent)
        assert engine.finished_recving == set(self.received)
        assert engine.failed_sending == {r: why for r, why in self.sent.items() if why}
        assert engine.failed_recving == {r: why for r, why in self.received.items() if why}
        assert engine.producer_started == {
            name for o in self.outputs for name in o.producer_started
        }
        assert engine.invalid_block_ids == {i for o in self.outputs for i in o.invalid_block_ids}
        self.reported_events.update(engine.kv_cache_events)
        assert self.reported_events == Counter(
            {event: min(counts[event] for counts in self.events) for event in EVENTS}
        )
        stats = [output.stats for output in self.outputs]
        for name in ("transfers", "traces", "loading"):
            found = list(getattr(engine.stats, name))
            assert found == [item for each in stats for item in getattr(each, name)]
        for name in ("failures", "packed"):
            total = Counter()
            for each in stats:
                total.update(getattr(each, name))
            assert getattr(engine.stats, name) == total
        assert engine.stats.leases_expired == sum(each.leases_expired for each in stats)
        counts = [o.expected_finished_count for o in self.outputs if o.expected_finished_count]
        assert engine.expected_finished_count == (counts[-1] if counts else 0)
        self.outputs, self.sent, self.received = [], {}, {}


@given(expected=st.integers(1, MAX_WORKERS), data=st.data())
def test_the_aggregator_equals_its_model(expected, data):
    workers = data.draw(st.integers(expected, MAX_WORKERS))
    aggregator, model = KVOutputAggregator(expected), Model(expected, workers)
    for _ in range(data.draw(st.integers(1, 8))):
        step = [data.draw(st.none() | outputs) for _ in range(workers)]
        output_rank = data.draw(st.integers(0, workers - 1))
        engine = aggregator.aggregate(step, output_rank)
        model.take_step(step)
        assert (engine is None) == (step[output_rank] is None)
        if engine is not None:
            model.check(engine)
