"""The aggregator of worker reports: each event reaches the engine once, after the last worker."""

import pytest

from kvconnector.errors import LocalError
from kvconnector.session import completion
from kvconnector.session.completion import KVOutputAggregator, WorkerOutput

NOTHING = WorkerOutput()


def output(sent):
    return WorkerOutput(finished_sending={sent})


def failed(**filled):
    return WorkerOutput(
        finished_recving={"r"}, failed_recving={"r": "PeerLostError: gone"}, filled_tokens=filled
    )


@pytest.mark.parametrize(
    "reports, filled",
    [
        ([failed(r=32), failed(r=48)], {"r": 32}),
        ([failed(r=48), failed(r=32)], {"r": 32}),
        ([failed(r=32), WorkerOutput(finished_recving={"r"})], {"r": 32}),
        ([failed(), failed(r=48)], {}),
        ([failed(r=48), failed()], {}),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_the_tokens_that_every_worker_has_count_as_filled(reports, filled, is_late):
    aggregator = KVOutputAggregator(2)
    steps = [(reports[0], NOTHING), (NOTHING, reports[1])] if is_late else [tuple(reports)]
    *before, last = [aggregator.aggregate(step) for step in steps]
    assert before in ([], [NOTHING])
    assert (last.finished_recving, last.filled_tokens) == ({"r"}, filled)


@pytest.mark.parametrize("count, expected", [(None, 4), (0, 4), (2, 2)])
def test_a_connectors_finished_count_is_used(count, expected):
    class Connector:
        def get_finished_count(self):
            return count

    aggregator = KVOutputAggregator.from_connector(Connector(), world_size=4)
    steps = [[output("r") if worker == n else None for worker in range(4)] for n in range(4)]
    results = [aggregator.aggregate(step, output_rank=n) for n, step in enumerate(steps)]
    assert [bool(each.finished_sending) for each in results].index(True) == expected - 1


def test_incomplete_events_are_dropped_oldest_first(monkeypatch):
    monkeypatch.setattr(completion, "MAX_INCOMPLETE_EVENTS", 2)
    aggregator = KVOutputAggregator(2)
    for name in "abc":
        aggregator.aggregate((WorkerOutput(kv_cache_events=(name,)), NOTHING))
    result = aggregator.aggregate((NOTHING, WorkerOutput(kv_cache_events=("c", "b", "a"))))
    assert result.kv_cache_events == ("c", "b")


def test_complete_events_do_not_count_against_the_limit(monkeypatch):
    monkeypatch.setattr(completion, "MAX_INCOMPLETE_EVENTS", 2)
    aggregator = KVOutputAggregator(2)
    incomplete = WorkerOutput(kv_cache_events=("a",))
    assert aggregator.aggregate((incomplete, NOTHING)) == NOTHING
    for name in "bcd":
        complete = WorkerOutput(kv_cache_events=(name,))
        assert aggregator.aggregate((complete, complete)) == complete
    assert aggregator.aggregate((NOTHING, incomplete)) == incomplete


def test_impossible_worker_counts_are_refused():
    aggregator = KVOutputAggregator(2)
    wrong = WorkerOutput(expected_finished_count=-1)
    with pytest.raises(LocalError, match="negative"):
        aggregator.aggregate((output("r"), wrong))
    assert aggregator.aggregate((NOTHING, output("r"))) == NOTHING  # none of it was counted
    with pytest.raises(LocalError, match="at least one"):
        KVOutputAggregator(0)
    with pytest.raises(LocalError, match="expected_finished_count must be an integer"):
        KVOutputAggregator("2")
    with pytest.raises(LocalError, match=r"the output of every worker.*outputs=1, workers=2"):
        aggregator.aggregate([output("r")])
    for outputs, got in ((None, "NoneType"), (output("r"), "WorkerOutput"), (["x", None], "str")):
        with pytest.raises(LocalError, match=f"the output of each worker.*{got}"):
            aggregator.aggregate(outputs)
    aggregator = KVOutputAggregator(1)
    with pytest.raises(LocalError, match="no such worker"):
        aggregator.aggregate([output("r")], output_rank=1)
    assert aggregator.aggregate([NOTHING]) == NOTHING
