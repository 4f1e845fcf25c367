"""Our aggregator compared with vLLM's own, which merges the outputs of our vLLM workers, over the same outputs."""

import random
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_events import BlockRemoved
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheKVEvents
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvconnector.integrations.vllm.messages import WorkerReport
from kvconnector.integrations.vllm.stats import ConnectorStats
from kvconnector.session import KVOutputAggregator, WorkerOutput, WorkerStats
from kvconnector.session.completion import RequestTrace

pytestmark = pytest.mark.vllm

REQUESTS = [f"r{number}" for number in range(6)]
PACKED = {"kind": "load", "outcome": "done", "phases": (), "path": "packed"}


def events_of(names):
    """Return a worker's events, as a connector of vLLM's makes them."""
    events = LMCacheKVEvents(1)
    events.add_events([BlockRemoved(block_hashes=[1], medium=name) for name in names])
    return events


class Worker:
    """Finishes each request once in each direction, in an order of its own."""

    def __init__(self, rng):
        self._rng = rng
        self._left = {way: rng.sample(REQUESTS, len(REQUESTS)) for way in ("send", "recv")}

    def step(self, events, expected):
        """Return the worker's output of one step in our form; None if it is empty."""
        rng = self._rng
        sent, received = (
            frozenset(left.pop() for _ in range(rng.randint(0, min(2, len(left)))))
            for left in self._left.values()
        )
        may_fail = sorted(received) + self._left["recv"]
        failed = rng.sample(may_fail, rng.randint(0, min(1, len(may_fail))))
        loads = [
            RequestTrace(request_id=r, nbytes=rng.randint(1, 9), seconds=0.5, **PACKED)
            for r in sorted(received)
        ]
        output = WorkerOutput(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=dict.fromkeys(failed, "PeerLostError: lost"),
            invalid_block_ids=frozenset(rng.sample(range(9), rng.randint(0, 2))),
            kv_cache_events=tuple(events),
            expected_finished_count=expected,
            producer_started=frozenset(rng.sample(REQUESTS, rng.randint(0, 2))),
            stats=WorkerStats(traces=loads, leases_expired=rng.randint(0, 1)),
        )
        return None if output.is_empty else output

    @property
    def is_done(self):
        return not any(self._left.values())


def as_vllm(output):
    """Return a worker's output in vLLM's form."""
    found = None
    if output is not None:
        found = KVConnectorOutput(
            finished_sending=set(output.finished_sending) or None,
            finished_recving=set(output.finished_recving) or None,
            failed_recving=set(output.failed_recving),
            invalid_block_ids=set(output.invalid_block_ids),
            kv_cache_events=events_of(output.kv_cache_events),
            expected_finished_count=output.expected_finished_count,
            kv_connector_worker_meta=WorkerReport(producer_started=set(output.producer_started)),
            kv_connector_stats=ConnectorStats.of(output.stats),
        )
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=found)


@pytest.mark.parametrize("seed", range(200))
def test_both_aggregate_any_outputs_alike(seed):
    rng = random.Random(seed)
    world_size, told = rng.randint(1, 4), rng.choice([None, 0, 1, 3])
    told = told and min(told, world_size)  # ours refuses more reports than there are workers
    connector = SimpleNamespace(get_finished_count=lambda: told)
    ours, theirs = (
        kind.from_connector(connector, world_size)
        for kind in (KVOutputAggregator, utils.KVOutputAggregator)
    )
    workers = [Worker(rng) for _ in range(world_size)]
    while not all(worker.is_done for worker in workers):
        # vLLM's class leaves the fields of events that not all workers report at once to the connector
        events = rng.sample("abcd", rng.randint(0, 2))
        expected = rng.choice([0, 0, 0, 1, 2])
        step = [worker.step(events, expected) for worker in workers]
        rank = rng.randrange(world_size)
        found = theirs.aggregate([as_vllm(output) for output in step], rank).kv_connector_output
        # a missing output of ours is one of vLLM's worker without the connector's
        mine = ours.aggregate([output or WorkerOutput() for output in step], rank)
        assert mine.finished_sending == (found.finished_sending or set())
        assert mine.finished_recving == (found.finished_recving or set())
        assert set(mine.failed_recving) == found.failed_recving
        assert mine.invalid_block_ids == found.invalid_block_ids
        assert mine.expected_finished_count in (0, found.expected_finished_count)
        assert (
            mine.producer_started
            == (found.kv_connector_worker_meta or WorkerReport()).producer_started
        )
        stats = found.kv_connector_stats or ConnectorStats()
        assert ConnectorStats.of(mine.stats).data == stats.data
        if all(step):
            theirs_of_all = found.kv_cache_events.aggregate().get_all_events()
            assert set(mine.kv_cache_events) == {event.medium for event in theirs_of_all}
