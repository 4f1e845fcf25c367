"""Copies on a GPU, as C functions for the pump: launches, followed by a flag in host memory that the stream sets.

The C functions are not in numba's on-disk cache, which would not notice a change of `native`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from kvconnector_kernels.pump.native import call, record_at, store
from kvconnector_kernels.pump.records import index_of, offset_of, record_of
from kvconnector_kernels.pump.steps import helper

MAX_PARAMS = 40
JOB = np.dtype(
    [
        *((name, np.int64) for name in ("nbytes", "function", "num_programs", "num_threads")),
        *((name, np.int64) for name in ("shared_bytes", "num_params", "slot_param", "stream")),
        ("params", np.int64, (MAX_PARAMS,)),  # of the kernel, one of which is the slot's address
    ]
)
CONTEXT = np.dtype(
    [
        *((name, np.int64) for name in ("launch_kernel", "write_value", "memcpy_to_device")),
        ("pointers", np.int64, (MAX_PARAMS,)),  # to the parameters
    ]
)
READ = record_of("num_jobs", "ids_there", "ids_here", "ids_bytes", "stream")
"""A read of a peer's pools. The block ids of all its jobs are sent to the GPU first. Its jobs follow it."""
_READ_BYTES, _JOB_BYTES = READ.itemsize, JOB.itemsize
_PARAMS, _POINTERS = offset_of(JOB, "params"), offset_of(CONTEXT, "pointers")
_NBYTES, _NUM_PROGRAMS, _STREAM = (
    index_of(JOB, name) for name in ("nbytes", "num_programs", "stream")
)


@njit(
    "void(int64[:,::1], int64[:,::1], int64[::1], UniTuple(int64, 9), UniTuple(int64, 12))",
    cache=True,
)
def fill_jobs(jobs, terms, rows, launch, span):
    """Write a span's jobs, int64 `[chunk, word]`. Chunk `i` has the parts from `rows[i]` to `rows[i + 1]`.

    `terms`, int64 `[4, word]`: a launch of one part, and what a token further on at the source, one at the destination,
    and a token more add to it.

    `launch`: which words are the block ids of the source and of the destination, and their first parts, -1 for those of
    a chunk's slot; the tiles, and those along tokens; tokens before the copy in the first tile, tokens of a tile, tiles
    of as many tokens.

    `span`: how many tokens further on it begins at either side, how many more it has; its number of tokens; block ids
    and first part of either side, its stream, a part's bytes; and the most programs of a job, and of how many bytes and
    fewer it may have any number of them.
    """
    src_ids, dst_ids, src_part, dst_part, num_tiles, num_token_tiles = launch[:6]
    lead, tile_tokens, tiles_beside = launch[6:]
    src_further, dst_further, more, num_tokens, src_address, dst_address = span[:6]
    src_first, dst_first, stream, part_bytes, max_programs, max_uncapped_bytes = span[6:]
    token_tiles = -(-(num_tokens + lead) // tile_tokens)
    for index in range(len(jobs)):
        job, part = jobs[index], rows[index]
        num_parts = rows[index + 1] - part
        for word in range(len(job)):
            moved = src_further * terms[1, word] + dst_further * terms[2, word]
            job[word] = terms[0, word] + moved + more * terms[3, word]
        job[_NBYTES] = num_parts * part_bytes
        job[_STREAM] = stream
        if src_ids >= 0:
            job[src_ids], job[src_part] = src_address, src_first + part
        if dst_ids >= 0:
            job[dst_ids], job[dst_part] = dst_address, dst_first + part
        job[num_token_tiles] = token_tiles
        tiles = job[num_tiles] = num_parts * token_tiles * tiles_beside
        is_capped = job[_NBYTES] > max_uncapped_bytes
        job[_NUM_PROGRAMS] = min(tiles, max_programs) if is_capped else tiles


@helper
def launch(context_address, job_address):
    """Launch the kernel of a job. Returns 0 or an error."""
    context, job = record_at(context_address, CONTEXT), record_at(job_address, JOB)
    params, pointers = job_address + _PARAMS, context_address + _POINTERS
    for index in range(job.num_params):
        store(pointers + index * 8, params + index * 8)
    grid = (job.num_programs, 1, 1)
    block = (job.num_threads, 1, 1)
    arguments = (job.function, *grid, *block, job.shared_bytes, job.stream, pointers, 0)
    return call(context.launch_kernel, arguments) & 0xFFFFFFFF


@helper
def write_fence(context, stream, fence, fence_value):
    """Set a flag after the work queued on a stream; a thread that sees it sees all writes. Returns 0 or an error."""
    written = call(record_at(context, CONTEXT).write_value, (stream, fence, fence_value, 0))
    return written & 0xFFFFFFFF


def _copy(context, job, slot, fence, fence_value):
    fields = record_at(job, JOB)
    store(job + _PARAMS + fields.slot_param * 8, slot)
    status = launch(context, job)
    return status or write_fence(context, fields.stream, fence, fence_value)


def _read(context, read, fence, fence_value):
    fields = record_at(read, READ)
    ids = (fields.ids_there, fields.ids_here, fields.ids_bytes, fields.stream)
    status = call(record_at(context, CONTEXT).memcpy_to_device, ids) & 0xFFFFFFFF
    for index in range(fields.num_jobs):
        if status == 0:
            status = launch(context, read + _READ_BYTES + index * _JOB_BYTES)
    # after an error too, since kernels launched before it still run
    written = write_fence(context, fields.stream, fence, fence_value)
    return status or written


@cache
def compile_copy() -> Any:
    """Compile the copy of a chunk. Its `address` is valid for as long as the object lives. See `copy` of
    `records.STATE`.
    """
    return cfunc(types.int64(*[types.int64] * 5), nopython=True)(_copy)


@cache
def compile_read() -> Any:
    """Compile the read, with all launches in one call, as `compile_copy`. See `records.READ`. Errors: `CUresult`."""
    return cfunc(types.int64(*[types.int64] * 4), nopython=True)(_read)
