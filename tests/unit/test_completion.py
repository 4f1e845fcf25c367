"""What an engine gets of its workers' reports: nothing before the last worker, and nothing twice."""

import pytest

from kvconnector.errors import LocalError
from kvconnector.session import completion
from kvconnector.session.completion import (
    KVOutputAggregator,
    LoadInFlight,
    RequestTrace,
    WorkerOutput,
    WorkerStats,
)

NOTHING = WorkerOutput()


def output(sent="", received="", *, unsent=None, failed=None, **stats):
    """What a worker says of requests with names of one letter."""
    return WorkerOutput(
        finished_sending=frozenset(sent),
        finished_recving=frozenset(received),
        failed_sending=unsent or {},
        failed_recving=failed or {},
        stats=WorkerStats(**stats),
    )


def test_a_failure_of_one_worker_is_reported_with_the_request_when_all_have_let_go():
    aggregator = KVOutputAggregator(2)
    report = output("a", "b", unsent={"a": "bad blocks"}, failed={"b": "lost"})
    assert aggregator.aggregate((report, NOTHING)) == NOTHING
    later = output("ac", "bd", failed={"b": "too late"})
    assert aggregator.aggregate((NOTHING, later)) == report
    # of others, and of the next requests of these names, nothing failed
    assert aggregator.aggregate((output("c", "d"), NOTHING)) == output("c", "d")
    assert aggregator.aggregate((output("a", "b"), output("a", "b"))) == output("a", "b")


def test_notices_traces_and_loads_in_flight_of_all_workers_are_passed_on_at_once():
    def worker(number):
        trace = RequestTrace(request_id="r", kind="load", outcome="done", phases=(), nbytes=number)
        sizes = {"nbytes": number, "total_bytes": 9, "seconds": 1.0}
        load = LoadInFlight(request_id="r", rank=str(number), peer="p", path="packed", **sizes)
        stats = WorkerStats(traces=[trace], loading=(load,))
        return WorkerOutput(begun=frozenset({"all", f"only {number}"}), stats=stats)

    outputs = [worker(number) for number in range(3)]
    merged = KVOutputAggregator(3).aggregate(outputs)
    assert merged.begun == {"all", "only 0", "only 1", "only 2"}
    assert merged.stats.traces == [output.stats.traces[0] for output in outputs]
    assert merged.stats.loading == tuple(output.stats.loading[0] for output in outputs)


@pytest.mark.parametrize("count, expected", [(None, 4), (0, 4), (2, 2)])
def test_a_connector_may_say_how_many_of_its_workers_report(count, expected):
    class Connector:
        def get_finished_count(self):
            return count

    aggregator = KVOutputAggregator.from_connector(Connector(), world_size=4)
    steps = [[output("r") if worker == n else None for worker in range(4)] for n in range(4)]
    told = [aggregator.aggregate(step, output_rank=n) for n, step in enumerate(steps)]
    assert [bool(each.finished_sending) for each in told].index(True) == expected - 1


def test_a_cache_event_is_passed_on_when_all_workers_have_reported_it_and_again_when_it_comes_again():
    def events(*names):
        return WorkerOutput(kv_cache_events=names)

    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate((events("a", "b", "a"), events("a"))) == events("a")
    assert aggregator.aggregate((NOTHING, events("c", "a"))) == events("a")
    assert aggregator.aggregate((NOTHING, events("a", "b"))) == events("b")
    assert aggregator.aggregate((events("a"), NOTHING)) == events("a")


def test_events_that_a_worker_never_reports_are_forgotten_the_oldest_first(monkeypatch):
    monkeypatch.setattr(completion, "MAX_INCOMPLETE_EVENTS", 2)
    aggregator = KVOutputAggregator(2)
    for name in "abc":
        aggregator.aggregate((WorkerOutput(kv_cache_events=(name,)), NOTHING))
    told = aggregator.aggregate((NOTHING, WorkerOutput(kv_cache_events=("c", "b", "a"))))
    assert told.kv_cache_events == ("c", "b")


def test_events_that_are_complete_need_no_room(monkeypatch):
    monkeypatch.setattr(completion, "MAX_INCOMPLETE_EVENTS", 2)
    aggregator = KVOutputAggregator(2)
    incomplete = WorkerOutput(kv_cache_events=("a",))
    assert aggregator.aggregate((incomplete, NOTHING)) == NOTHING
    for name in "bcd":
        complete = WorkerOutput(kv_cache_events=(name,))
        assert aggregator.aggregate((complete, complete)) == complete
    assert aggregator.aggregate((NOTHING, incomplete)) == incomplete


def test_what_cannot_be_counted_is_refused():
    aggregator = KVOutputAggregator(2)
    wrong = WorkerOutput(expected_finished_count=-1)
    with pytest.raises(LocalError, match="negative"):
        aggregator.aggregate((output("r"), wrong))
    assert aggregator.aggregate((NOTHING, output("r"))) == NOTHING  # nothing of it was taken
    with pytest.raises(LocalError, match="at least one"):
        KVOutputAggregator(0)
    aggregator = KVOutputAggregator(1)
    with pytest.raises(LocalError, match="no such worker"):
        aggregator.aggregate([output("r")], output_rank=1)
    assert aggregator.aggregate([NOTHING]) == NOTHING
