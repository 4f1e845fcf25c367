"""Engines that die, restart and close, over real UCX and ZMQ."""

import signal
import threading
from pathlib import Path

import pytest

from kvconnector.errors import MemoryInUseError
from kvconnector.runtime import driver_thread
from tests.integration.runtime_pair import PEER, arrives, same, until
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

DESCRIPTORS_A_CONNECTION = 5
BIG_DIM, BIG_BLOCKS = 256, 512  # 16 KiB per token, 128 MiB for a request of 8192 tokens
# endings during a packed stream; test_direct_reads has those of direct reads
PACKED = {"paths": {"direct": "never"}}
WAYS = pytest.mark.parametrize(
    "control",
    [{"insecure": True, "over_ucx": over_ucx} for over_ucx in (True, False)],
    ids=["over UCX", "over ZMQ"],
)


@WAYS
def test_a_killed_producer_fails_its_load_in_time_and_serves_again_after_a_restart(start, control):
    shape = {"head_dim": BIG_DIM, "num_blocks": BIG_BLOCKS}
    # one small chunk after the other: the producer is killed long before the last
    staging = {"chunk_bytes": 16 << 10, "window": 1}
    options = {"shape": shape, "control": control, "staging": staging, **PACKED}
    d = start("d", "consumer", peer={**PEER, "timeout_s": 5}, **options)
    p = start("p", "producer", elsewhere=True, **options)
    blocks, num_tokens = list(range(BIG_BLOCKS)), 16 * BIG_BLOCKS
    d.load("warm", p.offer("warm", [0], 9), [0], 9)
    until(lambda: "warm" in d.received, d)

    params = p.offer("r", blocks, num_tokens)
    d.load("w", params, blocks, num_tokens + 1)
    until(lambda: any(load.nbytes for load in d.workers[0]._thread.in_flight()), d)
    p.kill()
    until(lambda: "w" in d.received, d)
    assert "PeerLostError" in d.failed["w"]

    again = start("p", "producer", elsewhere=True, seed=3, **options)
    d.load("v", again.offer("r", [5, 6], 30), [7, 8], 31)
    until(lambda: "v" in d.received, d)
    assert "v" not in d.failed


QUICK = {
    "peer": {**PEER, "timeout_s": 3},
    "lease": {"early_read_s": 1, "duration_s": 4},
    "control": {"insecure": True, "over_ucx": False},
}
"""A peer's silence is noticed within seconds. Its kernel answers for a stopped process, so no connection ends."""


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_a_stopped_engine_is_given_up_and_serves_again_once_it_goes_on(start, who):
    options = {
        "shape": {"head_dim": BIG_DIM, "num_blocks": BIG_BLOCKS},
        "staging": {"chunk_bytes": 16 << 10, "window": 1},
        **PACKED,
        **QUICK,
    }
    p = start("p", "producer", seed=1, elsewhere=who == "producer", **options)
    d = start("d", "consumer", elsewhere=who == "consumer", **options)
    blocks, num_tokens = list(range(BIG_BLOCKS)), 16 * BIG_BLOCKS
    d.load("warm", p.offer("warm", [0], 9), [0], 10)
    if who == "producer":
        until(lambda: "warm" in d.received, d)
        d.load("w", p.offer("r", blocks, num_tokens), blocks, num_tokens + 1)
        until(lambda: any(load.nbytes for load in d.workers[0]._thread.in_flight()), d)
        p.child.send_signal(signal.SIGSTOP)
        until(lambda: "w" in d.received, d)
        assert "went silent" in d.failed["w"]
        p.child.send_signal(signal.SIGCONT)
        d.load("v", p.offer("again", [5, 6], 30), [7, 8], 31)
        until(lambda: "v" in d.received, d)
    else:
        until(lambda: "warm" in p.sent, p)
        d.load("w", p.offer("r", blocks, num_tokens), blocks, num_tokens + 1)
        d.child.send_signal(signal.SIGSTOP)
        until(lambda: "r" in p.sent, p)
        assert "r" in p.unsent
        d.child.send_signal(signal.SIGCONT)
        d.load("v", p.offer("again", [5, 6], 30), [7, 8], 31)
        until(lambda: "again" in p.sent, p)
        d.step()
        assert "again" not in p.unsent
    assert "v" not in (d.failed if who == "producer" else d.call("failed"))


@WAYS
def test_idle_engines_disconnect_quietly_and_greet_again(start, control, caplog):
    peer = {**PEER, "timeout_s": 4, "idle_timeout_s": 4.5}
    p = start("p", "producer", seed=1, control=control)
    d = start("d", "consumer", control=control, peer=peer)
    assert arrives(p, d, "first", [1, 2], [5, 6])
    num_connected = _num_descriptors()
    until(lambda: _num_descriptors() <= num_connected - DESCRIPTORS_A_CONNECTION, d, p)
    assert arrives(p, d, "second", [3, 4], [7, 8])
    assert not caplog.records


def _num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_close_says_that_memory_is_in_use_until_copies_have_ended(start, monkeypatch):
    p = start("p", "producer")
    p.offer("r", [1, 2], 30)
    (worker,), ended = p.workers, threading.Event()
    close = worker._thread._datapath.close

    def close_once_copies_have_ended():
        assert ended.wait(DEADLINE_S)
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


def test_an_engine_of_both_roles_loads_from_itself(start):
    both = start("self", "both", shape={"tp_size": 2})
    expected = both.dense([1, 2], 30)
    both.load("w", both.offer("r", [1, 2], 30), [5, 6], 31)
    until(lambda: "w" in both.received and "r" in both.sent, both)
    assert not both.failed
    assert same(expected, both.dense([5, 6], 30))


def test_a_long_control_message_beside_the_chunks_of_another_read(start):
    # a block per token: 64 KiB of block ids, which UCX does not send in one piece
    num_tokens = 1 << 14
    shape = {"head_dim": 8, "block": 1, "num_blocks": 2 * num_tokens + 1}
    options = {"shape": shape, **PACKED}
    p, d = start("p", "producer", seed=1, **options), start("d", "consumer", **options)
    for name, first in (("first", 0), ("second", num_tokens)):
        blocks = list(range(first, first + num_tokens))
        d.load(name, p.offer(name, blocks, num_tokens), blocks, num_tokens + 1)
    until(lambda: {"first", "second"} <= d.received, d, p)
    assert not d.failed
    blocks = list(range(2 * num_tokens))
    assert same(p.dense(blocks, 2 * num_tokens), d.dense(blocks, 2 * num_tokens))
