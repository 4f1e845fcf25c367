"""The lease board on a GPU: `ready` comes behind the stream's kernels."""

from contextlib import closing

import pytest
import torch

from kvconnector.datapath import device_memory
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.errors import TransportError
from tests.unit.datapath.exporter import writer_on
from tests.unit.datapath.test_lease_board import is_found

pytestmark = pytest.mark.gpu

KEY = bytes(range(16))
SLEEP_CYCLES = 500_000_000


@pytest.fixture
def stream():
    torch.zeros(1, device="cuda:0")
    return torch.cuda.Stream()


def busy_board(stream):
    """With a lease that was published behind a kernel."""
    board = LeaseBoard(writer_on("cuda:0", stream))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    board.publish(KEY, 5)
    return board


def test_a_lease_is_ready_once_the_kernels_before_it_are_through(stream):
    with closing(busy_board(stream)) as board:
        was_early = is_found(board, KEY, 5)
        stream.synchronize()
        assert not was_early
        assert is_found(board, KEY, 5)
    assert not is_found(board, KEY, 5)


def test_a_lease_that_ends_before_its_kernels_do_never_becomes_ready(stream):
    with closing(busy_board(stream)) as board:
        board.retract(KEY)
        stream.synchronize()
        assert not is_found(board, KEY, 5)


def test_a_board_that_closes_before_its_kernels_end_can_still_be_written(stream, monkeypatch):
    monkeypatch.setattr(device_memory, "RELEASE_S", 1e-3)
    board = busy_board(stream)
    with pytest.raises(TransportError, match="do not end"):
        board.close()
    del board
    stream.synchronize()
    assert stream.query()
