"""What a pull asks of the CUDA driver, and in which order: here of a driver that only writes down."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvconnector_kernels.pump import copy_cuda, read_cuda

STREAM, FENCE, FENCE_VALUE = 77, 4096, 5
INT = ctypes.c_int64


class Driver:
    """Takes the calls of one pull; `failing` names the call that fails, by its place among all."""

    def __init__(self, failing: int | None = None) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._failing = failing
        # a status is 32 bits: what is above them means nothing
        self._functions = [
            ctypes.CFUNCTYPE(INT, *[INT] * count)(function)
            for count, function in ((11, self._launch), (4, self._write), (4, self._copy))
        ]
        self.context = np.zeros(copy_cuda.CONTEXT_FIELDS, np.int64)
        for column, function in zip(
            (copy_cuda.LAUNCH_KERNEL, copy_cuda.WRITE_VALUE, copy_cuda.MEMCPY_TO_DEVICE),
            self._functions,
            strict=True,
        ):
            self.context[column] = ctypes.cast(function, ctypes.c_void_p).value or 0

    def _status(self) -> int:
        return (7 << 32) + (700 if len(self.calls) - 1 == self._failing else 0)

    def _launch(self, function: int, *rest: int) -> int:
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

    def _write(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append(("write", stream, address, value, flags))
        return self._status()

    def _copy(self, there: int, here: int, nbytes: int, stream: int) -> int:
        self.calls.append(("copy", there, here, nbytes, stream))
        return self._status()


def pull_of(num_jobs: int) -> np.ndarray:
    pull = np.zeros(read_cuda.PULL_FIELDS + num_jobs * copy_cuda.JOB_FIELDS, np.int64)
    pull[: read_cuda.PULL_FIELDS] = (num_jobs, 100, 200, 32, STREAM)
    jobs = pull[read_cuda.PULL_FIELDS :].reshape(-1, copy_cuda.JOB_FIELDS)
    for number, job in enumerate(jobs):
        job[copy_cuda.FUNCTION] = 1000 + number
        job[copy_cuda.NUM_PROGRAMS] = 10 + number
        job[copy_cuda.NUM_THREADS] = 128
        job[copy_cuda.SHARED_BYTES] = 64
        job[copy_cuda.NUM_PARAMS] = 3
        job[copy_cuda.STREAM] = STREAM
        job[copy_cuda.PARAMS : copy_cuda.PARAMS + 3] = (number, 5, 6)
    return pull


def read(driver: Driver, pull: np.ndarray) -> int:
    compiled = read_cuda.compile_read()
    function = ctypes.CFUNCTYPE(INT, *[INT] * 4)(compiled.address)
    status: int = function(driver.context.ctypes.data, pull.ctypes.data, FENCE, FENCE_VALUE)
    return status


def launch(number: int) -> tuple[object, ...]:
    return ("launch", 1000 + number, (10 + number, 1, 1), (128, 1, 1), 64, STREAM, [number, 5, 6])


COPY = ("copy", 100, 200, 32, STREAM)
WRITE = ("write", STREAM, FENCE, FENCE_VALUE, 0)


def test_ids_then_launches_then_the_flag() -> None:
    driver = Driver()
    assert read(driver, pull_of(3)) == 0
    assert driver.calls == [COPY, launch(0), launch(1), launch(2), WRITE]


@pytest.mark.parametrize(
    "failing,calls",
    [(0, [COPY, WRITE]), (1, [COPY, launch(0), WRITE]), (3, [COPY, launch(0), launch(1), WRITE])],
)
def test_flag_follows_whatever_was_launched_before_an_error(
    failing: int, calls: list[object]
) -> None:
    driver = Driver(failing)
    assert read(driver, pull_of(2)) == 700
    assert driver.calls == calls
