"""Consumers that read the producer's pools themselves, over real processes, UCX and ZMQ: right bytes or a clear end."""

from __future__ import annotations

import threading
from functools import partial
from itertools import count

import numpy as np
import pytest

from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.datapath import PumpDataPath
from kvconnector.testing.fakes import EngineShape, FakeCaches, dense_of
from tests.integration import runtime_pair as rp

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

# nothing here waits for a lease or a silent peer: neither may end because the machine is busy
PATIENT = {
    "lease": {"duration_s": 60, "early_read_s": 5},
    "peer": {"hello_timeout_s": 30, "timeout_s": 30, "backoff_initial_s": 0.1},
}
ALWAYS, NEVER = ({"paths": {"direct": when}, **PATIENT} for when in ("always", "never"))
DIRECT, PACKED = {"rma"}, {"packed, pumped"}
NUMBERS = count()


def _engine(opened, engine_id, role, *, seed=0, settings=ALWAYS, block=16, **shape):
    shape = EngineShape(
        engine_id, rp.model(), block_sizes=(block,), num_blocks=(1024 // block,), **shape
    )
    opened.append(rp.Engine(shape, role, seed, **settings))
    return opened[-1]


def _pair(opened):
    return _engine(opened, "p", "producer", seed=1), _engine(opened, "d", "consumer")


def _published(p, d, block_ids=(1, 2), num_tokens=30):
    """An offer whose lease every producer rank has published, which it has once a later request is over."""
    name, is_here = f"later {next(NUMBERS)}", isinstance(p, rp.Engine)
    offer = p.offer if is_here else partial(p.ask, "offer")
    engines = (d, p) if is_here else (d,)
    params = offer("r", list(block_ids), num_tokens)
    d.load(name, offer(name, [0], 5), [0], 6)
    rp.until(lambda: name in (p.sent if is_here else p.ask("step")[0]), *engines)
    assert name not in d.failed
    return params


def _remote(opened, engine_id, role, seed):
    opened.append(rp.RemoteEngine(engine_id, role, seed=seed, **ALWAYS))
    return opened[-1]


def _remote_dense(seed, block_ids, num_tokens):
    """What a remote producer of this seed holds."""
    shape = rp.remote_shape("p", 16, 64)
    caches = FakeCaches(shape, shape.geometry().ranks[0], np.random.default_rng(seed))
    return dense_of([caches], [block_ids], num_tokens)


class Pause:
    """Holds a consumer's driver right after it found a lease published, once, until `go_on`.

    The engine's thread, which says `go_on`, does not sit in for it meanwhile.
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
        monkeypatch.setattr(PumpDataPath, "sit", lambda path, limit_s: False)

    def until_found(self):
        assert self._found.wait(rp.DEADLINE_S)

    def go_on(self):
        self._may_go_on.set()


SHAPES = {
    "alike": ({}, {}),
    "layouts and block sizes": ({"layout": "HND"}, {"layout": "NHD", "block": 64}),
    "transposed keys": ({"layout": "K-transposed", "block": 32}, {"layout": "interleaved"}),
    "narrower": ({"tp_size": 4}, {"tp_size": 2, "pp_size": 2}),
    "token stripes": ({"tp_size": 4, "dcp_size": 2}, {"layout": "NHD"}),
    "wider": ({"pp_size": 2}, {"tp_size": 4, "layout": "NHD", "block": 8}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_what_is_read_directly_is_what_the_producer_holds(opened, case):
    ours, theirs = SHAPES[case]
    p = _engine(opened, "p", "producer", seed=1, **ours)
    d = _engine(opened, "d", "consumer", seed=2, **theirs)
    source = list(range(200 // p.shape.block_sizes[0] + 1))[::-1]
    target = list(range(200 // d.shape.block_sizes[0] + 1))
    d.load("w", _published(p, d, source, 200), target, 201)
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    assert d.failed == {}
    assert d.paths["w"] == DIRECT
    assert rp.same(p.dense(source, 200), d.dense(target, 200))


def test_a_producer_in_another_process_is_read_directly(opened):
    p = _remote(opened, "p", "producer", seed=7)
    d = _engine(opened, "d", "consumer")
    d.load("w", _published(p, d, [9, 3, 4], 40), [7, 8, 1], 41)
    rp.until(lambda: "w" in d.received, d)
    assert d.failed == {}
    assert d.paths["w"] == DIRECT
    assert rp.same(_remote_dense(7, [9, 3, 4], 40), d.dense([7, 8, 1], 40))
    rp.until(lambda: "r" in p.ask("step")[0])


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_either_side_may_say_never(opened, who):
    p = _engine(opened, "p", "producer", seed=1, settings=NEVER if who == "producer" else ALWAYS)
    d = _engine(opened, "d", "consumer", settings=NEVER if who == "consumer" else ALWAYS)
    d.load("w", p.offer("r", [1, 2], 30), [5, 6], 31)
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    assert d.paths["w"] == PACKED
    assert rp.same(p.dense([1, 2], 30), d.dense([5, 6], 30))


def test_a_lease_that_ends_during_a_read_fails_it_whatever_was_read(opened, monkeypatch):
    p, d = _pair(opened)
    params = _published(p, d)
    pause = Pause(monkeypatch)
    d.load("w", params, [5, 6], 31)
    pause.until_found()
    p.producer.abort("r")
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
def test_a_router_that_mixes_up_block_ids_gets_the_producers_error(opened, change):
    p, d = _pair(opened)
    d.load("w", {**_published(p, d), **change}, [5, 6], 31)
    rp.until(lambda: "w" in d.received, d, p)
    assert "ReadRefusedError: the read's block ids are not" in d.failed["w"]


def test_more_tokens_than_the_lease_covers_are_refused(opened):
    p, d = _pair(opened)
    params = {**_published(p, d, num_tokens=20), "remote_num_tokens": 30}
    d.load("w", params, [5, 6], 31)
    rp.until(lambda: "w" in d.received, d, p)
    assert "ReadRefusedError: a chunk is outside the lease" in d.failed["w"]


def test_a_read_that_comes_before_its_lease_waits_for_it(opened):
    p, d = _pair(opened)
    held, params = p.producer.request_finished(
        "r", block_ids=[[1, 2]], num_tokens=30, kv_transfer_params=rp.ASK
    )
    assert held
    d.load("warm", p.offer("warm", [3], 9), [3], 10)
    rp.until(lambda: "warm" in d.received, d)
    d.load("w", params, [5, 6], 31)
    rp.until(lambda: "w" in d.received, d, p)
    assert d.failed == {}
    assert rp.same(p.dense([1, 2], 30), d.dense([5, 6], 30))


def test_a_consumer_that_aborts_in_the_middle_gets_its_blocks_back_for_good(opened, monkeypatch):
    p, d = _pair(opened)
    params = _published(p, d)
    pause = Pause(monkeypatch)
    d.load("w", params, [5, 6], 31)
    pause.until_found()
    d.consumer.abort("w")
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
    opened, monkeypatch
):
    p = _remote(opened, "p", "producer", seed=3)
    d = _engine(opened, "d", "consumer")
    params = _published(p, d)
    pause = Pause(monkeypatch)
    d.load("w", params, [5, 6], 31)
    pause.until_found()
    p.kill()
    pause.go_on()
    rp.until(lambda: "w" in d.received, d)
    assert "PeerLostError" in d.failed["w"]

    again = _remote(opened, "p", "producer", seed=4)
    d.load("v", _published(again, d), [5, 6], 31)
    rp.until(lambda: "v" in d.received, d)
    assert "v" not in d.failed
    assert d.paths["v"] == DIRECT
    assert rp.same(_remote_dense(4, [1, 2], 30), d.dense([5, 6], 30))


def test_the_producer_closes_while_it_is_read(opened, monkeypatch):
    p, d = _pair(opened)
    params = _published(p, d)
    pause = Pause(monkeypatch)
    d.load("w", params, [5, 6], 31)
    pause.until_found()
    p.close()
    p.caches[0].scribble(0, [1, 2])
    pause.go_on()
    rp.until(lambda: "w" in d.received, d)
    assert "w" in d.failed
