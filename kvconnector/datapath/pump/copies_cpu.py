"""The pump's copies in host memory."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import (
    NUM_PARTS,
    PART_START,
    Copies,
    Jobs,
    Span,
    address_of,
    chunk_spans,
    packed_sides,
    read_spans,
    words_of,
)
from kvconnector.datapath.pump.id_buffers import IdBuffer, IdBuffers
from kvconnector.session.commands import StartReceive
from kvconnector_kernels.pump.copy_cpu import (
    JOB,
    READ,
    ROW_BYTES,
    compile_copy,
    compile_read,
    job_of,
)
from kvconnector_kernels.pump.records import index_of
from kvconnector_kernels.relayout import PagedSide
from kvconnector_kernels.relayout.cpu import MIN_STREAMED_COPY_BYTES
from kvconnector_kernels.relayout.sides import check_copy

_PAGE = 4096
_NBYTES, _NUM_PARTS, _IS_STREAMED, _SRC_ROWS, _DST_ROWS = (
    index_of(JOB, name) for name in ("nbytes", "num_parts", "is_streamed", "src", "dst")
)
_READ_WORDS, _JOB_WORDS = READ.itemsize // 8, JOB.itemsize // 8


class CpuCopies(Copies):
    """See `Copies`. What unpacks or reads at least `min_streamed_bytes` goes past the caches, which would not keep it;
    what is packed is sent next, from the cache.
    """

    job = JOB
    means = "shared memory"

    def __init__(
        self,
        pools: Pools,
        slot_bytes: int,
        *,
        min_streamed_bytes: int = MIN_STREAMED_COPY_BYTES,
    ) -> None:
        self._pools = pools
        # the alignment of a slot does not matter here
        self._slots = packed_sides(_PAGE, slot_bytes, "cpu")
        self._min_streamed_bytes = min_streamed_bytes
        self.ids = IdBuffers(_allocate_ids)
        self._compiled = compile_copy(), compile_read()
        self.function, self.read_function = (int(each.address) for each in self._compiled)

    def make_jobs(self, program: Program, *, packing: bool) -> Jobs:
        # checked with the spans, as far as copies take them
        ids = [np.ascontiguousarray(blocks.block_ids) for blocks in program.blocks]
        spans = chunk_spans(program, self._pools, ids, self._slots, packing=packing)
        words = words_of(np.empty(len(program.chunks), JOB))
        for span in spans:
            _fill(words, span)
        if not packing and words[:, _NBYTES].sum() >= self._min_streamed_bytes:
            words[:, _IS_STREAMED] = 1
        return Jobs(address_of(words), (ids,), words)

    def make_read(self, read: StartReceive, remote: RemotePools) -> Jobs:
        blocks = (*read.remote_blocks, *read.blocks)
        room = READ.itemsize + len(read.source.members) * JOB.itemsize
        buffer = self.ids.lend(blocks, more_bytes=room)
        try:
            ids, first = buffer.write(blocks, "cpu")
            count = len(read.remote_blocks)
            spans = read_spans(read, self._pools, remote, (ids[:count], ids[count:]))
            numbers, nbytes = [len(spans), 0, 0], 0
            for span in spans:
                ((_, part, num_parts, *_),) = span.fields
                job = _job_of(span)
                job[_NUM_PARTS] = num_parts
                job[_NBYTES] *= num_parts
                job[_SRC_ROWS] += part * ROW_BYTES
                job[_DST_ROWS] += part * ROW_BYTES
                nbytes += job[_NBYTES]
                numbers += job
            if nbytes >= self._min_streamed_bytes:
                numbers[_READ_WORDS + _IS_STREAMED :: _JOB_WORDS] = [1] * len(spans)
            # numpy takes several times as long to make an array, and to say where it is
            words = array("q", numbers).tobytes()
            buffer.here[first : first + len(words)] = words
        except BaseException:
            self.ids.give_back(buffer)
            raise
        return Jobs(buffer.here_address + first, (buffer, remote))


def _allocate_ids(num_ids: int, stream: int) -> IdBuffer:
    memory = np.zeros(num_ids, np.int32)
    address = memory.ctypes.data
    return IdBuffer(memory.data.cast("B"), address, address, (memory,), stream)


def _fill(words: npt.NDArray[np.int64], span: Span) -> None:
    """Write the jobs of a span's chunks. Raises RelayoutError: see `check_copy`."""
    job = _job_of(span)
    words[span.chunks] = job
    fields = np.asarray(span.fields, np.int64)
    words[span.chunks, _NUM_PARTS] = num_parts = fields[:, NUM_PARTS]
    words[span.chunks, _NBYTES] = num_parts * span.part_bytes
    rows = _SRC_ROWS if isinstance(span.src, PagedSide) else _DST_ROWS
    words[span.chunks, rows] = fields[:, PART_START] * ROW_BYTES + job[rows]


def _job_of(span: Span) -> list[int]:
    """The job of a span's first part. Raises RelayoutError: see `check_copy`."""
    counts = (span.num_heads, span.num_tokens)
    geometry = check_copy(
        span.src, span.dst, num_parts=1, num_heads=counts[0], num_tokens=counts[1]
    )
    return job_of(span.src, span.dst, geometry)
