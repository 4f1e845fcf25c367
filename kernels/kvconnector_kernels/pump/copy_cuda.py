"""A chunk's copy on a GPU, as a C function for the pump: one launch, and a flag in host memory that the stream sets.

Not in numba's on-disk cache, which would not notice a change of `native`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, types

from kvconnector_kernels.pump.native import call, record_at, store
from kvconnector_kernels.pump.records import offset_of
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
_PARAMS, _POINTERS = offset_of(JOB, "params"), offset_of(CONTEXT, "pointers")


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
