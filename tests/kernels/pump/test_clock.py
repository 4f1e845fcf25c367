"""The clock in compiled code."""

import ctypes

import numpy as np
from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import record_at
from kvconnector_kernels.pump.steps import now_ns


def test_threads_read_the_clock_independently():
    read = njit(lambda address: now_ns(record_at(address, r.STATE)))
    state = np.zeros((), r.STATE)
    times = iter([7, 8])
    found = []

    def clock(kind, timespec):
        timespec.contents[:] = [next(times), 0]
        if not found:
            found.append(0)  # another read comes between the call and the read of its result
            found[0] = read(state.ctypes.data)
        return 0

    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2))
    function = prototype(clock)
    address = ctypes.cast(function, ctypes.c_void_p).value
    state["clock_gettime"] = address
    assert read(state.ctypes.data) == 7 * 10**9
    assert found == [8 * 10**9]
