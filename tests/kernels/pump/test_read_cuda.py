"""What a direct read asks of the CUDA driver, and in which order: here of a driver that only writes down."""

import ctypes

import numpy as np
import pytest

from kvconnector_kernels.pump.copy_cuda import CONTEXT, JOB
from kvconnector_kernels.pump.read_cuda import READ, compile_read

STREAM, FENCE, FENCE_VALUE = 77, 4096, 5
INT = ctypes.c_int64


class Driver:
    """Takes the calls of one read; `failing` names the call that fails, by its place among all."""

    def __init__(self, failing=None):
        self.calls = []
        self._failing = failing
        # a status is 32 bits: what is above them means nothing
        self._functions = [
            ctypes.CFUNCTYPE(INT, *[INT] * count)(function)
            for count, function in ((11, self._launch), (4, self._write), (4, self._copy))
        ]
        self.context = np.zeros((), CONTEXT)
        names = ("launch_kernel", "write_value", "memcpy_to_device")
        for name, function in zip(names, self._functions, strict=True):
            self.context[name] = ctypes.cast(function, ctypes.c_void_p).value or 0

    def _status(self):
        return (7 << 32) + (700 if len(self.calls) - 1 == self._failing else 0)

    def _launch(self, function, *rest):
        grid, block, shared, stream, pointers, extra = (
            rest[:3],
            rest[3:6],
            rest[6],
            rest[7],
            rest[8],
            rest[9],
        )
        params = [
            ctypes.c_int64.from_address(address).value
            for address in (ctypes.c_int64 * 3).from_address(pointers)
        ]
        assert extra == 0
        self.calls.append(("launch", function, grid, block, shared, stream, params))
        return self._status()

    def _write(self, stream, address, value, flags):
        self.calls.append(("write", stream, address, value, flags))
        return self._status()

    def _copy(self, there, here, nbytes, stream):
        self.calls.append(("copy", there, here, nbytes, stream))
        return self._status()


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
    return ("launch", 1000 + number, (10 + number, 1, 1), (128, 1, 1), 64, STREAM, [number, 5, 6])


COPY = ("copy", 100, 200, 32, STREAM)
WRITE = ("write", STREAM, FENCE, FENCE_VALUE, 0)


def test_ids_then_launches_then_the_flag():
    driver = Driver()
    assert read(driver, read_of(3)) == 0
    assert driver.calls == [COPY, launch(0), launch(1), launch(2), WRITE]


@pytest.mark.parametrize(
    "failing,calls",
    [(0, [COPY, WRITE]), (1, [COPY, launch(0), WRITE]), (3, [COPY, launch(0), launch(1), WRITE])],
)
def test_flag_follows_whatever_was_launched_before_an_error(failing, calls):
    driver = Driver(failing)
    assert read(driver, read_of(2)) == 700
    assert driver.calls == calls
