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
from kvconnector_kernels.pump.native import array_at, call, load, record_at, store_flag
from kvconnector_kernels.pump.records import ALL, MORE, PAGED_SIDE, offset_of, record_of
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper, window_of
from kvconnector_kernels.relayout.cpu import MIN_STREAMED_COPY_BYTES
from kvconnector_kernels.relayout.cpu_kernel import copy_span, next_box
from kvconnector_kernels.relayout.runs import MAX_RUN_TOKENS
from kvconnector_kernels.relayout.sides import ROW_COLUMNS, CopyGeometry, PagedSide

_IOVEC = record_of("address", "nbytes")
_BOX = record_of(
    # what lies in the slot as a part table's row of one block, number 0: the zero before the head stride is its block's
    # stride, and its id
    "address",
    "block",
    "head_stride",
    "token_stride",
    "dim_stride",
    "first_token",
    "num_tokens",
    "part",
)
_BATCH = (
    *("readv", "errno_location", "slot", "slot_bytes"),  # set by the caller
    *("num_bytes", "slot_used", "num_local", "num_remote", "num_boxes"),
)
CONTEXT = np.dtype(
    [
        *((name, np.int64) for name in _BATCH),
        ("local", _IOVEC, (MAX_RUNS,)),
        ("remote", _IOVEC, (MAX_RUNS,)),
        ("boxes", _BOX, (MAX_RUNS,)),
    ]
)
_SCALARS = record_of(*_BATCH)
_LOCAL, _REMOTE, _BOXES = (offset_of(CONTEXT, name) for name in ("local", "remote", "boxes"))

READ = record_of("pid", "num_jobs", "job", "unit")
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
_READ_BYTES, _JOB_BYTES, _BOX_BYTES = READ.itemsize, JOB.itemsize, _BOX.itemsize

# Control waits for one batch: a tenth of a millisecond or so.
_BATCH_BYTES = 1 << 20
# What is in the slot is still in the second-level cache when it is moved on.
_FILL_BYTES = 256 << 10
_ALIGN_BYTES = 64
_PART_BYTES = 8 * ROW_COLUMNS
_EFAULT, _ENOBUFS = 14, 105


@helper
def _add_run(runs, count, address, nbytes):
    """One more run to read or to write, joined with the last if it follows that; how many there are."""
    if count and runs[count - 1].address + runs[count - 1].nbytes == address:
        runs[count - 1].nbytes += nbytes
        return count
    runs[count].address = address
    runs[count].nbytes = nbytes
    return count + 1


@helper
def _add_runs(context, base, remote, src, local, dst, counts, axes, level, run_bytes):
    from_runs = array_at(base + _REMOTE, MAX_RUNS, _IOVEC)
    to_runs = array_at(base + _LOCAL, MAX_RUNS, _IOVEC)
    for i in range(counts[axes[0]] if level > 0 else 1):
        for j in range(counts[axes[1]] if level > 1 else 1):
            from_ = remote + i * src[axes[0]] + j * src[axes[1]]
            to = local + i * dst[axes[0]] + j * dst[axes[1]]
            context.num_remote = _add_run(from_runs, context.num_remote, from_, run_bytes)
            context.num_local = _add_run(to_runs, context.num_local, to, run_bytes)
            context.num_bytes += run_bytes


@helper
def _box_at(side, part, token):
    """The address of a token, how many follow it evenly in its block, and the strides of their box."""
    row = side.rows + part * _PART_BYTES
    head, dim = load(row + 16), load(row + 32)
    base = load(row) + side.head_start * head
    address, left, step = next_box(base, load(row + 8), load(row + 24), window_of(side), token)
    return address, left, (head, step, dim)


@helper
def _add_slot_box(context, base, part, token, num_tokens, strides):
    """Remember what is to be moved on from the slot's free part."""
    box = array_at(base + _BOXES, MAX_RUNS, _BOX)[context.num_boxes]
    box.head_stride, box.token_stride, box.dim_stride = strides
    box.address = context.slot + context.slot_used - token * box.token_stride
    box.block = 0
    box.first_token, box.num_tokens, box.part = token, num_tokens, part
    context.num_boxes += 1


@helper
def _add_box(context, base, read, job):
    """Put the next box into the batch: 0 if it has no room left, a negative error, or 1."""
    part = read.unit // job.num_tokens
    token = read.unit - part * job.num_tokens
    item = (job.head_dim, job.item_bytes)
    remote, src_left, src = _box_at(job.src, part, token)
    local, dst_left, dst = _box_at(job.dst, part, token)
    left = min(job.num_tokens - token, src_left)
    is_in_place, level, num_tokens = plan_box(
        src, dst, job.num_heads, left, min(left, dst_left), item, context.slot_bytes
    )
    if level == NO_LEVEL:
        return -_ENOBUFS
    counts = (job.num_heads, num_tokens, item[0])
    axes = falling_axes(src, counts)
    num_runs = num_runs_of(counts, axes, level)
    run_bytes = run_bytes_of(src, counts, axes, level, item[1])
    if max(context.num_local, context.num_remote) + num_runs > MAX_RUNS:
        return 0
    if not is_in_place:
        slot_bytes = num_runs * run_bytes
        if context.slot_used + slot_bytes > context.slot_bytes:
            return 0
        local = context.slot + context.slot_used
        dst = slot_strides(src, counts, axes, level, run_bytes)
        _add_slot_box(context, base, part, token, num_tokens, dst)
        context.slot_used += slot_bytes + -slot_bytes % _ALIGN_BYTES
    _add_runs(context, base, remote, src, local, dst, counts, axes, level, run_bytes)
    read.unit += num_tokens
    return 1


