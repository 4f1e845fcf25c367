"""Reading pools that are mapped here, piece by piece: jobs are those of `relayout_cpu`, which has the windows."""

import ctypes
from itertools import chain

import numpy as np

from kvconnector_kernels.pump import copy_cpu
from kvconnector_kernels.pump.records import ALL, MORE
from kvconnector_kernels.relayout.sides import check_copy
from tests.kernels.relayout.pools import Pool, Window, check_copy_equals_naive


class Reader:
    """Calls the compiled function as the pump does."""

    def __init__(self):
        self._compiled = copy_cpu.compile_read()
        address = self._compiled.address
        self._read = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(address)
        self._fence = np.zeros(1, np.int32)
        self.num_calls = 0

    def call(self, read):
        self.num_calls += 1
        return self._read(0, read.ctypes.data, self._fence.ctypes.data, self.num_calls)

    def finish(self, read):
        """Calls until nothing is left; the last status. The fence is set then, and not before."""
        status = MORE
        while status == MORE:
            assert self._fence[0] != self.num_calls or not self.num_calls
            status = self.call(read)
        assert self._fence[0] == self.num_calls
        return status

    def copy(self, src, dst, **counts):
        assert self.finish(read_of(job_of(src, dst, **counts))) == ALL


def job_of(src, dst, **counts):
    return copy_cpu.job_of(src, dst, check_copy(src, dst, **counts))


def read_of(*jobs, piece_bytes=copy_cpu.CALL_BYTES):
    return np.array([len(jobs), 0, piece_bytes, 0, *chain(*jobs)], np.int64)


def test_control_waits_for_a_piece_only():
    """Three MiB of two parts, in pieces of one: the middle one has the end of one part and the start of the other."""
    src, dst = (Pool("NHD", 16, 48, 16, 64, 2) for _ in range(2))
    reader = Reader()
    windows = Window(src.fill_random()), Window(dst)
    check_copy_equals_naive(reader.copy, *windows, num_parts=2, num_heads=16, num_tokens=768)
    assert reader.num_calls == 3


def test_read_of_nothing_is_over_at_once():
    reader = Reader()
    assert reader.finish(read_of()) == ALL
    assert reader.num_calls == 1
