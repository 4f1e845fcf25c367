"""Reading a peer process's pools, as a C function for the pump: one batch of process_vm_readv, of bounded size, a call.

See `boxes` for the words. A batch is of one *job*: the same heads and tokens of some parts. A job's *units* are all
heads of one token of one part, part by part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from kvconnector_kernels.pump.boxes import (
    MAX_RUNS,
    NO_LEVEL,
    falling_axes,
    num_runs_of,
    plan_box,
    run_bytes_of,
    slot_strides,
)
from kvconnector_kernels.pump.native import array_at, call, load, store_flag
from kvconnector_kernels.pump.records import ALL, MORE
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper
from kvconnector_kernels.relayout.cpu import MIN_STREAMED_COPY_BYTES
from kvconnector_kernels.relayout.cpu_kernel import copy_span, next_box
from kvconnector_kernels.relayout.runs import MAX_RUN_TOKENS
from kvconnector_kernels.relayout.sides import ROW_COLUMNS, CopyGeometry, PagedSide

# A context's int64 fields: C functions and the slot, set by the caller; then the batch and what it consists of.
READV, ERRNO, SLOT, SLOT_BYTES = range(4)
_NUM_LOCAL, _NUM_REMOTE, _NUM_BOXES, _NUM_BYTES, _SLOT_USED = range(4, 9)
_LOCAL = 9
_REMOTE = _LOCAL + 2 * MAX_RUNS
_BOXES = _REMOTE + 2 * MAX_RUNS
# A box in the slot: first a part table's row of one block, number 0, whose block stride, a zero, is the block's id too.
_FIRST_TOKEN, _NUM_TOKENS, _PART = range(ROW_COLUMNS, ROW_COLUMNS + 3)
_BOX_FIELDS = ROW_COLUMNS + 3
CONTEXT_FIELDS = _BOXES + _BOX_FIELDS * MAX_RUNS

# A pull's int64 fields, the last two of them the next job and its next unit; then its jobs.
PID, NUM_JOBS, JOB, UNIT = range(4)
PULL_FIELDS = 4

# A job's fields: the counts, then each side.
NUM_PARTS, NUM_HEADS, NUM_TOKENS, HEAD_DIM, ITEM_BYTES, IS_STREAMED = range(6)
SRC, DST = 6, 14
# A side's fields: the first part's row, then its window as `copy_span` takes it.
ROWS, WINDOW = 0, 1
SIDE_FIELDS = 8
JOB_FIELDS = DST + SIDE_FIELDS

# Control waits for one batch: a tenth of a millisecond or so.
_BATCH_BYTES = 1 << 20
# What is in the slot is still in the second-level cache when it is moved on.
_FILL_BYTES = 256 << 10
_ALIGN_BYTES = 64
_PART_BYTES = 8 * ROW_COLUMNS
_EFAULT, _ENOBUFS = 14, 105
_INT64 = np.dtype(np.int64)


@helper
def _add_run(context, iovecs, count, address, nbytes):
    """One more run to read or to write, joined with the last if it follows that."""
    at = iovecs + 2 * context[count]
    if context[count] and context[at - 2] + context[at - 1] == address:
        context[at - 1] += nbytes
        return
    context[at] = address
    context[at + 1] = nbytes
    context[count] += 1


@helper
def _add_runs(context, remote, src, local, dst, counts, axes, level, run_bytes):
    for i in range(counts[axes[0]] if level > 0 else 1):
        for j in range(counts[axes[1]] if level > 1 else 1):
            from_ = remote + i * src[axes[0]] + j * src[axes[1]]
            to = local + i * dst[axes[0]] + j * dst[axes[1]]
            _add_run(context, _REMOTE, _NUM_REMOTE, from_, run_bytes)
            _add_run(context, _LOCAL, _NUM_LOCAL, to, run_bytes)
            context[_NUM_BYTES] += run_bytes


@helper
def _window(job, side):
    at = side + WINDOW
    return (
        job[at],
        job[at + 1],
        job[at + 2],
        job[at + 3],
        job[at + 4],
        job[at + 5],
        job[at + 6],
    )


@helper
def _box_at(job, side, part, token):
    """The address of a token, how many follow it evenly in its block, and the strides of their box."""
    row = job[side + ROWS] + part * _PART_BYTES
    window = _window(job, side)
    head, dim = load(row + 16), load(row + 32)
    base = load(row) + window[2] * head
    address, left, step = next_box(base, load(row + 8), load(row + 24), window, token)
    return address, left, (head, step, dim)


@helper
def _add_slot_box(context, part, token, num_tokens, strides):
    """Remember what is to be moved on from the slot's free part."""
    at = _BOXES + _BOX_FIELDS * context[_NUM_BOXES]
    head, step, dim = strides
    context[at] = context[SLOT] + context[_SLOT_USED] - token * step
    context[at + 1] = 0
    context[at + 2] = head
    context[at + 3] = step
    context[at + 4] = dim
    context[at + _FIRST_TOKEN] = token
    context[at + _NUM_TOKENS] = num_tokens
    context[at + _PART] = part
    context[_NUM_BOXES] += 1


