"""Data paths that close while a GPU is at work, over a fake driver and stream that report its progress."""

import gc
import weakref
from contextlib import nullcontext
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from kvconnector.datapath import device_memory
from kvconnector.datapath.direct import cuda_driver
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import StreamWriter
from kvconnector.datapath.pump import datapath
from kvconnector.datapath.pump.copies_cuda import CudaCopies
from kvconnector.errors import TransportError
from kvconnector.layout import Watermark
from tests.support.fakes import FakeClock
from tests.unit.datapath.pump_pair import Pair

OK, NOT_READY, ILLEGAL_ADDRESS = 0, 600, 700
STREAM, CONTEXT = 11, 12


class FakeCuda:
    """The part of libcuda that `StreamWriter` calls. `queries` are the answers of its stream."""

    def __init__(self, queries, unregistering=OK):
        self.queries, self.unregistering = queries, unregistering
        self.num_unregistered = 0

    def cuStreamQuery(self, stream):
        return next(self.queries)

    def cuMemHostUnregister(self, address):
        self.num_unregistered += 1
        return self.unregistering

    def __getattr__(self, name):
        return lambda *arguments: OK


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(device_memory, "RELEASE_S", 0.02)


def board_over(cuda, monkeypatch):
    monkeypatch.setattr(cuda_driver, "load_libcuda", lambda *names: cuda)
    board = LeaseBoard(lambda *place: StreamWriter(STREAM, CONTEXT, *place))
    assert board.publish(b"sixteen bytes it", Watermark(40))
    return board


def is_kept(memory):
    gc.collect()
    return memory() is not None


def test_a_board_is_freed_once_the_gpu_no_longer_writes_it(monkeypatch):
    cuda = FakeCuda(iter([NOT_READY, NOT_READY, OK]))
    board = board_over(cuda, monkeypatch)
    board.close()
    assert cuda.num_unregistered == 1
    memory = weakref.ref(board.memory)
    del board
    assert not is_kept(memory)


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(
    "queries,unregistering,reason",
    [
        (repeat(NOT_READY), OK, "do not end"),
        (chain([NOT_READY], repeat(ILLEGAL_ADDRESS)), OK, "stream failed"),
        (repeat(OK), ILLEGAL_ADDRESS, "cannot be unregistered"),
    ],
    ids=["never", "failed", "not given back"],
)
def test_a_board_that_the_gpu_may_still_write_is_never_freed(
    monkeypatch, caplog, queries, unregistering, reason
):
    cuda = FakeCuda(queries, unregistering)
    board = board_over(cuda, monkeypatch)
    with pytest.raises(TransportError, match=reason):
        board.close()
    assert cuda.num_unregistered == (unregistering != OK)
    memory = weakref.ref(board.memory)
    del board
    assert is_kept(memory)
    assert "may yet touch the lease board's memory" in caplog.text


def _fails():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def copies_over(*queries):
    copies = CudaCopies.__new__(CudaCopies)  # otherwise made only on a GPU
    copies.streams = SimpleNamespace(copies=[SimpleNamespace(query=each) for each in queries])
    copies.pools = SimpleNamespace(device="cuda:0")
    return copies


def test_all_streams_of_copies_have_one_time_to_end(monkeypatch):
    """A closing worker waits no longer for four streams than for one."""
    clock = FakeClock(0.0)
    monkeypatch.setattr(
        device_memory, "time", SimpleNamespace(monotonic=clock, sleep=clock.advance)
    )
    seconds = device_memory.RELEASE_S * 0.4
    copies = copies_over(*(lambda n=n: clock.now_s > n * seconds for n in (1, 2, 3, 4)))
    with pytest.raises(TransportError, match="do not end"):
        copies.finish()
    assert clock.now_s < device_memory.RELEASE_S + 2 * device_memory.POLL_S


@pytest.mark.ucx
def test_all_waits_of_a_closing_data_path_have_one_time(monkeypatch):
    """A GPU that hangs ends neither copies nor the board's writes, and pools of others are not unmapped beside it."""
    clock, pair, unmapped = FakeClock(0.0), Pair.connect(), []
    fake_time = SimpleNamespace(monotonic=clock, sleep=clock.advance)
    try:
        path = pair.d.path
        for module in (device_memory, datapath):
            monkeypatch.setattr(module, "time", fake_time)
        path.copies = path._loop.copies = copies_over(lambda: False)
        path.board = board_over(FakeCuda(repeat(NOT_READY)), monkeypatch)
        path.reads._pools[object()] = SimpleNamespace(close=lambda: unmapped.append(1))
        with pytest.raises(TransportError, match="do not end"):
            path.close()
        assert clock.now_s < device_memory.CLOSE_S + 2 * device_memory.POLL_S
        assert not unmapped
    finally:
        pair.close()


@pytest.mark.usefixtures("no_patience")
@pytest.mark.ucx
@pytest.mark.parametrize("is_idle", [False, True])
def test_pump_that_closes_beside_copies_that_do_not_end_keeps_its_memory(is_idle):
    pair = Pair.connect()
    try:
        path = pair.d.path
        path.copies = copies_over(lambda: is_idle)
        with nullcontext() if is_idle else pytest.raises(TransportError, match="do not end"):
            path.close()
        kept = any(owner is path for owner in device_memory._kept)
        assert kept is not is_idle
    finally:
        pair.close()


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(
    "query,reason",
    [(lambda: False, "do not end"), (_fails, "the GPU failed")],
    ids=["never", "failed"],
)
def test_copies_that_do_not_end_or_fail_say_so(query, reason):
    with pytest.raises(TransportError, match=reason):
        copies_over(query).finish()
