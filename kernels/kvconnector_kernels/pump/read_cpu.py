"""A read of a peer's pools that are mapped here, as a C function for the pump: a piece of bounded size a call.

A read has *jobs*: each the same heads and tokens of some parts. A job's *units* are all heads of one token of one part,
part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from kvconnector_kernels.pump.native import record_at, store_flag
from kvconnector_kernels.pump.records import ALL, MORE, PAGED_SIDE, record_of
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper, window_of
from kvconnector_kernels.relayout.cpu import MIN_STREAMED_COPY_BYTES
from kvconnector_kernels.relayout.cpu_kernel import copy_span
from kvconnector_kernels.relayout.sides import ROW_COLUMNS, CopyGeometry, PagedSide

READ = record_of("num_jobs", "job", "unit")
"""A read, its next job and that one's next unit. Its jobs follow it."""
SIDE = record_of(*PAGED_SIDE)
JOB = np.dtype(
    [
        *((name, np.int64) for name in ("num_parts", "num_heads", "num_tokens", "head_dim")),
        *((name, np.int64) for name in ("item_bytes", "is_streamed")),
        ("src", SIDE),
        ("dst", SIDE),
    ]
)
_READ_BYTES, _JOB_BYTES = READ.itemsize, JOB.itemsize
# Control waits for one piece: a tenth of a millisecond or so.
_PIECE_BYTES = 1 << 20
_PART_BYTES = 8 * ROW_COLUMNS


@helper
def _copy_piece(read_address):
    """Copy what comes next; `MORE` or `ALL`."""
    read, room = record_at(read_address, READ), _PIECE_BYTES
    while read.job < read.num_jobs and room > 0:
        job = record_at(read_address + _READ_BYTES + read.job * _JOB_BYTES, JOB)
        unit_bytes = job.num_heads * job.head_dim * job.item_bytes
        num_units = job.num_parts * job.num_tokens
        end = min(num_units, read.unit + max(1, room // unit_bytes))
        copy_span(
            job.dst.rows,
            window_of(job.dst),
            job.src.rows,
            window_of(job.src),
            job.num_heads,
            job.num_tokens,
            (job.head_dim, job.item_bytes),
            job.is_streamed != 0,
            read.unit,
            end,
        )
        room -= (end - read.unit) * unit_bytes
        read.unit = end
        if end == num_units:
            read.job += 1
            read.unit = 0
    return MORE if read.job < read.num_jobs else ALL


def _make(sources_hash):
    def read(context, read, fence, fence_value):
        _ = sources_hash
        status = _copy_piece(read)
        if status != MORE:
            store_flag(fence, fence_value)
        return status

    return read


@cache
def compile_read() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives. See `records.READ`."""
    signature = types.int64(*[types.int64] * 4)
    return cfunc(signature, nopython=True, cache=True)(_make(SOURCES_HASH))


def make_read(
    copies: Sequence[tuple[PagedSide, PagedSide, CopyGeometry]],
    *,
    min_streamed_bytes: int = MIN_STREAMED_COPY_BYTES,
) -> npt.NDArray[np.int64]:
    """The words of a `READ` and its `JOB`s, from its beginning: copies from pools that are mapped here to ours. One of
    `min_streamed_bytes` and more goes past the caches.

    Every copy is one that `check_copy` accepted, and brings something. The sides must outlive the read.
    """
    is_streamed = sum([geometry.nbytes for _, _, geometry in copies]) >= min_streamed_bytes
    words = [len(copies), 0, 0]
    for src, dst, geometry in copies:
        words += [*geometry, is_streamed, *_side(src), *_side(dst)]
    # numpy fills records field by field, which takes longer than a small copy
    return np.array(words, np.int64)


def _side(side: PagedSide) -> tuple[int, ...]:
    ids: Any = side.block_ids
    runs = side.runs
    return (
        side.table.rows_address + side.part_start * _PART_BYTES,
        ids.__array_interface__["data"][0],
        side.table.block_size,
        side.head_start,
        side.token_start,
        runs.run_tokens,
        runs.step_tokens,
        runs.skip_tokens,
    )
