from __future__ import annotations

import pytest

from kvconnector.errors import LocalError
from kvconnector.session.completion import (
    KVOutputAggregator,
    WorkerOutput,
)


def sent(*requests, **more):
    return WorkerOutput(finished_sending=frozenset(requests), **more)


def received(*requests, **more):
    return WorkerOutput(finished_recving=frozenset(requests), **more)


def told(aggregator: KVOutputAggregator, *step: WorkerOutput | None) -> WorkerOutput:
    """What the engine is told after a step in which the first worker has an output."""
    engine = aggregator.aggregate(step)
    assert engine is not None
    return engine


@pytest.mark.parametrize("count", [0, -1])
def test_nobody_is_no_expected_count(count):
    with pytest.raises(LocalError, match="at least one"):
        KVOutputAggregator(count)


def test_a_refused_step_changes_nothing():
    aggregator = KVOutputAggregator(1)
    with pytest.raises(LocalError, match="no such worker"):
        aggregator.aggregate([sent("r")], output_rank=1)
    assert told(aggregator, WorkerOutput()).is_empty


def test_a_request_that_one_worker_could_not_offer_failed_once_every_worker_has_let_go():
    aggregator = KVOutputAggregator(2)
    early = told(aggregator, sent("r", failed_sending={"r": "bad blocks"}), WorkerOutput())
    assert (early.finished_sending, early.failed_sending) == (frozenset(), {})
    late = told(aggregator, WorkerOutput(), sent("r", "s"))
    assert (late.finished_sending, late.failed_sending) == ({"r"}, {"r": "bad blocks"})
    assert told(aggregator, sent("s"), WorkerOutput()).failed_sending == {}
