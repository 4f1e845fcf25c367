"""A chunk's copy on a GPU, as a C function for the pump: one launch, and a flag in host memory that the stream sets.

Not in numba's on-disk cache, which would not notice a change of `native`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cfunc, types

from kvconnector_kernels.pump.native import call, load, store
from kvconnector_kernels.pump.steps import helper

# A job's int64 fields, then the kernel's parameters, one of which is the slot's address.
NBYTES, FUNCTION, NUM_PROGRAMS, NUM_THREADS, SHARED_BYTES, NUM_PARAMS, SLOT_PARAM, STREAM = range(8)
PARAMS = 8
MAX_PARAMS = 40
JOB_FIELDS = PARAMS + MAX_PARAMS

# The context's int64 fields, then room for pointers to the parameters.
LAUNCH_KERNEL, WRITE_VALUE, MEMCPY_TO_DEVICE = range(3)
POINTERS = 3
CONTEXT_FIELDS = POINTERS + MAX_PARAMS


@helper
def launch(context, job):
    """Begin the kernel of a job; 0 or an error."""
    params, pointers = job + PARAMS * 8, context + POINTERS * 8
    for index in range(load(job + NUM_PARAMS * 8)):
        store(pointers + index * 8, params + index * 8)
    status = call(
        load(context + LAUNCH_KERNEL * 8),
        (
            load(job + FUNCTION * 8),
            load(job + NUM_PROGRAMS * 8),
            1,
            1,
            load(job + NUM_THREADS * 8),
            1,
            1,
            load(job + SHARED_BYTES * 8),
            load(job + STREAM * 8),
            pointers,
            0,
        ),
    )
    return status & 0xFFFFFFFF


@helper
def write_fence(context, stream, fence, fence_value):
    """Set a flag behind all that a stream holds: whoever sees it sees all of its writes. 0 or an error."""
    written = call(load(context + WRITE_VALUE * 8), (stream, fence, fence_value, 0))
    return written & 0xFFFFFFFF


def _copy(context, job, slot, fence, fence_value):
    store(job + (PARAMS + load(job + SLOT_PARAM * 8)) * 8, slot)
    status = launch(context, job)
    return status or write_fence(context, load(job + STREAM * 8), fence, fence_value)


@cache
def compile_copy() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives."""
    return cfunc(types.int64(*[types.int64] * 5), nopython=True)(_copy)
