"""Copies in host memory, as C functions for the pump: of a chunk to or from its slot, and of a read of a peer's pools.

A `JOB` is the same heads and tokens of some parts, from one side to the other. A side is a window into pools, or the
slot of a chunk, whose address is known when it is copied. A job's *units* are all heads of one token of one part, part
by part.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from kvconnector_kernels.pump import helpers
from kvconnector_kernels.pump.native import add_flag, end_stream, record_at, store_flag
from kvconnector_kernels.pump.records import ALL, MORE, PAGED_SIDE, offset_of, record_of
from kvconnector_kernels.pump.sources import SOURCES_HASH, compiling_alone
from kvconnector_kernels.pump.steps import helper
from kvconnector_kernels.relayout.block_ids import BlockIdsAt
from kvconnector_kernels.relayout.cpu_kernel import copy_part
from kvconnector_kernels.relayout.runs import MAX_RUN_TOKENS
from kvconnector_kernels.relayout.sides import ROW_COLUMNS, CopyGeometry, PackedSide, Side

SIDE = record_of(*PAGED_SIDE)
"""A window into pools; `rows` is 0 for a chunk's slot."""
JOB = np.dtype(
    [
        *((name, np.int64) for name in ("nbytes", "num_parts", "num_heads", "num_tokens")),
        *((name, np.int64) for name in ("head_dim", "item_bytes", "is_streamed", "part_stride")),
        # a chunk's part as a part table's row, completed here; its tokens are one block, number 0: the zero before the
        # head stride is its block's stride, and its id
        *((name, np.int64) for name in ("slot", "block", "head_stride", "token_stride")),
        ("dim_stride", np.int64),
        ("src", SIDE),
        ("dst", SIDE),
    ]
)
READ = record_of("num_jobs", "next_piece", "piece_bytes", "num_helpers")
"""A read of a peer's pools, its next piece, the approximate bytes of a piece, and the number of threads to help with
it. Its jobs follow it.
"""
ROW_BYTES = 8 * ROW_COLUMNS
_ROW, _BLOCK = offset_of(JOB, "slot"), offset_of(JOB, "block")
_READ_BYTES, _JOB_BYTES = READ.itemsize, JOB.itemsize
_NEXT_PIECE = offset_of(READ, "next_piece")
CALL_BYTES = 1 << 20
"""A call copies about this many bytes, or one piece. Control messages wait for it: about a tenth of a millisecond."""


@helper
def _rows_of(address, job, side, slot, part):
    if side.rows:
        return side.rows + part * ROW_BYTES
    job.slot = slot + part * job.part_stride
    return address + _ROW


@helper
def _window_of(address, job, side):
    """Return a side's window as `copy_part` takes it."""
    if side.rows:
        ids = (side.block_ids, side.block_size)
        tokens = (side.token_start, side.run_tokens, side.step_tokens, side.skip_tokens)
        return (*ids, side.head_start, *tokens)
    return (address + _BLOCK, job.num_tokens, 0, 0, MAX_RUN_TOKENS, MAX_RUN_TOKENS, 0)


@helper
def _copy_units(address, slot, start, end):
    """Copy the units of a job from `start` to `end`; a chunk is in `slot`. The caller then calls `end_stream` once,
    which waits until every streamed line is in memory.
    """
    job = record_at(address, JOB)
    src_window, dst_window = _window_of(address, job, job.src), _window_of(address, job, job.dst)
    item, is_streamed = (job.head_dim, job.item_bytes), job.is_streamed != 0
    while start < end:
        part = start // job.num_tokens
        first = start - part * job.num_tokens
        last = min(end - part * job.num_tokens, job.num_tokens)
        src = _rows_of(address, job, job.src, slot, part)
        dst = _rows_of(address, job, job.dst, slot, part)
        span = (first, last)
        copy_part(dst, dst_window, src, src_window, job.num_heads, span, item, is_streamed)
        start += last - first


