"""Reading pools by process_vm_readv, here from the own process: against the oracle, batch by batch, and its errors."""

from __future__ import annotations

import ctypes
import errno
import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector_kernels.pump import read_cpu
from kvconnector_kernels.pump.read_threads import ReadThreads
from kvconnector_kernels.pump.records import ALL, BUSY, MORE
from kvconnector_kernels.relayout import TokenRuns
from kvconnector_kernels.relayout.runs import ADJACENT
from kvconnector_kernels.relayout.sides import check_copy
from tests.kernels.relayout.pools import (
    Pool,
    Window,
    check_copy_equals_naive,
    expected_buffer,
    untouched_like,
)

SLOT_BYTES = 64 << 10
DEADLINE_S = 60.0
ORDERS = ("HND", "NHD", "HDN")
# what cuts even small reads into many pieces
CUT = {"min_shared_bytes": 1, "piece_bytes": 100}


class Reader:
    """Calls the compiled functions as the pump does."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, num_threads: int = 1) -> None:
        self.threads = ReadThreads(num_threads, slot_bytes)
        self.threads.start()
        self._read, self._stop = (
            ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(function)
            for function, count in (
                (self.threads.function, 4),
                (self.threads.stop_function, 2),
            )
        )
        self._fence = np.zeros(1, np.int32)
        self.num_calls = 0

    def call(self, pull) -> int:
        self.num_calls += 1
        return self._read(
            self.threads.context, pull.ctypes.data, self._fence.ctypes.data, self.num_calls
        )

    def stop(self, pull) -> None:
        """As the pump waits for a stopped pull."""
        until = time.monotonic() + DEADLINE_S
        while self._stop(self.threads.context, pull.ctypes.data):
            assert time.monotonic() < until

    def finish(self, pull) -> int:
        """Calls until nothing is left; the last status. The fence is set then, and not before."""
        until = time.monotonic() + DEADLINE_S
        while (status := self.call(pull)) in (MORE, BUSY):
            assert self._fence[0] != self.num_calls
            assert time.monotonic() < until
        assert self._fence[0] == self.num_calls
        return status

    def copy(self, src, dst, **counts_and_knobs) -> None:
        pull = make_pull(src, dst, num_threads=self.threads.num_threads, **counts_and_knobs)
        assert self.finish(pull) == ALL


def make_pull(src, dst, *, num_parts, num_heads, num_tokens, pid=None, **knobs):
    geometry = check_copy(
        src,
        dst,
        num_parts=num_parts,
        num_heads=num_heads,
        num_tokens=num_tokens,
        head_dim=None,
        item_size_bytes=None,
    )
    return read_cpu.make_pull(pid or os.getpid(), [(src, dst, geometry)], **knobs)


def check_pools(copy, src, dst, num_tokens, **knobs):
    """The first tokens of a pool, all heads of every part, to another one."""
    counts = {"num_parts": src.num_parts, "num_heads": src.num_heads, "num_tokens": num_tokens}
    check_copy_equals_naive(copy, Window(src), Window(dst), **counts, **knobs)


def side_without_part(pool, part):
    """A pool's side whose part is at an address that is not readable."""
    side = Window(pool).side()
    rows = side.table.rows.copy()
    rows[part, 0] = 4096
    side.table.rows = rows
    return side


@st.composite
def windows(draw):
    """A window of each side, and the counts of the copy."""
    dim, item, num_heads = draw(
        st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
    )
    num_tokens, num_parts = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    sides = []
    for _ in range(2):
        block_size, start = draw(st.integers(1, 17)), draw(st.integers(0, 20))
        lead, behind = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        run, gap = draw(st.tuples(st.integers(1, 5), st.integers(0, 6)))
        runs = draw(
            st.sampled_from([ADJACENT, TokenRuns(run, run + gap, draw(st.integers(0, run - 1)))])
        )
        pool = Pool(
            draw(st.sampled_from(ORDERS)),
            block_size,
            (start + runs.offset(num_tokens)) // block_size + 1,
            lead + num_heads + behind,
            dim,
            item,
            num_parts,
            gap_items=draw(st.sampled_from([0, 0, 3, 64])),
        )
        sides.append(Window(pool, lead, start, runs))
    counts = {"num_parts": num_parts, "num_heads": num_heads, "num_tokens": num_tokens}
    return *sides, counts


