"""A chunk's copy on a GPU, as a C function for the pump: one launch, and a flag in host memory that the stream sets.

The C function is not in numba's on-disk cache, which would not notice a change of `native`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from kvconnector_kernels.pump.native import call, record_at, store
from kvconnector_kernels.pump.records import offset_of, place_of
from kvconnector_kernels.pump.steps import helper

MAX_PARAMS = 40
MAX_UNCAPPED_CHUNK_BYTES = 16 << 20
"""A chunk of no more is copied in 20 microseconds on all multiprocessors: a read's first and last chunks, in whose time
nothing else of it moves.
"""
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
_PARAMS, _POINTERS = offset_of(JOB, "params"), offset_of(CONTEXT, "pointers")
_NBYTES, _NUM_PROGRAMS, _STREAM = (
    place_of(JOB, name) for name in ("nbytes", "num_programs", "stream")
)


@njit(
    "void(int64[:,::1], int64[:,::1], int32[:,::1], UniTuple(int64, 7), UniTuple(int64, 8))",
    cache=True,
)
def fill_jobs(jobs, terms, chunks, launch, span):
    """Write the jobs of a span's chunks, int64 `[chunk, word]`. `chunks` are int32 `[chunk, field of CHUNK_DTYPE]`.

    `terms`, int64 `[3, word]`: a launch of one part, and what a token further on, and a token more, add to it. Of
    the `launch`: which words are the block ids, the first part, the tiles and those along tokens; tokens in front of
    the first tile, tokens of a tile, tiles of as many tokens. Of the `span`: how many tokens further on it begins, and
    how many more it has; its number of tokens, block ids, stream, first part, a part's bytes, and the most programs
    of a job of more than `MAX_UNCAPPED_CHUNK_BYTES`.
    """
    ids, part_start, num_tiles, num_token_tiles, lead, tile_tokens, tiles_beside = launch
    further, more, num_tokens, ids_address, stream, first_part, part_bytes, max_programs = span
    token_tiles = -(-(num_tokens + lead) // tile_tokens)
    for index in range(len(chunks)):
        job, num_parts = jobs[index], np.int64(chunks[index, 2])
        for word in range(len(job)):
            job[word] = terms[0, word] + further * terms[1, word] + more * terms[2, word]
        job[_NBYTES] = num_parts * part_bytes
        job[_STREAM], job[ids] = stream, ids_address
        job[part_start] = first_part + chunks[index, 1]
        job[num_token_tiles] = token_tiles
        tiles = job[num_tiles] = num_parts * token_tiles * tiles_beside
        is_capped = job[_NBYTES] > MAX_UNCAPPED_CHUNK_BYTES
        job[_NUM_PROGRAMS] = min(tiles, max_programs) if is_capped else tiles


@helper
def launch(context_address, job_address):
    """Begin the kernel of a job; 0 or an error."""
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
    """Set a flag behind all that a stream holds: whoever sees it sees all of its writes. 0 or an error."""
    written = call(record_at(context, CONTEXT).write_value, (stream, fence, fence_value, 0))
    return written & 0xFFFFFFFF


def _copy(context, job, slot, fence, fence_value):
    fields = record_at(job, JOB)
    store(job + _PARAMS + fields.slot_param * 8, slot)
    status = launch(context, job)
    return status or write_fence(context, fields.stream, fence, fence_value)


@cache
def compile_copy() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives."""
    return cfunc(types.int64(*[types.int64] * 5), nopython=True)(_copy)
