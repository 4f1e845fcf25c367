"""The order of a direct read's calls of the CUDA driver, recorded by a fake driver."""

import ctypes
from functools import partial

import numpy as np
import pytest

from kvconnector_kernels.pump.copy_cuda import CONTEXT, JOB, READ, compile_read

STREAM, FENCE, FENCE_VALUE = 77, 4096, 5
INT = ctypes.c_int64


class Driver:
    """Records the calls of one read; `failing` is the number of the call that fails."""

    def __init__(self, failing=None):
        self.calls = []
        self._failing = failing
        self.context = np.zeros((), CONTEXT)
        self._functions = []
        for name, count in (("launch_kernel", 11), ("write_value", 4), ("memcpy_to_device", 4)):
            function = ctypes.CFUNCTYPE(INT, *[INT] * count)(partial(self._take, name))
            self._functions.append(function)
            self.context[name] = ctypes.cast(function, ctypes.c_void_p).value

    def _take(self, name, *arguments):
        # a status has 32 bits; the upper ones are garbage
        status = (7 << 32) + (700 if len(self.calls) == self._failing else 0)
        if name == "launch_kernel":
            *sizes, pointers, extra = arguments
            addresses = (INT * 3).from_address(pointers)
            arguments = (*sizes, [INT.from_address(each).value for each in addresses], extra)
        self.calls.append((name, *arguments))
        return status


def read_of(num_jobs):
    found = np.zeros((), [("read", READ), ("jobs", JOB, (num_jobs,))])
    found["read"] = (num_jobs, 100, 200, 32, STREAM)
    jobs = found["jobs"]
    jobs["function"] = np.arange(1000, 1000 + num_jobs)
    jobs["num_programs"] = np.arange(10, 10 + num_jobs)
    jobs["num_threads"], jobs["shared_bytes"], jobs["stream"] = 128, 64, STREAM
    jobs["num_params"] = 3
    for number, job in enumerate(jobs):
        job["params"][:3] = (number, 5, 6)
    return found


def read(driver, jobs):
    compiled = compile_read()
    function = ctypes.CFUNCTYPE(INT, *[INT] * 4)(compiled.address)
    return function(driver.context.ctypes.data, jobs.ctypes.data, FENCE, FENCE_VALUE)


def launch(number):
    sizes = (10 + number, 1, 1, 128, 1, 1, 64)
    return ("launch_kernel", 1000 + number, *sizes, STREAM, [number, 5, 6], 0)


COPY = ("memcpy_to_device", 100, 200, 32, STREAM)
WRITE = ("write_value", STREAM, FENCE, FENCE_VALUE, 0)


def test_a_read_uploads_ids_then_launches_then_sets_the_flag():
    driver = Driver()
    assert read(driver, read_of(3)) == 0
    assert driver.calls == [COPY, launch(0), launch(1), launch(2), WRITE]


@pytest.mark.parametrize(
    "failing,calls",
    [(0, [COPY, WRITE]), (1, [COPY, launch(0), WRITE]), (3, [COPY, launch(0), launch(1), WRITE])],
)
def test_the_flag_is_set_after_a_failed_launch(failing, calls):
    driver = Driver(failing)
    assert read(driver, read_of(2)) == 700
    assert driver.calls == calls