@helper
def _add_box(context, pull, job):
    """Put the next box into the batch: 0 if it has no room left, a negative error, or 1."""
    part = pull[UNIT] // job[NUM_TOKENS]
    token = pull[UNIT] - part * job[NUM_TOKENS]
    item = (job[HEAD_DIM], job[ITEM_BYTES])
    remote, src_left, src = _box_at(job, SRC, part, token)
    local, dst_left, dst = _box_at(job, DST, part, token)
    left = min(job[NUM_TOKENS] - token, src_left)
    is_in_place, level, num_tokens = plan_box(
        src, dst, job[NUM_HEADS], left, min(left, dst_left), item, context[SLOT_BYTES]
    )
    if level == NO_LEVEL:
        return -_ENOBUFS
    counts = (job[NUM_HEADS], num_tokens, item[0])
    axes = falling_axes(src, counts)
    num_runs = num_runs_of(counts, axes, level)
    run_bytes = run_bytes_of(src, counts, axes, level, item[1])
    if max(context[_NUM_LOCAL], context[_NUM_REMOTE]) + num_runs > MAX_RUNS:
        return 0
    if not is_in_place:
        slot_bytes = num_runs * run_bytes
        if context[_SLOT_USED] + slot_bytes > context[SLOT_BYTES]:
            return 0
        local = context[SLOT] + context[_SLOT_USED]
        dst = slot_strides(src, counts, axes, level, run_bytes)
        _add_slot_box(context, part, token, num_tokens, dst)
        context[_SLOT_USED] += slot_bytes + -slot_bytes % _ALIGN_BYTES
    _add_runs(context, remote, src, local, dst, counts, axes, level, run_bytes)
    pull[UNIT] += num_tokens
    return 1


@helper
def _fill(context, pull, job):
    """A new batch; 0 or an error."""
    context[_NUM_LOCAL:_LOCAL] = 0
    while (
        pull[UNIT] < job[NUM_PARTS] * job[NUM_TOKENS]
        and context[_NUM_BYTES] < _BATCH_BYTES
        and context[_SLOT_USED] < _FILL_BYTES
        and context[_NUM_BOXES] < MAX_RUNS
    ):
        added = _add_box(context, pull, job)
        if added < 0:
            return -added
        if added == 0:
            break
    return 0


@helper
def _fetch(context, context_address, pid):
    """Read the batch; 0 or an error."""
    found = call(
        context[READV],
        (
            pid,
            context_address + _LOCAL * 8,
            context[_NUM_LOCAL],
            context_address + _REMOTE * 8,
            context[_NUM_REMOTE],
            0,
        ),
    )
    if found == context[_NUM_BYTES]:
        return 0
    # fewer bytes: the next address was not readable
    return _EFAULT if found >= 0 else load(call(context[ERRNO], ())) & 0xFFFFFFFF


@helper
def _move_on(context, context_address, job):
    """Copy what lies in the slot to its place."""
    window = _window(job, DST)
    for box in range(context[_NUM_BOXES]):
        at = _BOXES + _BOX_FIELDS * box
        row = context_address + at * 8
        copy_span(
            job[DST + ROWS] + context[at + _PART] * _PART_BYTES,
            window,
            row,
            (row + 8, MAX_RUN_TOKENS, 0, 0, MAX_RUN_TOKENS, MAX_RUN_TOKENS, 0),
            job[NUM_HEADS],
            job[NUM_TOKENS],
            (job[HEAD_DIM], job[ITEM_BYTES]),
            job[IS_STREAMED] != 0,
            context[at + _FIRST_TOKEN],
            context[at + _FIRST_TOKEN] + context[at + _NUM_TOKENS],
        )


