"""What an engine gets of its workers' reports: nothing before the last worker, and nothing twice."""

import pytest

from kvconnector.errors import LocalError
from kvconnector.session.completion import (
    KVOutputAggregator,
    LoadInFlight,
    RequestTrace,
    TransferStats,
    WorkerOutput,
    WorkerStats,
)

NOTHING = WorkerOutput()
LOAD = TransferStats(request_id="r", nbytes=9, seconds=0.5, path="packed")


def output(sent="", received="", *, unsent=None, failed=None, **stats):
    """What a worker says of requests with names of one letter."""
    return WorkerOutput(
        finished_sending=frozenset(sent),
        finished_recving=frozenset(received),
        failed_sending=unsent or {},
        failed_recving=failed or {},
        stats=WorkerStats(**stats),
    )


@pytest.mark.parametrize("kind", ["finished_sending", "finished_recving"])
def test_a_request_is_finished_with_its_last_worker_once_however_often_they_report_it(kind):
    aggregator = KVOutputAggregator(2)
    report = WorkerOutput(**{kind: frozenset("r")})
    reports = ((report, NOTHING), (report, NOTHING), (NOTHING, report), (NOTHING, NOTHING))
    merged = [aggregator.aggregate(step) for step in reports]
    assert merged == [NOTHING, NOTHING, report, NOTHING]
    # and a name may be used again
    assert aggregator.aggregate((report, report)) == report


def test_sending_and_receiving_are_counted_apart():
    aggregator = KVOutputAggregator(2)
    merged = aggregator.aggregate((output(sent="r"), output(received="r")))
    assert merged == NOTHING
    assert aggregator.aggregate((output(received="r"), output(sent="r"))) == output("r", "r")


def test_a_failure_of_one_worker_is_reported_with_the_request_when_all_have_let_go():
    aggregator = KVOutputAggregator(2)
    report = output("a", "b", unsent={"a": "bad blocks"}, failed={"b": "lost"})
    assert aggregator.aggregate((report, NOTHING)) == NOTHING
    later = output("ac", "bd", failed={"b": "too late"})
    assert aggregator.aggregate((NOTHING, later)) == report
    # of others, and of the next requests of these names, nothing failed
    assert aggregator.aggregate((output("c", "d"), NOTHING)) == output("c", "d")
    assert aggregator.aggregate((output("a", "b"), output("a", "b"))) == output("a", "b")


def test_what_is_reported_while_one_worker_has_no_output_comes_with_its_next_one():
    aggregator = KVOutputAggregator(2)
    report = output("r", transfers=(LOAD,), failures={"PeerLostError": 1}, leases_expired=1)
    assert aggregator.aggregate((None, report)) is None
    merged = aggregator.aggregate((report, None))
    twice = {"transfers": (LOAD, LOAD), "failures": {"PeerLostError": 2}, "leases_expired": 2}
    assert merged == output("r", **twice)


def test_notices_traces_and_loads_in_flight_of_all_workers_are_passed_on_at_once():
    def worker(number):
        trace = RequestTrace(request_id="r", kind="load", outcome="done", phases=(), nbytes=number)
        sizes = {"nbytes": number, "total_bytes": 9, "seconds": 1.0}
        load = LoadInFlight(request_id="r", rank=str(number), peer="p", path="packed", **sizes)
        stats = WorkerStats(traces=(trace,), loading=(load,))
        return WorkerOutput(begun=frozenset({"all", f"only {number}"}), stats=stats)

    outputs = [worker(number) for number in range(3)]
    merged = KVOutputAggregator(3).aggregate(outputs)
    assert merged.begun == {"all", "only 0", "only 1", "only 2"}
    assert merged.stats.traces == tuple(output.stats.traces[0] for output in outputs)
    assert merged.stats.loading == tuple(output.stats.loading[0] for output in outputs)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(LocalError, match="at least one"):
        KVOutputAggregator(0)
    aggregator = KVOutputAggregator(1)
    with pytest.raises(LocalError, match="no such worker"):
        aggregator.aggregate([output("r")], output_rank=1)
    assert aggregator.aggregate([NOTHING]) == NOTHING
