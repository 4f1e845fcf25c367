"""The lease board and the export on a GPU: `ready` behind the stream's kernels, allocations that hold the caches."""

import ctypes

import numpy as np
import pytest
import torch

from kvconnector.cache.views import KVView
from kvconnector.datapath import CacheGroup, Pools, device_memory
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import StreamWriter
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.errors import TransportError
from kvconnector.session.export_check import check_export
from tests.support.fakes import FakeEngine, attention_model
from tests.unit.datapath.test_lease_board import is_found

pytestmark = pytest.mark.gpu

KEY = bytes(range(16))
NUM_BLOCKS, HEADS, BLOCK, DIM = 8, 2, 4, 16
FILL_BYTES = 900 << 10
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


def test_an_export_names_the_allocations_that_its_caches_are_in():
    engine = FakeEngine("e", attention_model(3, HEADS, DIM), block_sizes=(BLOCK,))
    (rank,) = engine.geometry().ranks
    (group,) = rank.groups
    shape = (NUM_BLOCKS, HEADS, BLOCK, DIM)
    # small tensors share an allocation of PyTorch's allocator, and what lies between pushes some into others
    tensors = []
    for _ in group.layers:
        tensors.append([torch.zeros(shape, dtype=torch.float16, device="cuda:0") for _ in "kv"])
        tensors.append(torch.zeros(FILL_BYTES, dtype=torch.uint8, device="cuda:0"))
    views = {
        layer: [
            KVView(t.data_ptr(), t.shape, tuple(2 * s for s in t.stride()), 2)
            for t in tensors[2 * layer]
        ]
        for layer in group.layers
    }
    pools = Pools([CacheGroup(group, views)], "cuda:0")
    message = PoolExporter(pools, LeaseBoard()).message
    check_export(message, rank)
    assert message.device == "cuda"
    assert message.gpu_uuid
    spans = [(a.address, a.address + a.nbytes) for a in message.allocations]
    assert spans == sorted(set(spans))
    assert all(np.diff([edge for span in spans for edge in span]) >= 0)
