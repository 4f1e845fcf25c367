"""Consumers that read the producer's pools themselves, over real processes, UCX and ZMQ: right bytes or a clear end."""

from __future__ import annotations

import threading

import pytest

from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.datapath import DataPath
from tests.integration import runtime_pair as rp
from tests.integration.direct_reads import (
    SHAPES,
    Engines,
    check_read,
    check_read_of_another_process,
    check_sent,
    published,
    remote_dense,
)

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

DIRECT = {"rma"}
NEVER = {"paths": {"direct": "never"}}


@pytest.fixture
def engines(opened):
    return Engines(opened, {"paths": {"direct": "always"}})


class Pause:
    """Holds a consumer's driver right after it found a lease published, once, until `go_on`.

    The engine's thread, which says `go_on`, makes no progress inline meanwhile.
    """

    def __init__(self, monkeypatch):
        self._found, self._may_go_on = threading.Event(), threading.Event()
        original = RemotePools.is_published

        def is_published(pools, *arguments):
            answer = original(pools, *arguments)
            if answer and not self._found.is_set():
                self._found.set()
                assert self._may_go_on.wait(rp.DEADLINE_S)
            return answer

        monkeypatch.setattr(RemotePools, "is_published", is_published)
        monkeypatch.setattr(DataPath, "try_acquire", lambda path, limit_s: False)

    def until_found(self):
        assert self._found.wait(rp.DEADLINE_S)

    def go_on(self):
        self._may_go_on.set()


def held_in_the_middle(d, params, monkeypatch):
    """Load "w" into blocks 5 and 6, held right after its lease was found."""
    pause = Pause(monkeypatch)
    d.load("w", params, [5, 6], 31)
    pause.until_found()
    return pause


@pytest.mark.parametrize("case", SHAPES)
def test_what_is_read_directly_is_what_the_producer_holds(engines, case):
    check_read(engines, case, DIRECT)


def test_a_producer_in_another_process_is_read_directly(engines):
    check_read_of_another_process(engines, DIRECT)


@pytest.mark.parametrize("settings", [(NEVER, None), (None, NEVER)], ids=["producer", "consumer"])
def test_either_side_may_say_never(engines, settings):
    check_sent(*engines.pair(*settings))


def test_a_lease_that_ends_during_a_read_fails_it_whatever_was_read(engines, monkeypatch):
    p, d = engines.pair()
    pause = held_in_the_middle(d, published(p, d), monkeypatch)
    p.scheduler.abort("r")
    rp.until(lambda: "r" in p.sent, p)
    p.caches[0].scribble(0, [1, 2])
    pause.go_on()
    rp.until(lambda: "w" in d.received, d, p)
    assert d.failed["w"].startswith("LeaseExpiredError")
    d.load("v", p.offer("next", [1, 2], 30), [5, 6], 31)
    rp.until(lambda: "v" in d.received, d, p)
    assert "v" not in d.failed
    assert rp.same(p.dense([1, 2], 30), d.dense([5, 6], 30))


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[1, 3]]},
        {"remote_block_ids": [[1]]},
        {"remote_block_ids": [[1, 9999]]},
    ],
    ids=["another block", "too few", "outside the pool"],
)
def test_a_router_that_mixes_up_block_ids_gets_the_producers_error(engines, change):
    p, d = engines.pair()
    d.load("w", {**published(p, d), **change}, [5, 6], 31)
    rp.until(lambda: "w" in d.received, d, p)
    assert "ReadRefusedError: the read's block ids are not" in d.failed["w"]


def test_more_tokens_than_the_lease_covers_are_refused(engines):
    p, d = engines.pair()
    params = {**published(p, d, num_tokens=20), "remote_num_tokens": 30}
    d.load("w", params, [5, 6], 31)
    rp.until(lambda: "w" in d.received, d, p)
    assert "ReadRefusedError: a chunk is outside the lease" in d.failed["w"]


def test_a_read_that_comes_before_its_lease_waits_for_it(engines):
    p, d = engines.pair()
    params = p.scheduler.offer("r", blocks=[[1, 2]], num_tokens=30)
    d.load("warm", p.offer("warm", [3], 9), [3], 10)
    rp.until(lambda: "warm" in d.received, d)
    d.load("w", params, [5, 6], 31)
    rp.until(lambda: "w" in d.received, d, p)
    assert d.failed == {}
    assert rp.same(p.dense([1, 2], 30), d.dense([5, 6], 30))


def test_a_consumer_that_aborts_in_the_middle_gets_its_blocks_back_for_good(engines, monkeypatch):
    p, d = engines.pair()
    pause = held_in_the_middle(d, published(p, d), monkeypatch)
    d.scheduler.abort("w")
    d.step()
    pause.go_on()
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    d.caches[0].scribble(0, [5, 6])
    expected = d.dense([5, 6], 30)
    d.load("v", p.offer("next", [1, 2], 30), [7, 8], 31)
    rp.until(lambda: "v" in d.received, d, p)
    assert rp.same(expected, d.dense([5, 6], 30))
    assert rp.same(p.dense([1, 2], 30), d.dense([7, 8], 30))


def test_a_producer_killed_in_the_middle_fails_its_load_and_serves_again_after_a_restart(
    engines, monkeypatch
):
    p = engines.remote("p", "producer", seed=3)
    d = engines.here("d", "consumer")
    pause = held_in_the_middle(d, published(p, d), monkeypatch)
    p.kill()
    pause.go_on()
    rp.until(lambda: "w" in d.received, d)
    assert "PeerLostError" in d.failed["w"]

    again = engines.remote("p", "producer", seed=4)
    d.load("v", published(again, d), [5, 6], 31)
    rp.until(lambda: "v" in d.received, d)
    assert "v" not in d.failed
    assert d.paths["v"] == DIRECT
    assert rp.same(remote_dense(4, [1, 2], 30), d.dense([5, 6], 30))


def test_the_producer_closes_while_it_is_read(engines, monkeypatch):
    p, d = engines.pair()
    pause = held_in_the_middle(d, published(p, d), monkeypatch)
    p.close()
    p.caches[0].scribble(0, [1, 2])
    pause.go_on()
    rp.until(lambda: "w" in d.received, d)
    assert "w" in d.failed
