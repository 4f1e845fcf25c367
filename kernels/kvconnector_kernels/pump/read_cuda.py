"""Reading a peer's pools on a GPU, as a C function for the pump: all launches of a pull at once, a flag behind them.

Not in numba's on-disk cache, which would not notice a change of `native`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cfunc, types

from kvconnector_kernels.pump import copy_cuda as job
from kvconnector_kernels.pump.native import call, load

# A pull's int64 fields, then its jobs, which are those of a copy. The block ids of all jobs are sent to the GPU first.
NUM_JOBS, IDS_THERE, IDS_HERE, IDS_BYTES, STREAM = range(5)
PULL_FIELDS = 5


def _read(context, pull, fence, fence_value):
    stream = load(pull + STREAM * 8)
    status = call(
        load(context + job.MEMCPY_TO_DEVICE * 8),
        (
            load(pull + IDS_THERE * 8),
            load(pull + IDS_HERE * 8),
            load(pull + IDS_BYTES * 8),
            stream,
        ),
    )
    status &= 0xFFFFFFFF
    jobs = pull + PULL_FIELDS * 8
    for index in range(load(pull + NUM_JOBS * 8)):
        if status == 0:
            status = job.launch(context, jobs + index * (job.JOB_FIELDS * 8))
    # after an error too: what was launched before it still runs
    written = job.write_fence(context, stream, fence, fence_value)
    return status or written


@cache
def compile_read() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives. See `records.PULL`.

    An error is a `CUresult`.
    """
    return cfunc(types.int64(*[types.int64] * 4), nopython=True)(_read)
