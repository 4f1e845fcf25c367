"""Reading a peer's pools on a GPU, as a C function for the pump: all launches of a read at once, a flag behind them.

Not in numba's on-disk cache, which would not notice a change of `native`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cfunc, types

from kvconnector_kernels.pump.copy_cuda import CONTEXT, JOB, launch, write_fence
from kvconnector_kernels.pump.native import call, record_at
from kvconnector_kernels.pump.records import record_of

READ = record_of("num_jobs", "ids_there", "ids_here", "ids_bytes", "stream")
"""A read's block ids, of all its jobs, are sent to the GPU first. Its jobs, which are those of a copy, follow it."""
_READ_BYTES, _JOB_BYTES = READ.itemsize, JOB.itemsize


def _read(context, read, fence, fence_value):
    fields = record_at(read, READ)
    ids = (fields.ids_there, fields.ids_here, fields.ids_bytes, fields.stream)
    status = call(record_at(context, CONTEXT).memcpy_to_device, ids) & 0xFFFFFFFF
    for index in range(fields.num_jobs):
        if status == 0:
            status = launch(context, read + _READ_BYTES + index * _JOB_BYTES)
    # after an error too: what was launched before it still runs
    written = write_fence(context, fields.stream, fence, fence_value)
    return status or written


@cache
def compile_read() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives. See `records.READ`.

    An error is a `CUresult`.
    """
    return cfunc(types.int64(*[types.int64] * 4), nopython=True)(_read)
