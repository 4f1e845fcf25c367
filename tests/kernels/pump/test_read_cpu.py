"""Direct reads on the CPU, piece by piece. Jobs are those of `relayout_cpu`, whose tests cover the windows."""

import ctypes
from itertools import chain

import numpy as np
import pytest
import torch

from kvconnector_kernels.pump import copy_cpu
from kvconnector_kernels.pump.records import ALL, MORE
from kvconnector_kernels.relayout.sides import check_copy
from tests.kernels.relayout.pools import Pool, Window, check_copy_equals_naive, expected_buffer


class Reader:
    """Calls the compiled function as the loop does."""

    def __init__(self):
        self._read = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(copy_cpu.READ)
        self._fence = np.zeros(1, np.int32)
        self.num_calls = 0

    def call(self, read):
        self.num_calls += 1
        return self._read(0, read.ctypes.data, self._fence.ctypes.data, self.num_calls)

    def finish(self, read):
        """Call until nothing is left, and return the last status. The fence must be set then, not earlier."""
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


def test_a_call_copies_one_piece():
    """Three MiB of two parts take three calls; the second copies the end of one part and the start of the other."""
    src, dst = (Pool("NHD", 16, 48, 16, 64, 2) for _ in range(2))
    reader = Reader()
    windows = Window(src.fill_random()), Window(dst)
    check_copy_equals_naive(reader.copy, *windows, num_parts=2, num_heads=16, num_tokens=768)
    assert reader.num_calls == 3


@pytest.mark.parametrize(
    "piece_bytes, num_calls", [(4 << 20, 1), (copy_cpu.CALL_BYTES, 2), (1 << 14, 2), (1, 2)]
)
def test_a_call_copies_whole_jobs_up_to_a_piece(piece_bytes, num_calls):
    """Three jobs of 512 KiB. Their units of 1 KiB may be longer than a piece."""
    sides = [[Window(Pool("NHD", 16, 32, 8, 64, 2, num_parts=1)) for _ in range(2)] for _ in "abc"]
    counts = {"num_heads": 8, "num_tokens": 512}
    for seed, (src, _) in enumerate(sides):
        src.pool.fill_random(seed)
    wants = [expected_buffer(src, dst, **counts) for src, dst in sides]
    held = [[window.side() for window in pair] for pair in sides]
    reader = Reader()
    jobs = [job_of(src, dst, num_parts=1, **counts) for src, dst in held]
    read = read_of(*jobs, piece_bytes=piece_bytes)
    assert reader.call(read) == (ALL if num_calls == 1 else MORE)
    done = [torch.equal(dst.buffer, want) for (_, dst), want in zip(sides, wants, strict=True)]
    assert done == [True, True, num_calls == 1]
    if num_calls > 1:
        assert reader.finish(read) == ALL
    assert all(torch.equal(dst.buffer, want) for (_, dst), want in zip(sides, wants, strict=True))
    assert reader.num_calls == num_calls


def test_a_token_longer_than_a_piece_is_copied_alone():
    """Three tokens of a mebibyte take three calls."""
    src, dst = (Pool("NHD", 1, 3, 8, 1 << 16, 2, num_parts=1) for _ in range(2))
    reader = Reader()
    windows = Window(src.fill_random()), Window(dst)
    check_copy_equals_naive(reader.copy, *windows, num_parts=1, num_heads=8, num_tokens=3)
    assert reader.num_calls == 3


def test_a_jobs_last_piece_ends_with_the_job():
    """Two jobs of five tokens of 48 bytes each, in the first of two parts, in pieces of two tokens."""
    sides = [[Window(Pool("NHD", 4, num_heads=4)) for _ in range(2)] for _ in "ab"]
    counts = {"num_heads": 4, "num_tokens": 5}
    for seed, (src, _) in enumerate(sides):
        src.pool.fill_random(seed)
    wants = [expected_buffer(src, dst, **counts) for src, dst in sides]
    for (_, dst), want in zip(sides, wants, strict=True):
        dst.parts(want)[1].copy_(dst.parts(dst.buffer)[1])
    held = [[window.side() for window in pair] for pair in sides]
    jobs = [job_of(src, dst, num_parts=1, **counts) for src, dst in held]
    read = read_of(*jobs, piece_bytes=2 * 48)
    assert Reader().finish(read) == ALL
    assert all(torch.equal(dst.buffer, want) for (_, dst), want in zip(sides, wants, strict=True))
    assert read[1] == 6


def test_an_empty_read_ends_at_once():
    reader = Reader()
    assert reader.finish(read_of()) == ALL
    assert reader.num_calls == 1
