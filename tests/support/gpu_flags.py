"""A kernel that runs until a test ends it, so that tests depend on the order of work on a stream and not on time.

Allocating pinned memory, registering memory and loading a kernel may wait for it: a test does that before.
"""

import time
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

MAX_LOADS = 1 << 29
"""Loads of the flag after which a kernel that is never released ends: about ten minutes."""
DEADLINE_S = 60.0
"""Within this time a stream that waits for nothing gets its turn on any GPU, also one with other processes."""


@triton.jit
def _spin(flag, max_loads):
    value = tl.load(flag, volatile=True)
    num_loads = 0
    while (value == 0) & (num_loads < max_loads):
        value = tl.load(flag, volatile=True)
        num_loads += 1


@contextmanager
def held_back(stream):
    """Hold back the work queued on `stream` after this, until the yielded function is called or the block ends."""
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    with torch.cuda.stream(stream):
        _spin[(1,)](flag, MAX_LOADS, num_warps=1)
    try:
        yield lambda: flag.fill_(1)
    finally:
        flag.fill_(1)
        stream.synchronize()


def ends(stream):
    """Wait until all work on a stream is over; False if it takes `DEADLINE_S`, as where it waits for a held one."""
    deadline = time.monotonic() + DEADLINE_S
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True