@given(windows())
def test_any_window_equals_the_oracle(case) -> None:
    src, dst, counts = case
    src.pool.fill_random()
    check_copy_equals_naive(Reader().copy, src, dst, **counts)


@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 64), (64, 16)])
@pytest.mark.parametrize("orders", [("HND", "HND"), ("HND", "NHD"), ("NHD", "HND"), ("HDN", "HND")])
@pytest.mark.parametrize("min_streamed_bytes", [0, 1 << 30])
def test_large_blocks_equal_the_oracle(orders, block_sizes, min_streamed_bytes) -> None:
    """Blocks of tens of KiB, so that copies are read to their place, and slots become full."""
    src = Pool(orders[0], block_sizes[0], 256 // block_sizes[0], 4, 64).fill_random()
    dst = Pool(orders[1], block_sizes[1], 256 // block_sizes[1], 4, 64)
    check_pools(Reader().copy, src, dst, 256, min_streamed_bytes=min_streamed_bytes)


def test_more_runs_than_one_call_takes() -> None:
    """One run a block, in shuffled order, so that no two can be joined."""
    src, dst = (Pool("NHD", 1, 3000, 1, 16, 2, 1) for _ in range(2))
    reader = Reader()
    check_pools(reader.copy, src.fill_random(), dst, 3000)
    assert reader.num_calls == 3


class OrderedPool(Pool):
    """Its blocks in the order of memory."""

    def block_ids(self, seed=0):
        return np.arange(self.num_blocks, dtype=np.int32)


def test_equal_blocks_that_follow_each_other_are_one_run() -> None:
    src, dst = (OrderedPool("NHD", 16, 4096, 1, 16, 2, 1, gap_items=0) for _ in range(2))
    reader = Reader()
    check_pools(reader.copy, src.fill_random(), dst, 65536)
    assert reader.num_calls == 2  # of a MiB each: control must not wait for more


@pytest.mark.parametrize("orders", [("HND", "NHD"), ("NHD", "HND"), ("HDN", "NHD")])
def test_block_larger_than_the_slot_goes_through_it_in_pieces(orders) -> None:
    """Of transposed keys, whose tokens are far apart, head by head and dim by dim."""
    src, dst = (Pool(order, 64, 2, 4, 16) for order in orders)
    src.fill_random()
    check_pools(Reader(slot_bytes=512).copy, src, dst, 128)


def test_token_that_fits_no_slot_is_an_error() -> None:
    src, dst = Pool("HND", 4, 2, 4, 16).fill_random(), Pool("HDN", 4, 2, 4, 16)
    pull = make_pull(Window(src).side(), Window(dst).side(), num_parts=1, num_heads=4, num_tokens=8)
    assert Reader(slot_bytes=64).finish(pull) == errno.ENOBUFS


def test_several_copies_in_one_pull() -> None:
    pools = [(Pool("HND", 4).fill_random(seed), Pool("NHD", 8)) for seed in (1, 2, 3)]
    copies = []
    for src, dst in pools:
        sides = Window(src).side(), Window(dst).side()
        geometry = check_copy(
            *sides, num_parts=2, num_heads=4, num_tokens=20, head_dim=None, item_size_bytes=None
        )
        copies.append((*sides, geometry))
    reader = Reader()
    assert reader.finish(read_cpu.make_pull(os.getpid(), copies)) == ALL
    assert reader.num_calls == 3
    for src, dst in pools:
        want = expected_buffer(Window(src), Window(dst), num_heads=4, num_tokens=20)
        assert (dst.buffer == want).all()
        assert (dst.buffer != untouched_like(dst.buffer)).any()


def test_pull_of_nothing_is_over_at_once() -> None:
    reader = Reader()
    assert reader.finish(read_cpu.make_pull(os.getpid(), [])) == ALL
    assert reader.num_calls == 1


def test_process_that_is_gone() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    src, dst = Pool("HND", 4).fill_random(), Pool("HND", 4)
    pull = make_pull(
        Window(src).side(), Window(dst).side(), num_parts=1, num_heads=4, num_tokens=8, pid=child
    )
    before = dst.buffer.clone()
    assert Reader().finish(pull) == errno.ESRCH
    assert (dst.buffer == before).all()


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_address_that_is_not_readable(order: str) -> None:
    src, dst = Pool("HND", 4), Pool(order, 4)
    there, here = side_without_part(src, 0), Window(dst).side()
    pull = make_pull(there, here, num_parts=1, num_heads=4, num_tokens=8)
    assert Reader().finish(pull) == errno.EFAULT


@pytest.fixture(scope="module")
def team():
    """A reader with two threads beside the caller's."""
    reader = Reader(num_threads=3)
    yield reader
    assert reader.threads.close(DEADLINE_S)


@given(case=windows(), piece_bytes=st.integers(1, 200))
def test_any_pieces_of_any_window_equal_the_oracle(team, case, piece_bytes) -> None:
    src, dst, counts = case
    src.pool.fill_random()
    check_copy_equals_naive(
        team.copy, src, dst, **counts, min_shared_bytes=1, piece_bytes=piece_bytes
    )


@pytest.mark.parametrize("orders", [("HND", "HND"), ("HND", "NHD"), ("HDN", "HND")])
def test_shared_read_of_many_blocks_equals_the_oracle(team, orders) -> None:
    src = Pool(orders[0], 16, 256, 4, 64).fill_random()
    dst = Pool(orders[1], 64, 64, 4, 64)
    check_pools(team.copy, src, dst, 4096, min_shared_bytes=1, piece_bytes=5000)


class Shared:
    """A pull of all heads that is cut into many pieces, and what it refers to."""

    def __init__(self, src, dst, *, num_tokens) -> None:
        here, there = self.sides = Window(dst).side(), Window(src).side()
        counts = {"num_parts": 2, "num_heads": 4, "num_tokens": num_tokens}
        self.pull = make_pull(there, here, **counts, num_threads=3, **CUT)


def test_more_pulls_under_way_than_the_team_is_offered(team) -> None:
    pools = [(Pool("HND", 4, 64).fill_random(seed), Pool("NHD", 8, 32)) for seed in range(20)]
    pulls = [Shared(src, dst, num_tokens=256) for src, dst in pools]
    unfinished = pulls
    until = time.monotonic() + DEADLINE_S
    while unfinished:
        unfinished = [shared for shared in unfinished if team.call(shared.pull) != ALL]
        assert time.monotonic() < until
    for src, dst in pools:
        want = expected_buffer(Window(src), Window(dst), num_heads=4, num_tokens=256)
        assert (dst.buffer == want).all()


def test_stopped_pull_is_written_by_nobody_any_more(team) -> None:
    src, dst = Pool("HND", 4, 1024).fill_random(), Pool("NHD", 8, 512)
    shared = Shared(src, dst, num_tokens=4096)
    team.call(shared.pull)
    team.stop(shared.pull)
    dst.buffer.copy_(untouched_like(dst.buffer))
    # the team is free for another one, and has nothing left to write here
    other = Pool("NHD", 8)
    check_pools(team.copy, src, other, 24, **CUT)
    assert (dst.buffer == untouched_like(dst.buffer)).all()


def test_pull_that_is_stopped_before_its_first_call(team) -> None:
    team.stop(Shared(Pool("HND", 4), Pool("HND", 4), num_tokens=24).pull)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_error_of_any_thread_ends_a_shared_pull(team, order) -> None:
    """Only the last part is at an address that is not readable, so whoever comes there."""
    src, dst = Pool("HND", 4, 64).fill_random(), Pool(order, 4, 64)
    there, here = side_without_part(src, -1), Window(dst).side()
    counts = {"num_parts": 2, "num_heads": 4, "num_tokens": 256}
    pull = make_pull(there, here, **counts, num_threads=3, **CUT)
    assert team.finish(pull) == errno.EFAULT


def test_threads_end_in_the_middle_of_a_pull() -> None:
    reader = Reader(num_threads=2)
    src, dst = Pool("HND", 4, 1024).fill_random(), Pool("NHD", 8, 512)
    shared = Shared(src, dst, num_tokens=4096)
    reader.call(shared.pull)
    for _ in range(2):
        assert reader.threads.close(DEADLINE_S)
