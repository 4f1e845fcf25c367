"""The lease board on a GPU: `ready` comes behind the stream's kernels."""

import ctypes

import pytest
import torch

from kvconnector.datapath import device_memory
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import StreamWriter
from kvconnector.errors import TransportError
from tests.unit.datapath.test_lease_board import is_found

pytestmark = pytest.mark.gpu

KEY = bytes(range(16))
SLEEP_CYCLES = 200_000_000


def open_writer(stream):
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return lambda address, nbytes: StreamWriter(stream.cuda_stream, context.value, address, nbytes)


@pytest.fixture
def stream():
    torch.zeros(1, device="cuda:0")
    return torch.cuda.Stream()


def test_a_lease_is_ready_once_the_kernels_before_it_are_through(stream):
    board = LeaseBoard(open_writer(stream))
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        board.publish(KEY, 5)
        was_early = is_found(board, KEY, 5)
        stream.synchronize()
        assert not was_early
        assert is_found(board, KEY, 5)
    finally:
        board.close()
    assert not is_found(board, KEY, 5)


def test_a_lease_that_ends_before_its_kernels_do_never_becomes_ready(stream):
    board = LeaseBoard(open_writer(stream))
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        board.publish(KEY, 5)
        board.retract(KEY)
        stream.synchronize()
        assert not is_found(board, KEY, 5)
    finally:
        board.close()


def test_a_board_that_closes_before_its_kernels_end_can_still_be_written(stream, monkeypatch):
    monkeypatch.setattr(device_memory, "RELEASE_S", 1e-3)
    board = LeaseBoard(open_writer(stream))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    board.publish(KEY, 5)
    with pytest.raises(TransportError, match="do not end"):
        board.close()
    del board
    stream.synchronize()
    assert stream.query()
