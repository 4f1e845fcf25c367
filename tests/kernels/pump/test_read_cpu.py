"""Reading pools that are mapped here, piece by piece, against the oracle."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector_kernels.pump import copy_cpu
from kvconnector_kernels.pump.records import ALL, MORE
from kvconnector_kernels.relayout.sides import check_copy
from tests.kernels.relayout.pools import Pool, Window, check_copy_equals_naive, windows


class Reader:
    """Calls the compiled function as the pump does."""

    def __init__(self):
        self._compiled = copy_cpu.compile_read()
        address = self._compiled.address
        self._read = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(address)
        self._fence = np.zeros(1, np.int32)
        self.num_calls = 0

    def finish(self, read):
        """Calls until nothing is left; the last status. The fence is set then, and not before."""
        status = MORE
        while status == MORE:
            assert self._fence[0] != self.num_calls or not self.num_calls
            self.num_calls += 1
            status = self._read(0, read.ctypes.data, self._fence.ctypes.data, self.num_calls)
        assert self._fence[0] == self.num_calls
        return status

    def copy(self, src, dst, **counts_and_knobs):
        assert self.finish(make_read(src, dst, **counts_and_knobs)) == ALL


def make_read(src, dst, *, num_parts, num_heads, num_tokens, is_streamed=False):
    geometry = check_copy(
        src,
        dst,
        num_parts=num_parts,
        num_heads=num_heads,
        num_tokens=num_tokens,
        head_dim=None,
        item_size_bytes=None,
    )
    words = copy_cpu.job_of(src, dst, geometry, is_streamed=is_streamed)
    return np.array([1, 0, 0, *words], np.int64)


def check_pools(copy, src, dst, num_tokens, **knobs):
    """The first tokens of a pool, all heads of every part, to another one."""
    counts = {"num_parts": src.num_parts, "num_heads": src.num_heads, "num_tokens": num_tokens}
    check_copy_equals_naive(copy, Window(src), Window(dst), **counts, **knobs)


@given(
    st.data(),
    st.fixed_dictionaries({"head_dim": st.integers(1, 6), "item": st.sampled_from([1, 2, 4, 8])}),
    st.fixed_dictionaries(
        {
            "num_parts": st.integers(1, 3),
            "num_heads": st.integers(1, 4),
            "num_tokens": st.integers(1, 40),
        }
    ),
)
def test_any_window_equals_the_oracle(data, sizes, counts):
    src, dst = (data.draw(windows(**sizes, **counts)) for _ in range(2))
    src.pool.fill_random()
    check_copy_equals_naive(Reader().copy, src, dst, **counts)


@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 64), (64, 16)])
@pytest.mark.parametrize("orders", [("HND", "HND"), ("HND", "NHD"), ("NHD", "HND"), ("HDN", "HND")])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_large_blocks_equal_the_oracle(orders, block_sizes, is_streamed):
    src = Pool(orders[0], block_sizes[0], 256 // block_sizes[0], 4, 64).fill_random()
    dst = Pool(orders[1], block_sizes[1], 256 // block_sizes[1], 4, 64)
    check_pools(Reader().copy, src, dst, 256, is_streamed=is_streamed)


def test_control_waits_for_a_piece_only():
    """Three MiB of two parts, in pieces of one: the middle one has the end of one part and the start of the other."""
    src, dst = (Pool("NHD", 16, 48, 16, 64, 2) for _ in range(2))
    reader = Reader()
    check_pools(reader.copy, src.fill_random(), dst, 768)
    assert reader.num_calls == 3


def test_read_of_nothing_is_over_at_once():
    reader = Reader()
    assert reader.finish(np.zeros(3, np.int64)) == ALL
    assert reader.num_calls == 1
