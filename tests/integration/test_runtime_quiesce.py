"""A worker whose engine sleeps, over real UCX and ZMQ: nothing reads or writes the caches."""

import mmap

import pytest

from kvconnector.datapath.direct import shared_memory
from kvconnector.errors import MemoryInUseError
from tests.integration.runtime_pair import arrives, until
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

STREAMED = {"do_remote_decode": True, "transfer_id": "t", "transfer_secret": "5" * 32}


@pytest.fixture
def pair(start):
    p, d = start("p", "producer"), start("d", "consumer", seed=1)
    assert arrives(p, d, "warm", [0, 4], [0, 4])
    return p, d


def test_a_producer_that_sleeps_gives_up_its_leases_and_serves_again(pair):
    p, d = pair
    (worker,) = p.workers
    params = p.offer("held", [1, 2], 30)
    # a prompt that the engine computes, and a consumer may follow
    p.scheduler.on_new_request("streamed", STREAMED)
    p.scheduler.grow("streamed", blocks=[[3]], num_tokens=9)
    p.step()
    worker.quiesce(DEADLINE_S)
    p.step()
    assert "held" in p.sent
    assert "streamed" not in p.sent
    d.load("late", params, [5, 6], 31)
    until(lambda: "late" in d.received, d, p)
    assert "TransferAbortedError" in d.failed["late"]
    # orders that arrive while it sleeps end at once
    p.offer("asleep", [1], 9)
    until(lambda: "asleep" in p.sent, p)
    assert "the engine is asleep" in p.unsent["asleep"]
    worker.resume()
    assert arrives(p, d, "again", [1, 2], [5, 6])


def test_a_prompt_that_is_queued_while_its_producer_sleeps_is_computed_afterwards(pair):
    p, d = pair
    (worker,) = p.workers
    p.scheduler.on_new_request("queued", STREAMED)
    p.step()
    worker.quiesce(DEADLINE_S)
    p.step()
    worker.resume()
    params = p.offer("queued", [1, 2], 30)
    d.load("w", params, [5, 6], 31)
    until(lambda: "w" in d.received, d, p)
    assert not d.failed


def test_caches_that_come_back_with_other_memory_are_read_as_they_are_now(pair):
    """The consumer has mapped the memory that they had, which nobody writes any more."""
    p, d = pair
    (worker,) = p.workers
    assert d.paths["warm"] == {"direct"}
    worker.quiesce(DEADLINE_S)
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | shared_memory._MAP_FIXED
    for place in worker._thread._datapath.board.memory._places:
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        there = shared_memory._functions().mmap(
            place.address, place.nbytes, writable, anonymous, -1, 0
        )
        assert there == place.address
    p.caches[0].scribble(0, range(64))
    worker.resume()
    assert arrives(p, d, "again", [1, 2], [5, 6])
    assert d.paths["again"] == {"packed"}


def test_layers_that_are_written_after_it_fell_asleep_are_not_reported(pair, monkeypatch):
    p, _ = pair
    (worker,) = p.workers
    asked = []

    class Layers:
        def __init__(self, *_):
            pass

        def written(self, layer):
            asked.append(layer)
            return []

    monkeypatch.setattr("kvconnector.runtime.worker.StepLayers", Layers)
    p.offer("held", [1, 2], 30)
    worker.layer_written(0)
    worker.quiesce(DEADLINE_S)
    worker.layer_written(1)
    assert asked == [0]


def test_a_consumer_that_sleeps_gives_up_its_loads(pair):
    p, d = pair
    (worker,) = d.workers
    # no step of the producer grants the lease yet, so the load waits
    params = p.scheduler.offer("r", blocks=[[1, 2]], num_tokens=30)
    d.load("w", params, [5, 6], 31)
    worker.quiesce(DEADLINE_S)
    assert not worker.is_waiting
    d.step()
    assert d.received == {"warm", "w"}
    assert set(d.failed) == {"w"}
    worker.resume()
    assert arrives(p, d, "again", [1, 2], [7, 8])


def test_a_transfer_that_does_not_end_in_time_is_named(pair, monkeypatch):
    p, _ = pair
    (worker,) = p.workers
    p.offer("held", [1, 2], 30)
    monkeypatch.setattr(worker._thread, "put", lambda *_, **__: None)
    with pytest.raises(MemoryInUseError, match="held"):
        worker.quiesce(0.05)
