"""The lease board on a GPU: `ready` is written after the stream's kernels."""

from contextlib import closing

import pytest
import torch

from kvconnector.datapath import device_memory
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.errors import TransportError
from kvconnector.layout import Watermark
from tests.support.gpu_flags import held_back
from tests.unit.datapath.exporter import writer_on
from tests.unit.datapath.test_lease_board import is_found

pytestmark = pytest.mark.gpu

KEY = bytes(range(16))


@pytest.fixture
def stream():
    torch.zeros(1, device="cuda:0")
    return torch.cuda.Stream()


@pytest.fixture
def board(stream):
    # before a kernel runs: registering memory with a GPU may wait for it
    return LeaseBoard(writer_on("cuda:0", stream))


def test_a_lease_is_ready_after_the_kernels_before_it(stream, board):
    with closing(board), held_back(stream) as release:
        board.publish(KEY, Watermark(5))
        assert not is_found(board, KEY, 5)
        release()
        stream.synchronize()
        assert is_found(board, KEY, 5)


def test_a_lease_retracted_before_its_kernels_end_is_never_ready(stream, board):
    with closing(board), held_back(stream) as release:
        board.publish(KEY, Watermark(5))
        board.retract(KEY)
        release()
        stream.synchronize()
        assert not is_found(board, KEY, 5)


def test_kernels_may_write_to_a_closed_board(stream, board, monkeypatch):
    monkeypatch.setattr(device_memory, "RELEASE_S", 1e-3)
    with held_back(stream):
        board.publish(KEY, Watermark(5))
        with pytest.raises(TransportError, match="do not end"):
            board.close()
    assert stream.query()
