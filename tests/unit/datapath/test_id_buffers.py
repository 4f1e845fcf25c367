"""Block ids on their way to a GPU, here host memory as well, behind a driver that copies at once or refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.base import Program
from kvconnector.datapath.pump.copies import slots_of
from kvconnector.datapath.pump.copies_cuda import CudaCopies
from kvconnector.datapath.pump.id_buffers import MIN_IDS, IdBuffer, IdBuffers
from kvconnector.datapath.pump.marks import Marks
from kvconnector.errors import TransportError
from kvconnector_kernels.relayout import BlockIdsAt, BlockIdsError, RelayoutError
from kvconnector_kernels.relayout.launch import PreparedLaunch
from tests.unit.datapath.caches import Caches, Shape

GPU, CONTEXT, STREAMS = "cuda:0", 11, [12, 13]
SLOT_BYTES = 1 << 12
CUT = {"order": "HND", "chunk_tokens": 7, "chunk_rows": 3}


def allocate(num_ids: int, stream: int) -> IdBuffer:
    """A buffer whose part on the GPU is aligned as there."""
    here, there = np.zeros(num_ids, np.int32), np.zeros(num_ids + 4, np.int32)
    address = there.ctypes.data + -there.ctypes.data % 16
    return IdBuffer(here, here.ctypes.data, address, (here, there), stream)


def ids_at(place: BlockIdsAt) -> list[int]:
    return list((ctypes.c_int32 * place.count).from_address(place.address))


@given(data=st.data())
def test_reads_under_way_have_their_own_ids(data: st.DataObject) -> None:
    buffers = IdBuffers(allocate)
    lent: list[tuple[IdBuffer, list[npt.NDArray[np.int32]], list[BlockIdsAt]]] = []
    for seed in range(data.draw(st.integers(1, 12))):
        if lent and data.draw(st.booleans()):
            buffers.give_back(lent.pop(data.draw(st.integers(0, len(lent) - 1)))[0])
        counts = data.draw(st.lists(st.sampled_from([0, 1, 3, 4, 500, MIN_IDS + 1]), max_size=4))
        rng = np.random.default_rng(seed)
        vectors = [rng.integers(0, 1 << 30, count, np.int32) for count in counts]
        buffer = buffers.lend(vectors, seed % 2)
        places, nbytes = buffer.write(vectors, GPU)
        assert nbytes <= buffer.here.nbytes
        ctypes.memmove(buffer.there_address, buffer.here_address, nbytes)
        lent.append((buffer, vectors, places))
        for _, mine, at in lent:
            assert [ids_at(place) for place in at] == [vector.tolist() for vector in mine]


def test_memory_is_used_again() -> None:
    buffers = IdBuffers(allocate)
    few, many = [np.zeros(5, np.int32)], [np.zeros(2 * MIN_IDS, np.int32)]
    first = buffers.lend(few, 0)
    buffers.give_back(first)
    assert buffers.lend(many, 0) is not first
    # ids that were sent to it and never used may still be on their way on the first stream
    assert buffers.lend(few, 1) is not first
    assert buffers.lend(few, 0) is first
    assert buffers.lend(few, 0) is not first


class Driver:
    """What `CudaCopies` calls of libcuda to send ids."""

    def __init__(self) -> None:
        self.status = 0
        self.contexts: list[int] = []
        self.streams: list[int] = []

    def cuCtxSetCurrent(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def cuMemcpyHtoDAsync_v2(self, there: int, here: int, nbytes: int, stream: int) -> int:
        self.streams.append(stream)
        if not self.status:
            ctypes.memmove(there, here, nbytes)
        return self.status


def prepare(src: Any, dst: Any, **counts: int) -> PreparedLaunch:
    """A launch that names what the rows of a job are made of."""
    names = ("src_ids", "src_address", "src_part_start", "dst_address", "num_tiles")
    ids = getattr(src, "block_ids", None) or dst.block_ids
    return PreparedLaunch(77, 128, 256, 3, 16, (ids.address, 1, 2, 3, 4), names, (8,) * 5)


@pytest.fixture
def copies() -> CudaCopies:
    caches = Caches(Shape(), seed=1)
    made = CudaCopies.__new__(CudaCopies)  # which is otherwise made on a GPU only
    # the pools' tables are not copied from here, and are the host's
    made._pools = SimpleNamespace(  # type: ignore[assignment]
        tables={
            key: SimpleNamespace(
                **{name: getattr(table, name) for name in ("num_parts", "block_size")}, device=GPU
            )
            for key, table in caches.pools.tables.items()
        },
        num_blocks=caches.pools.num_blocks,
        device=GPU,
    )
    made._slots = slots_of(1 << 20, SLOT_BYTES, GPU)
    made.ids = IdBuffers(allocate)
    made._cuda = Driver()
    made._prepare_launch = prepare
    made._checked = {77}
    made.begin, made.max_programs = (0, CONTEXT), 7
    marks = Marks(np.zeros(len(STREAMS), np.int32))
    made.streams = SimpleNamespace(handles=STREAMS, marks=marks)  # type: ignore[assignment]
    return made


@pytest.fixture
def program() -> Program:
    return Caches(Shape(), seed=1).program([2, 0, 1, 4, 3], range(18), **CUT)


def buffer_of(copies: CudaCopies, program: Program) -> IdBuffer:
    """What the next read of as many blocks is lent."""
    jobs = copies.make_jobs(program, packing=True)
    copies.end_jobs(jobs)
    (buffer,) = jobs.kept
    assert isinstance(buffer, IdBuffer)
    return buffer


def test_jobs_read_the_ids_that_were_sent(copies: CudaCopies, program: Program) -> None:
    jobs = copies.make_jobs(program, packing=True)
    (buffer,) = jobs.kept
    assert isinstance(buffer, IdBuffer)
    assert copies._cuda.contexts == [CONTEXT]
    assert set(jobs.rows["params"][:, 0].tolist()) == {buffer.there_address}
    assert ids_at(BlockIdsAt(buffer.there_address, 5, GPU)) == [2, 0, 1, 4, 3]
    nbytes = program.chunks_nbytes
    np.testing.assert_array_equal(jobs.rows["nbytes"], nbytes)
    np.testing.assert_array_equal(jobs.rows["params"][:, 2], program.chunks["part_start"])
    tiles = 3 * program.chunks["num_parts"]
    np.testing.assert_array_equal(jobs.rows["params"][:, 4], tiles)
    np.testing.assert_array_equal(jobs.rows["num_programs"], np.minimum(tiles, 7))
    assert set(jobs.rows["slot_param"].tolist()) == {3}
    assert set(jobs.rows["num_params"].tolist()) == {5 + 2}


def _outside_the_slot(copies: CudaCopies, program: Program) -> None:
    program.chunks["num_parts"] = 5


def _outside_the_pool(copies: CudaCopies, program: Program) -> None:
    program.blocks[0].block_ids[2] = 12


def _refused(copies: CudaCopies, program: Program) -> None:
    copies._cuda.status = 700


@pytest.mark.parametrize(
    "spoil,error,reason",
    [
        (_outside_the_slot, RelayoutError, "ends at row"),
        (_outside_the_pool, BlockIdsError, "from 0 to 12, the pool has 12"),
        (_refused, TransportError, "cannot be sent"),
    ],
)
def test_a_read_that_is_refused_keeps_no_memory(
    copies: CudaCopies,
    program: Program,
    spoil: Callable[[CudaCopies, Program], None],
    error: type[Exception],
    reason: str,
) -> None:
    buffer = buffer_of(copies, program)
    bad = Caches(Shape(), seed=1).program([2, 0, 1, 4, 3], range(18), **CUT)
    spoil(copies, bad)
    with pytest.raises(error, match=reason):
        copies.make_jobs(bad, packing=True)
    copies._cuda.status = 0
    assert buffer_of(copies, program) is buffer