@helper
def _fill(context, base, read, job):
    """A new batch; 0 or an error."""
    context.num_local = context.num_remote = context.num_boxes = 0
    context.num_bytes = context.slot_used = 0
    while (
        read.unit < job.num_parts * job.num_tokens
        and context.num_bytes < _BATCH_BYTES
        and context.slot_used < _FILL_BYTES
        and context.num_boxes < MAX_RUNS
    ):
        added = _add_box(context, base, read, job)
        if added < 0:
            return -added
        if added == 0:
            break
    return 0


@helper
def _fetch(context, base, pid):
    """Read the batch; 0 or an error."""
    local, remote = base + _LOCAL, base + _REMOTE
    arguments = (pid, local, context.num_local, remote, context.num_remote, 0)
    found = call(context.readv, arguments)
    if found == context.num_bytes:
        return 0
    # fewer bytes: the next address was not readable
    return _EFAULT if found >= 0 else load(call(context.errno_location, ())) & 0xFFFFFFFF


@helper
def _move_on(context, base, job):
    """Copy what lies in the slot to its place."""
    item, is_streamed = (job.head_dim, job.item_bytes), job.is_streamed != 0
    for index in range(context.num_boxes):
        at = base + _BOXES + index * _BOX_BYTES
        box = record_at(at, _BOX)
        copy_span(
            job.dst.rows + box.part * _PART_BYTES,
            window_of(job.dst),
            at,
            (at + 8, MAX_RUN_TOKENS, 0, 0, MAX_RUN_TOKENS, MAX_RUN_TOKENS, 0),
            job.num_heads,
            job.num_tokens,
            item,
            is_streamed,
            box.first_token,
            box.first_token + box.num_tokens,
        )


@helper
def _read_batch(context_address, read_address):
    """Read what comes next; `MORE`, `ALL` or an `errno`."""
    context, read = record_at(context_address, _SCALARS), record_at(read_address, READ)
    if read.job < read.num_jobs:
        job = record_at(read_address + _READ_BYTES + read.job * _JOB_BYTES, JOB)
        error = _fill(context, context_address, read, job)
        if error == 0 and context.num_bytes:
            error = _fetch(context, context_address, read.pid)
        if error:
            return error
        _move_on(context, context_address, job)
        if read.unit == job.num_parts * job.num_tokens:
            read.job += 1
            read.unit = 0
    return MORE if read.job < read.num_jobs else ALL


def _make(sources_hash):
    def read(context, read, fence, fence_value):
        _ = sources_hash
        status = _read_batch(context, read)
        if status != MORE:
            store_flag(fence, fence_value)
        return status

    return read


@cache
def compile_read() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives. See `records.READ`.

    An error is an `errno`: ENOBUFS if one token of one part fits no slot.
    """
    signature = types.int64(*[types.int64] * 4)
    return cfunc(signature, nopython=True, cache=True)(_make(SOURCES_HASH))


def make_context(slot_address: int, slot_bytes: int) -> npt.NDArray[np.void]:
    """The context of reads through a slot.

    Raises:
        OSError: this platform has no process_vm_readv.
    """
    libc = ctypes.CDLL(None)
    try:
        functions = (libc.process_vm_readv, libc.__errno_location)
    except AttributeError as exc:
        raise OSError("this platform has no process_vm_readv") from exc
    context = np.zeros((), CONTEXT)
    context["readv"], context["errno_location"] = (
        ctypes.cast(function, ctypes.c_void_p).value for function in functions
    )
    context["slot"], context["slot_bytes"] = slot_address, slot_bytes
    return context


def make_read(
    pid: int,
    copies: Sequence[tuple[PagedSide, PagedSide, CopyGeometry]],
    *,
    min_streamed_bytes: int = MIN_STREAMED_COPY_BYTES,
) -> npt.NDArray[np.int64]:
    """The words of a `READ` and its `JOB`s that copies from the pools of process `pid`, on the CPU, to ours, from its
    beginning. With `min_streamed_bytes` and more it re-lays out past the caches.

    Every copy is one that `check_copy` accepted, and brings something. The sides must outlive the read.
    """
    is_streamed = sum([geometry.nbytes for _, _, geometry in copies]) >= min_streamed_bytes
    words = [pid, len(copies), 0, 0]
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
