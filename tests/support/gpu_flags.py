"""A kernel that ends when a test says so, so that what runs before and after it is a matter of order, not of time."""

from contextlib import contextmanager

import torch
import triton
import triton.language as tl

MAX_LOADS = 1 << 26
"""A kernel whose test fails to release it ends after about a minute."""


@triton.jit
def _spin(flag, max_loads):
    value = tl.load(flag, volatile=True)
    num_loads = 0
    while (value == 0) & (num_loads < max_loads):
        value = tl.load(flag, volatile=True)
        num_loads += 1


@contextmanager
def held_back(stream):
    """Whatever is queued on `stream` from here on waits until the function that this yields is called, or the end."""
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    with torch.cuda.stream(stream):
        _spin[(1,)](flag, MAX_LOADS, num_warps=1)
    try:
        yield lambda: flag.fill_(1)
    finally:
        flag.fill_(1)
        stream.synchronize()