@helper
def _read_batch(context, context_address, pull, job):
    """Read what comes next of a job; 0 or an `errno`."""
    error = _fill(context, pull, job)
    if error == 0 and context[_NUM_BYTES]:
        error = _fetch(context, context_address, pull[PID])
    if error == 0:
        _move_on(context, context_address, job)
    return error


@helper
def _read(context_address, pull_address):
    context = array_at(context_address, CONTEXT_FIELDS, _INT64)
    pull = array_at(pull_address, PULL_FIELDS, _INT64)
    jobs = array_at(pull_address + PULL_FIELDS * 8, pull[NUM_JOBS] * JOB_FIELDS, _INT64)
    if pull[JOB] < pull[NUM_JOBS]:
        job = jobs[pull[JOB] * JOB_FIELDS : (pull[JOB] + 1) * JOB_FIELDS]
        error = _read_batch(context, context_address, pull, job)
        if error:
            return error
        if pull[UNIT] == job[NUM_PARTS] * job[NUM_TOKENS]:
            pull[JOB] += 1
            pull[UNIT] = 0
    return MORE if pull[JOB] < pull[NUM_JOBS] else ALL


def _make(sources_hash):
    def read(context, pull, fence, fence_value):
        _ = sources_hash
        status = _read(context, pull)
        if status != MORE:
            store_flag(fence, fence_value)
        return status

    return read


@cache
def compile_read() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives. See `records.PULL`.

    An error is an `errno`: ENOBUFS if one token of one part fits no slot.
    """
    signature = types.int64(*[types.int64] * 4)
    return cfunc(signature, nopython=True, cache=True)(_make(SOURCES_HASH))


def make_context(slot_address: int, slot_bytes: int) -> npt.NDArray[np.int64]:
    """The context of reads through a slot.

    Raises:
        OSError: this platform has no process_vm_readv.
    """
    libc = ctypes.CDLL(None)
    row = np.zeros(CONTEXT_FIELDS, np.int64)
    try:
        functions = (libc.process_vm_readv, libc.__errno_location)
    except AttributeError as exc:
        raise OSError("this platform has no process_vm_readv") from exc
    row[READV], row[ERRNO] = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)
    row[SLOT], row[SLOT_BYTES] = slot_address, slot_bytes
    return row


def make_pull(
    pid: int,
    copies: Sequence[tuple[PagedSide, PagedSide, CopyGeometry]],
    *,
    min_streamed_bytes: int = MIN_STREAMED_COPY_BYTES,
) -> npt.NDArray[np.int64]:
    """A pull that copies from the pools of process `pid`, on the CPU, to ours, from its beginning. With
    `min_streamed_bytes` and more it re-lays out past the caches.

    Every copy is one that `check_copy` accepted, and brings something. The sides must outlive the pull.
    """
    row = np.zeros(PULL_FIELDS + len(copies) * JOB_FIELDS, np.int64)
    row[PID], row[NUM_JOBS] = pid, len(copies)
    nbytes = sum(geometry.nbytes for _, _, geometry in copies)
    jobs = row[PULL_FIELDS:].reshape(len(copies), JOB_FIELDS)
    for job, (src, dst, geometry) in zip(jobs, copies, strict=True):
        job[NUM_PARTS] = geometry.num_parts
        job[NUM_HEADS] = geometry.num_heads
        job[NUM_TOKENS] = geometry.num_tokens
        job[HEAD_DIM] = geometry.head_dim
        job[ITEM_BYTES] = geometry.item_size_bytes
        job[IS_STREAMED] = nbytes >= min_streamed_bytes
        job[SRC : SRC + SIDE_FIELDS] = _side_fields(src)
        job[DST : DST + SIDE_FIELDS] = _side_fields(dst)
    return row


def _side_fields(side: PagedSide) -> tuple[int, ...]:
    ids: Any = side.block_ids
    runs = side.runs
    return (
        side.table.rows.ctypes.data + side.part_start * _PART_BYTES,
        ids.ctypes.data,
        side.table.block_size,
        side.head_start,
        side.token_start,
        runs.run_tokens,
        runs.step_tokens,
        runs.skip_tokens,
    )
