"""Reading pools by process_vm_readv, here from the own process: against the oracle, batch by batch, and its errors."""

import ctypes
import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector_kernels.pump import read_cpu
from kvconnector_kernels.pump.records import ALL, MORE
from kvconnector_kernels.relayout.sides import check_copy
from tests.kernels.relayout.pools import Pool, Window, check_copy_equals_naive, windows

SLOT_BYTES = 64 << 10


class Reader:
    """Calls the compiled function as the pump does."""

    def __init__(self, slot_bytes=SLOT_BYTES):
        self._slot = np.zeros(slot_bytes, np.uint8)
        self._context = read_cpu.make_context(self._slot.ctypes.data, slot_bytes)
        self._compiled = read_cpu.compile_read()
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
            status = self._read(
                self._context.ctypes.data,
                read.ctypes.data,
                self._fence.ctypes.data,
                self.num_calls,
            )
        assert self._fence[0] == self.num_calls
        return status

    def copy(self, src, dst, **counts_and_knobs):
        assert self.finish(make_read(src, dst, **counts_and_knobs)) == ALL


def make_read(src, dst, *, num_parts, num_heads, num_tokens, **knobs):
    geometry = check_copy(
        src,
        dst,
        num_parts=num_parts,
        num_heads=num_heads,
        num_tokens=num_tokens,
        head_dim=None,
        item_size_bytes=None,
    )
    return read_cpu.make_read(os.getpid(), [(src, dst, geometry)], **knobs)


def check_pools(copy, src, dst, num_tokens, **knobs):
    """The first tokens of a pool, all heads of every part, to another one."""
    counts = {"num_parts": src.num_parts, "num_heads": src.num_heads, "num_tokens": num_tokens}
    check_copy_equals_naive(copy, Window(src), Window(dst), **counts, **knobs)


def side_without_part(pool, part):
    """A pool's side whose part is at an address that is not readable."""
    side = Window(pool).side()
    rows = side.table.rows.copy()
    rows[part, 0] = 4096
    side.table.rows, side.table.rows_address = rows, rows.ctypes.data
    return side


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
@pytest.mark.parametrize("min_streamed_bytes", [0, 1 << 30])
def test_large_blocks_equal_the_oracle(orders, block_sizes, min_streamed_bytes):
    """Blocks of tens of KiB, so that copies are read to their place, and slots become full."""
    src = Pool(orders[0], block_sizes[0], 256 // block_sizes[0], 4, 64).fill_random()
    dst = Pool(orders[1], block_sizes[1], 256 // block_sizes[1], 4, 64)
    check_pools(Reader().copy, src, dst, 256, min_streamed_bytes=min_streamed_bytes)


def test_more_runs_than_one_call_takes():
    """One run a block, in shuffled order, so that no two can be joined."""
    src, dst = (Pool("NHD", 1, 3000, 1, 16, 2, 1) for _ in range(2))
    reader = Reader()
    check_pools(reader.copy, src.fill_random(), dst, 3000)
    assert reader.num_calls == 3


@pytest.mark.parametrize("orders", [("HND", "NHD"), ("NHD", "HND"), ("HDN", "NHD")])
def test_block_larger_than_the_slot_goes_through_it_in_pieces(orders):
    """Of transposed keys, whose tokens are far apart, head by head and dim by dim."""
    src, dst = (Pool(order, 64, 2, 4, 16) for order in orders)
    src.fill_random()
    check_pools(Reader(slot_bytes=512).copy, src, dst, 128)


def test_token_that_fits_no_slot_is_an_error():
    src, dst = Pool("HND", 4, 2, 4, 16).fill_random(), Pool("HDN", 4, 2, 4, 16)
    read = make_read(Window(src).side(), Window(dst).side(), num_parts=1, num_heads=4, num_tokens=8)
    assert Reader(slot_bytes=64).finish(read) == errno.ENOBUFS


def test_read_of_nothing_is_over_at_once():
    reader = Reader()
    assert reader.finish(read_cpu.make_read(os.getpid(), [])) == ALL
    assert reader.num_calls == 1


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_address_that_is_not_readable(order):
    src, dst = Pool("HND", 4), Pool(order, 4)
    there, here = side_without_part(src, 0), Window(dst).side()
    read = make_read(there, here, num_parts=1, num_heads=4, num_tokens=8)
    assert Reader().finish(read) == errno.EFAULT
