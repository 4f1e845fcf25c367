"""The probe of a producer's pools: what counts of repeated measurements, and what it may take."""

from __future__ import annotations

import numpy as np
import pytest

from kvconnector.cache.views import KVView
from kvconnector.datapath import CacheGroup, Pools
from kvconnector.datapath.pump.probing import (
    MAX_ROUNDS,
    MAX_SCRATCH_BYTES,
    MIN_ROUNDS,
    PROBE_S,
    fastest,
    probe_cost,
    probe_like_cost,
)
from kvconnector.errors import TransportError
from kvconnector.planning.cost import PathCost
from kvconnector.topology import GroupGeometry, PartGeometry


class Takes:
    """Measurements that come out one after the other, the last one again and again."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)
        self.count = 0

    def __call__(self):
        self.count += 1
        return self.seconds[min(self.count, len(self.seconds)) - 1]


def test_the_least_disturbed_of_many_short_copies_counts():
    measure = Takes(PROBE_S / 10, PROBE_S / 20, PROBE_S / 100, PROBE_S / 10)
    assert fastest([measure]) == [PROBE_S / 100]
    assert measure.count > MIN_ROUNDS


def test_long_copies_are_repeated_a_few_times_and_tiny_ones_not_for_ever():
    long, tiny = Takes(PROBE_S), Takes(PROBE_S / 1e6)
    assert (fastest([long]), long.count) == ([PROBE_S], MIN_ROUNDS)
    assert (fastest([tiny]), tiny.count) == ([PROBE_S / 1e6], MAX_ROUNDS)


def test_a_disturbance_that_lasts_for_some_copies_meets_all_kinds_alike():
    """The first half of all copies take ten times as long, whichever they are."""
    count = 0

    def takes(seconds):
        nonlocal count
        count += 1
        return seconds * (10 if count <= 3 * MIN_ROUNDS else 1)

    kinds = [PROBE_S / 1000, PROBE_S / 500, PROBE_S / 400]
    found = fastest([lambda seconds=seconds: takes(seconds) for seconds in kinds])
    assert found == kinds


class Remote:
    """A producer's opened pools, as far as a probe looks."""

    def __init__(self, tables):
        self.tables = tables


def pools_of(array, block_stride=None, head_stride=None):
    """Pools of one part whose blocks may be as far apart as you like: nothing here reads them."""
    _, heads, block, dim = array.shape
    strides = list(array.strides)
    strides[0], strides[1] = block_stride or strides[0], head_stride or strides[1]
    part = PartGeometry(
        name="k",
        total_heads=heads,
        head_start=0,
        head_stop=heads,
        head_dim=dim,
        item_size_bytes=array.itemsize,
    )
    view = KVView.from_strides(array.ctypes.data, array.shape, strides, array.itemsize)
    group = GroupGeometry(block_size=block, layers=(0,), parts=(part,))
    return Pools([CacheGroup(group, {0: [view]})], "cpu")


def probed(ours, theirs, seconds_of):
    copies = []

    def remember(copy):
        copies.append(copy)
        return seconds_of(copy)

    memory = np.zeros(1 << 20, np.uint8)
    cost = probe_cost(
        Remote(theirs.tables),
        ours,
        max_bytes=1 << 14,
        allocate=lambda nbytes: (memory.ctypes.data, memory[:nbytes]),
        seconds_of=remember,
    )
    return cost, copies


def test_costs_are_those_of_the_copies():
    theirs = pools_of(np.zeros((64, 2, 4, 8), np.uint16))
    true = PathCost(fixed_s=1e-4, per_byte_s=1e-9, per_run_s=1e-6)

    def seconds_of(copy):
        num_runs = int((np.diff(copy.src_ids) != 1).sum()) + 1
        return true.seconds(copy.nbytes, num_runs)

    cost, copies = probed(pools_of(np.zeros((64, 2, 4, 8), np.uint16)), theirs, seconds_of)
    assert cost.per_byte_s == pytest.approx(true.per_byte_s, rel=0.1)
    assert cost.per_run_s == pytest.approx(true.per_run_s, rel=0.1)
    assert max(copy.nbytes for copy in copies) <= 1 << 14
    assert all(copy.src_ids.max() < 64 for copy in copies)


def test_pools_like_ours_are_probed_on_memory_of_nobody():
    """No byte of the pools is read or written: an engine may fill them meanwhile."""
    ours = pools_of(np.zeros((64, 2, 4, 8), np.uint16))
    true = PathCost(fixed_s=1e-4, per_byte_s=1e-9, per_run_s=0.0)
    lent, copies = [], []

    def allocate(nbytes):
        lent.append(np.zeros(nbytes, np.uint8))
        return lent[-1].ctypes.data, lent[-1]

    def seconds_of(copy):
        copies.append(copy)
        return true.seconds(copy.nbytes, 1)

    cost = probe_like_cost(ours, max_bytes=1 << 14, allocate=allocate, seconds_of=seconds_of)
    assert cost.per_byte_s == pytest.approx(true.per_byte_s, rel=0.1)
    assert max(copy.nbytes for copy in copies) == ours.tables[0, 0].num_blocks * 2 * 4 * 8 * 2
    spans = [(memory.ctypes.data, memory.ctypes.data + memory.nbytes) for memory in lent]
    for copy in copies:
        for table, ids in ((copy.src, copy.src_ids), (copy.dst, copy.dst_ids)):
            address, block_stride = table.rows[0, :2].tolist()
            assert any(
                start <= address and address + (int(ids.max()) + 1) * block_stride <= stop
                for start, stop in spans
            )


def test_pools_whose_blocks_span_everything_are_not_probed():
    array = np.zeros((64, 2, 4, 8), np.uint16)
    wide = pools_of(array, block_stride=64, head_stride=MAX_SCRATCH_BYTES)
    with pytest.raises(TransportError, match="span too much memory"):
        probed(wide, pools_of(array), lambda copy: 1e-3)
    with pytest.raises(TransportError, match="span too much memory"):
        probe_like_cost(wide, max_bytes=1 << 14, allocate=bytes, seconds_of=lambda copy: 1e-3)
