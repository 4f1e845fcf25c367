"""Engines that die, restart and close, over real UCX and ZMQ."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvconnector.errors import MemoryInUseError, TransportError
from kvconnector.runtime import driver_thread
from tests.integration import runtime_pair as rp
from tests.support.fakes import FakeEngine

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

WAYS = pytest.mark.parametrize(
    "control",
    [{"insecure": True, "over_ucx": over_ucx} for over_ucx in (True, False)],
    ids=["over UCX", "over ZMQ"],
)
DESCRIPTORS_A_CONNECTION = 5
BIG_DIM, BIG_BLOCKS = 256, 512  # 16 KiB a token, 128 MiB a request of 8192 tokens
# endings in mid stream; test_direct_reads has those of direct reads
PACKED = {"paths": {"direct": "never"}}


def _consumer(opened, head_dim=16, num_blocks=64, **settings):
    shape = FakeEngine("d", rp.model(head_dim), block_sizes=(16,), num_blocks=(num_blocks,))
    opened.append(rp.Engine(shape, "consumer", **settings))
    return opened[-1]


def _producer(opened, engine_id="p", **settings):
    shape = FakeEngine(engine_id, rp.model(), block_sizes=(16,), num_blocks=(64,))
    opened.append(rp.Engine(shape, "producer", seed=1, **settings))
    return opened[-1]


def _remote(opened, *arguments, **settings):
    opened.append(rp.RemoteEngine(*arguments, **settings))
    return opened[-1]


@WAYS
def test_a_killed_producer_fails_its_load_in_time_and_serves_again_after_a_restart(opened, control):
    d = _consumer(opened, BIG_DIM, BIG_BLOCKS, control=control, **PACKED)
    options = {"head_dim": BIG_DIM, "num_blocks": BIG_BLOCKS, "control": control, **PACKED}
    p = _remote(opened, "p", "producer", **options)
    blocks, num_tokens = list(range(BIG_BLOCKS)), 16 * BIG_BLOCKS
    d.load("warm", p.offer("warm", [0], 9), [0], 9)
    rp.until(lambda: "warm" in d.received, d)

    params = p.offer("r", blocks, num_tokens)
    started = time.monotonic()
    d.load("w", params, blocks, num_tokens + 1)
    time.sleep(0.02)
    p.kill()
    rp.until(lambda: "w" in d.received, d)
    assert "PeerLostError" in d.failed["w"]
    assert time.monotonic() - started < rp.DEADLINE_S

    again = _remote(opened, "p", "producer", seed=3, **options)
    d.load("v", again.offer("r", [5, 6], 30), [7, 8], 31)
    rp.until(lambda: "v" in d.received, d)
    assert "v" not in d.failed


@WAYS
def test_a_killed_consumer_costs_the_producer_its_lease_and_nobody_else_anything(opened, control):
    p = _producer(opened, control=control)
    victim = _remote(opened, "victim", "consumer", control=control)
    victim.load("w", p.offer("r", [1, 2], 30), [1, 2], 30)
    d = _consumer(opened, control=control)
    victim.kill()
    rp.until(lambda: "r" in p.sent, p)
    d.load("v", p.offer("held", [3, 4], 30), [5, 6], 31)
    rp.until(lambda: "v" in d.received and "held" in p.sent, d, p)
    assert not d.failed
    assert rp.same(p.dense([3, 4], 30), d.dense([5, 6], 30))


@WAYS
def test_idle_engines_disconnect_without_a_word_and_meet_again(opened, control, caplog):
    peer = {"peer": {**rp.QUICK["peer"], "idle_timeout_s": 2.5}}
    p, d = _producer(opened, control=control), _consumer(opened, control=control, **peer)
    d.load("first", p.offer("first", [1, 2], 30), [5, 6], 31)
    rp.until(lambda: "first" in d.received and "first" in p.sent, d, p)
    num_connected = _num_descriptors()
    rp.until(lambda: _num_descriptors() <= num_connected - DESCRIPTORS_A_CONNECTION, d, p)
    d.load("second", p.offer("second", [3, 4], 30), [7, 8], 31)
    rp.until(lambda: "second" in d.received and "second" in p.sent, d, p)
    assert not d.failed
    assert rp.same(p.dense([3, 4], 30), d.dense([7, 8], 30))
    assert not caplog.records


def _num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_close_says_that_memory_is_in_use_until_copies_have_ended(opened, monkeypatch):
    p = _producer(opened)
    p.offer("r", [1, 2], 30)
    (worker,), ended = p.workers, threading.Event()
    close = worker._thread._datapath.close

    def close_once_copies_have_ended():
        assert ended.wait(rp.DEADLINE_S)
        close()

    monkeypatch.setattr(worker._thread._datapath, "close", close_once_copies_have_ended)
    with monkeypatch.context() as patch:
        patch.setattr(driver_thread, "CLOSE_TIMEOUT_S", 0.1)
        for _ in range(2):
            with pytest.raises(MemoryInUseError, match="keep their memory"):
                worker.close()
    ended.set()
    worker.close()
    worker.close()


def test_close_says_that_memory_is_in_use_where_copies_do_not_end(opened, monkeypatch):
    p = _producer(opened)
    p.offer("r", [1, 2], 30)
    (worker,) = p.workers
    close = worker._thread._datapath.close

    def fail():
        close()
        raise TransportError("copies on the GPU do not end")

    monkeypatch.setattr(worker._thread._datapath, "close", fail)
    p.workers.clear()
    for _ in range(2):
        with pytest.raises(MemoryInUseError, match="copies on the GPU do not end"):
            worker.close()


def test_an_engine_of_both_roles_loads_from_itself(opened):
    shape = FakeEngine("self", rp.model(), tp_size=2, block_sizes=(16,), num_blocks=(64,))
    both = rp.Engine(shape, "both")
    opened.append(both)
    expected = both.dense([1, 2], 30)
    both.load("w", both.offer("r", [1, 2], 30), [5, 6], 31)
    rp.until(lambda: "w" in both.received and "r" in both.sent, both)
    assert not both.failed
    assert rp.same(expected, both.dense([5, 6], 30))


@pytest.mark.parametrize("pump", [True, False], ids=["pumped", "plain"])
def test_a_long_control_message_beside_the_chunks_of_another_read(opened, pump):
    # a block a token: 64 KiB of block ids, which UCX does not send in one piece
    num_tokens = 1 << 14
    for engine_id, role in (("p", "producer"), ("d", "consumer")):
        shape = FakeEngine(
            engine_id, rp.model(8), block_sizes=(1,), num_blocks=(2 * num_tokens + 1,)
        )
        opened.append(rp.Engine(shape, role, seed=len(opened), staging={"pump": pump}, **PACKED))
    p, d = opened
    for name, first in (("first", 0), ("second", num_tokens)):
        blocks = list(range(first, first + num_tokens))
        d.load(name, p.offer(name, blocks, num_tokens), blocks, num_tokens + 1)
    rp.until(lambda: {"first", "second"} <= d.received, d, p)
    assert not d.failed
    blocks = list(range(2 * num_tokens))
    assert rp.same(p.dense(blocks, 2 * num_tokens), d.dense(blocks, 2 * num_tokens))
