"""Waiting for a flag in memory, on a core of its own and without the GIL."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import load_flag, record_at
from kvconnector_kernels.pump.steps import NS_PER_S, now_ns


def _spin(state_address, address, limit_ns):
    state = record_at(state_address, r.STATE)
    until = now_ns(state) + limit_ns
    while load_flag(address) == 0:
        if now_ns(state) >= until:
            return False
    return True


@cache
def compile_spin() -> Any:
    """Compile the wait, without numba's on-disk cache, which would not notice changes in what it calls."""
    return njit(types.boolean(*[types.int64] * 3), nogil=True)(_spin)


class FlagWait:
    """Waits for 32-bit flags. For one thread."""

    def __init__(self) -> None:
        self._spin = compile_spin()
        self._state = np.zeros((), r.STATE)
        clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value
        assert clock is not None  # libc has it, or the line above would have raised
        self._state["clock_gettime"] = clock

    def is_set(self, address: int, timeout_s: float) -> bool:
        """Returns True if the flag at `address` is or becomes nonzero within the time."""
        return bool(self._spin(self._state.ctypes.data, address, round(timeout_s * NS_PER_S)))
