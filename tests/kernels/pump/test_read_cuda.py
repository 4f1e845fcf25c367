"""The order of a direct read's calls of the CUDA driver, recorded by a fake driver."""

import ctypes
from functools import partial

import pytest

from kvconnector_kernels.library import keeping
from kvconnector_kernels.pump.records import Cuda, CudaJob, CudaRead

STREAM, FENCE, FENCE_VALUE = 77, 4096, 5
INT, UNSIGNED, ADDRESS = ctypes.c_int64, ctypes.c_uint, ctypes.c_void_p
ARGUMENTS = {
    "launch_kernel": (ADDRESS, *[UNSIGNED] * 7, ADDRESS, ADDRESS, ADDRESS),
    "write_value": (ADDRESS, ctypes.c_uint64, ctypes.c_uint32, UNSIGNED),
    "memcpy_to_device": (ctypes.c_uint64, ADDRESS, ctypes.c_size_t, ADDRESS),
}


class Driver:
    """Records the calls of one read; `failing` is the number of the call that fails."""

    def __init__(self, failing=None):
        self.calls = []
        self._failing = failing
        self.context = Cuda()
        self._functions = []
        for name, arguments in ARGUMENTS.items():
            function = ctypes.CFUNCTYPE(INT, *arguments)(partial(self._take, name))
            self._functions.append(function)
            setattr(self.context, name, ctypes.cast(function, ctypes.c_void_p).value)

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
    class Found(ctypes.Structure):
        _fields_ = (("read", CudaRead), ("jobs", CudaJob * num_jobs))

    found = Found(CudaRead(num_jobs, 100, 200, 32, STREAM))
    for number, job in enumerate(found.jobs):
        job.function, job.num_programs = 1000 + number, 10 + number
        job.num_threads, job.shared_bytes, job.stream = 128, 64, STREAM
        job.num_params, job.params[:3] = 3, (number, 5, 6)
    return found


def read(driver, jobs):
    context, found = ctypes.addressof(driver.context), ctypes.addressof(jobs)
    return keeping.kvc_read_cuda(context, found, FENCE, FENCE_VALUE)


def launch(number):
    sizes = (10 + number, 1, 1, 128, 1, 1, 64)
    return ("launch_kernel", 1000 + number, *sizes, STREAM, [number, 5, 6], None)


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
