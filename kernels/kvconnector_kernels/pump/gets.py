"""Reading a peer's memory over the network, as a C function for the pump: UCX gets between two looks at a lease board.

A call posts what may be under way at a time and looks after what is; it waits for nothing. The bucket of the lease's
key is read before the first get of a run, and again once the last has ended.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, cfunc, types

from kvconnector_kernels.pump.native import call, load, pointer, store, store_flag
from kvconnector_kernels.pump.records import ALL, BUSY, MORE
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import FIRST_ERROR, IN_PROGRESS, OK, helper, status_of

# The context's int64 fields: C functions and the parameters of a get.
GET, REQUEST_STATUS, REQUEST_FREE, PARAM, _BUILD = range(5)
CONTEXT_FIELDS = 5

MAX_UNDER_WAY = 64
MAX_GET_BYTES = 1 << 20
MAX_BYTES_UNDER_WAY = 8 << 20
"""What must end before a read that is stopped gives its blocks back."""
MAX_POSTED = 16
"""In one call: control waits for no more."""
BUCKET_BYTES = 256
_ENTRY_BYTES = 32

# A pull's int64 fields. [C] is set by the caller; `ENDPOINT` again between two calls.
ENDPOINT = 0  # [C] ucp_ep_h
BUCKET = 1  # [C] address of the key's bucket at the peer; 0: no board is looked at
BUCKET_KEY = 2  # [C] ucp_rkey_h of the board
LEASE = 3  # [C] the lease's key, two words
TOKEN_STOP = 5  # [C] end of the last token that is read
NUM_RUNS = 6  # [C]
STAGE = 7
NEXT_RUN = 8
NEXT_BYTE = 9  # of that run
NUM_UNDER_WAY = 10
BYTES_UNDER_WAY = 11
NUM_DONE = 12  # gets that have ended well
ERROR = 13
BUCKET_HERE = 14
_REQUESTS = BUCKET_HERE + BUCKET_BYTES // 8
_RUNS = _REQUESTS + 2 * MAX_UNDER_WAY
RUN_FIELDS = 4  # address there and here, bytes, ucp_rkey_h

_NEW, _LOOKING, _READING, _LOOKING_AGAIN = range(4)

# What a call returns beside the statuses of `records`: UCX's errors with their sign turned, which end below 101.
NOT_PUBLISHED, RETRACTED = 201, 202


@helper
def is_published(bucket, first, second, token_stop):
    """Whether the bucket at an address has a complete entry for a key and tokens up to `token_stop`."""
    for at in range(bucket, bucket + BUCKET_BYTES, _ENTRY_BYTES):
        if load(at) != first or load(at + 8) != second:
            continue
        expected = load(at + 16) & 0xFFFFFFFF
        ready = (load(at + 16) >> 32) & 0xFFFFFFFF
        num_tokens = ((load(at + 24) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
        if expected != 0 and expected == ready and num_tokens >= token_stop:
            return True
    return False


@helper
def _retire(context, pull):
    """Look after what is under way; whether something ended."""
    moved = False
    index = 0
    while index < pull[NUM_UNDER_WAY]:
        at = _REQUESTS + 2 * index
        status = status_of(call(context[REQUEST_STATUS], (pull[at],)))
        if status == IN_PROGRESS:
            index += 1
            continue
        moved = True
        call(context[REQUEST_FREE], (pull[at],))
        pull[NUM_UNDER_WAY] -= 1
        pull[BYTES_UNDER_WAY] -= pull[at + 1]
        last = _REQUESTS + 2 * pull[NUM_UNDER_WAY]
        pull[at], pull[at + 1] = pull[last], pull[last + 1]
        _end(pull, status)
    return moved


@helper
def _end(pull, status):
    if status == OK:
        pull[NUM_DONE] += 1
    elif pull[ERROR] == 0:
        pull[ERROR] = -status


@helper
def _post(context, pull, remote, local, nbytes, key):
    raw = call(context[GET], (pull[ENDPOINT], local, nbytes, remote, key, context[PARAM]))
    if FIRST_ERROR <= raw <= 0:
        _end(pull, raw)
        return
    at = _REQUESTS + 2 * pull[NUM_UNDER_WAY]
    pull[at], pull[at + 1] = raw, nbytes
    pull[NUM_UNDER_WAY] += 1
    pull[BYTES_UNDER_WAY] += nbytes


@helper
def _post_runs(context, pull):
    """Post gets while there are runs and room; whether one was posted."""
    for posted in range(MAX_POSTED):
        if (
            pull[NEXT_RUN] == pull[NUM_RUNS]
            or pull[NUM_UNDER_WAY] == MAX_UNDER_WAY
            or pull[BYTES_UNDER_WAY] >= MAX_BYTES_UNDER_WAY
            or pull[ERROR]
        ):
            return posted > 0
        at = _RUNS + RUN_FIELDS * pull[NEXT_RUN]
        done = pull[NEXT_BYTE]
        nbytes = min(pull[at + 2] - done, MAX_GET_BYTES)
        _post(context, pull, pull[at] + done, pull[at + 1] + done, nbytes, pull[at + 3])
        pull[NEXT_BYTE] += nbytes
        if pull[NEXT_BYTE] == pull[at + 2]:
            pull[NEXT_BYTE] = 0
            pull[NEXT_RUN] += 1
    return True


@helper
def _look(context, pull, bucket_here):
    """Ask for the bucket, or for nothing if there is no board."""
    if pull[BUCKET]:
        # what was found before is no answer
        for at in range(bucket_here, bucket_here + BUCKET_BYTES, 8):
            store(at, 0)
        _post(context, pull, pull[BUCKET], bucket_here, BUCKET_BYTES, pull[BUCKET_KEY])


@helper
def _is_there(pull, bucket_here):
    return pull[BUCKET] == 0 or is_published(
        bucket_here, pull[LEASE], pull[LEASE + 1], pull[TOKEN_STOP]
    )


@helper
def _next_stage(context, pull, bucket_here):
    """Go on, nothing being under way: `MORE`, or how the pull ends."""
    if pull[STAGE] == _NEW:
        pull[STAGE] = _LOOKING
        _look(context, pull, bucket_here)
    elif pull[STAGE] == _LOOKING:
        if not _is_there(pull, bucket_here):
            return NOT_PUBLISHED
        pull[STAGE] = _READING
    elif pull[STAGE] == _LOOKING_AGAIN:
        return ALL if _is_there(pull, bucket_here) else RETRACTED
    elif pull[NEXT_RUN] == pull[NUM_RUNS]:
        pull[STAGE] = _LOOKING_AGAIN
        _look(context, pull, bucket_here)
    return MORE


@helper
def _advance(context, pull, bucket_here):
    moved = _retire(context, pull)
    if pull[STAGE] == _READING and pull[ERROR] == 0:
        moved = _post_runs(context, pull) or moved
    if pull[NUM_UNDER_WAY]:
        return MORE if moved else BUSY
    if pull[ERROR]:
        return pull[ERROR]
    return _next_stage(context, pull, bucket_here)


def _make(sources_hash):
    def read(context_address, pull_address, fence, fence_value):
        context = carray(pointer(context_address), (CONTEXT_FIELDS,))
        context[_BUILD] = sources_hash
        num_runs = load(pull_address + NUM_RUNS * 8)
        pull = carray(pointer(pull_address), (_RUNS + num_runs * RUN_FIELDS,))
        status = _advance(context, pull, pull_address + BUCKET_HERE * 8)
        if status not in (MORE, BUSY):
            store_flag(fence, fence_value)
        return status

    return read


def _make_stop(sources_hash):
    def stop(context_address, pull_address):
        context = carray(pointer(context_address), (CONTEXT_FIELDS,))
        context[_BUILD] = sources_hash
        pull = carray(pointer(pull_address), (_RUNS,))
        _retire(context, pull)
        return pull[NUM_UNDER_WAY]

    return stop


@cache
def compile_gets() -> tuple[Any, Any]:
    """The compiled functions that read and stop; `address` is where one is, for as long as the object lives. See
    `records.PULL` and `records.PULL_STOP`.
    """
    compile_one = partial(cfunc, nopython=True, cache=True)
    return (
        compile_one(types.int64(*[types.int64] * 4))(_make(SOURCES_HASH)),
        compile_one(types.int64(*[types.int64] * 2))(_make_stop(SOURCES_HASH)),
    )


def make_pull(runs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A pull of `runs`, int64 `[num_runs, 4]`, of at least a byte each, without a lease. The caller sets its fields."""
    row = np.zeros(_RUNS + runs.size, np.int64)
    row[NUM_RUNS] = len(runs)
    row[_RUNS:] = runs.reshape(-1)
    return row