@helper
def copy_piece(read_address):
    """Copy the next piece of a read, which any thread may do. Returns its bytes, and True if it was the last."""
    read = record_at(read_address, READ)
    piece = add_flag(read_address + _NEXT_PIECE, 1)
    for index in range(read.num_jobs):
        address = read_address + _READ_BYTES + index * _JOB_BYTES
        job = record_at(address, JOB)
        unit_bytes = job.num_heads * job.head_dim * job.item_bytes
        num_units = job.num_parts * job.num_tokens
        piece_units = max(1, read.piece_bytes // unit_bytes)
        num_pieces = (num_units + piece_units - 1) // piece_units
        if piece < num_pieces:
            start = piece * piece_units
            end = min(num_units, start + piece_units)
            _copy_units(address, 0, start, end)
            is_last = index + 1 == read.num_jobs and end == num_units
            return (end - start) * unit_bytes, is_last
        piece -= num_pieces
    return 0, True


def _make(sources_hash):
    def copy(context, job, slot, flag, flag_value):
        _ = sources_hash
        fields = record_at(job, JOB)
        _copy_units(job, slot, 0, fields.num_parts * fields.num_tokens)
        if fields.is_streamed:
            end_stream()
        store_flag(flag, flag_value)
        return 0

    def read(context, read, flag, flag_value):
        _ = sources_hash
        fields = record_at(read, READ)
        if fields.num_helpers and helpers.share(context, read, flag, fields.num_helpers):
            fields.num_helpers = 0
        left, is_last = max(CALL_BYTES, fields.piece_bytes), False
        while left > 0 and not is_last:
            nbytes, is_last = copy_piece(read)
            left -= nbytes
        end_stream()
        if is_last:
            helpers.close(flag, flag_value)
        return ALL if is_last else MORE

    return copy, read


def _make_help(sources_hash):
    def help_reads(context):
        _ = sources_hash
        while not helpers.is_closed(context):
            read = helpers.join_next(context)
            if read:
                is_last = False
                while helpers.is_open(context) and not is_last:
                    _, is_last = copy_piece(read)
                end_stream()
                helpers.leave(context)

    return help_reads


_copy, _read = _make(SOURCES_HASH)
_help_reads = _make_help(SOURCES_HASH)


@cache
@compiling_alone()
def compile_copy() -> Any:
    """Compile the copy of a chunk, which is complete on return. Its `address` is valid for as long as the object lives.
    See `copy` of `records.STATE`.
    """
    return cfunc(types.int64(*[types.int64] * 5), nopython=True, cache=True)(_copy)


@cache
@compiling_alone()
def compile_read() -> Any:
    """Compile the read, of some pieces per call, as `compile_copy` does. Its context is a crew or 0. See
    `records.READ`.
    """
    return cfunc(types.int64(*[types.int64] * 4), nopython=True, cache=True)(_read)


@cache
@compiling_alone()
def compile_help() -> Any:
    """Compile the function of helping threads, which holds no GIL and returns when its crew is closed."""
    return njit("void(int64)", nogil=True, cache=True)(_help_reads)


def job_of(src: Side, dst: Side, geometry: CopyGeometry, *, is_streamed: bool = False) -> list[int]:
    """Return the words of a `JOB` for a copy that `check_copy` accepted, one for each field, in order. The sides must
    outlive the job; it copies a chunk to or from any slot.

    Args:
        src: The side to read.
        dst: The side to write.
        geometry: The geometry of the copy.
        is_streamed: True to write past the caches.
    """
    strides = (0, 0, 0, 0)
    for side in (src, dst):
        if isinstance(side, PackedSide):
            strides = side.strides_bytes(geometry)
    counts = (geometry.num_parts, geometry.num_heads, geometry.num_tokens)
    item = (geometry.head_dim, geometry.item_size_bytes, is_streamed)
    chunk = (strides[0], 0, 0, *strides[1:])
    return [geometry.nbytes, *counts, *item, *chunk, *_side(src), *_side(dst)]


def _side(side: Side) -> tuple[int, ...]:
    if isinstance(side, PackedSide):
        return (0,) * len(PAGED_SIDE)
    ids: Any = side.block_ids
    runs = side.runs
    return (
        side.table.rows_address + side.part_start * ROW_BYTES,
        ids.address if isinstance(ids, BlockIdsAt) else ids.__array_interface__["data"][0],
        side.table.block_size,
        side.head_start,
        side.token_start,
        runs.run_tokens,
        runs.step_tokens,
        runs.skip_tokens,
    )
