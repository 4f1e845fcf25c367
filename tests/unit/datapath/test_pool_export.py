"""A worker's export for the CPU, read back from its memory as by a peer, and exports that peers refuse."""

import os

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath import Pools
from kvconnector.datapath.direct import remote_pools
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_segments import Mapping
from kvconnector.datapath.direct.export import _tables_of, export_pools
from kvconnector.datapath.direct.export_check import check_export, rows_of
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.errors import IncompatiblePeerError, RemoteProtocolError, TransportError
from kvconnector.wire.export import IpcAllocation, SharedRange
from tests.support.fakes import (
    FakeCaches,
    FakeEngine,
    FakeGroup,
    FakeModel,
    FakePart,
    attention_model,
)

MIXED = FakeModel(
    3,
    (
        FakeGroup((0, 1), (FakePart("k", 2, 8), FakePart("v", 2, 4))),
        FakeGroup((2,), (FakePart("latent", 1, 6, 1),)),
    ),
)
GPU = IpcAllocation(handle=bytes(64), address=1, nbytes=(1 << 63) - 1)


class Exported:
    """One worker that exports its pools."""

    def __init__(self, model=None, **shape):
        shape = FakeEngine("p", model or attention_model(), **shape)
        self.geometry = shape.geometry().ranks[0]
        self.caches = FakeCaches(shape, self.geometry, np.random.default_rng(0))
        self.pools = Pools(self.caches.groups(), "cpu")
        self.board = LeaseBoard()
        self.message = export_pools(self.pools, self.board)

    def changed(self, **values):
        return msgspec.structs.replace(self.message, **values)

    def with_first_table(self, **values):
        first, *rest = self.message.tables
        return self.changed(tables=(msgspec.structs.replace(first, **values), *rest))

    def with_first_row(self, column, value):
        rows = rows_of(self.message.tables[0])
        rows[0, column] = value
        return self.with_first_table(rows=rows.astype("<i8").tobytes())


@pytest.mark.parametrize("options", [{}, {"layout": "NHD"}, {"pp_size": 3}], ids=str)
def test_an_export_matches_its_geometry(options):
    """With one group, with groups and families, and with a stage that lacks a group."""
    mixed = {"model": MIXED, "block_sizes": (4, 8), "num_blocks": (8, 4)}
    worker = Exported(**(mixed | options if options else {}))
    check_export(worker.message, worker.geometry)
    assert {(t.group, t.family) for t in worker.message.tables} == set(worker.pools.tables)
    for table in worker.message.tables:
        mine = worker.pools.tables[table.group, table.family]
        np.testing.assert_array_equal(rows_of(table), mine.rows)


REFUSED = {
    "a board of three buckets": (lambda w: w.changed(num_buckets=3), "power of two"),
    "CUDA without allocations": (lambda w: w.changed(device="cuda"), "for a CUDA device"),
    "CUDA with shared pools": (
        lambda w: w.changed(device="cuda", allocations=(GPU,)),
        "for the CPU",
    ),
    "memory that is not shared": (
        lambda w: w.changed(ranges=w.message.ranges[1:]),
        "outside the memory",
    ),
    "memory that is shared twice": (lambda w: w.changed(ranges=w.message.ranges * 2), "overlap"),
    "no table": (lambda w: w.changed(tables=()), "one table per"),
    "a table twice": (lambda w: w.changed(tables=w.message.tables * 2), "one table per"),
    "another group": (lambda w: w.with_first_table(group=1), "one table per"),
    "block size": (lambda w: w.with_first_table(block_size=8), "block size"),
    "heads": (lambda w: w.with_first_table(num_heads=1), "heads"),
    "item size": (lambda w: w.with_first_table(item_size_bytes=4), "item size"),
    "no rows": (lambda w: w.with_first_table(rows=b""), "multiple of a row"),
    "half a row": (lambda w: w.with_first_table(rows=bytes(41)), "multiple of a row"),
    "one row of four": (lambda w: w.with_first_table(rows=bytes(40)), "rows, block size"),
    "address zero": (lambda w: w.with_first_row(0, 0), "outside the memory"),
    "address below zero": (lambda w: w.with_first_row(0, -8), "outside the memory"),
    "stride below zero": (lambda w: w.with_first_row(2, -1), "outside the memory"),
    "stride past all": (lambda w: w.with_first_row(1, (1 << 63) - 1), "outside the memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_export_that_contradicts_itself_or_its_geometry_is_refused(case):
    worker, (change, text) = Exported(), REFUSED[case]
    with pytest.raises((RemoteProtocolError, IncompatiblePeerError), match=text):
        check_export(change(worker), worker.geometry)


ANYWHERE = 1 << 40


def test_of_pools_that_cannot_be_mapped_nothing_stays_open(monkeypatch):
    """When this is called, the file and the producer's statm are open."""

    def fail(*_):
        raise TransportError("no GPU")

    monkeypatch.setattr(remote_pools, "map_allocations", fail)
    worker = Exported()
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="no GPU"):
        RemotePools(worker.changed(device="cuda", ranges=(), allocations=(GPU,)), "cuda:0")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_pools_that_grow_export_the_blocks_that_have_memory_in_every_part():
    shape = FakeEngine("p", attention_model(num_layers=1), num_blocks=(8,))
    caches = FakeCaches(shape, shape.geometry().ranks[0], np.random.default_rng(0))
    pools = Pools(caches.groups(), "cpu")
    k, v = sorted(pools.ranges())

    def exported(**eighths):
        halves = zip((k, v), (eighths["k"], eighths["v"]), strict=True)
        return _tables_of(
            pools, [], [Mapping(at, n * (stop - at) // 8) for (at, stop), n in halves]
        )

    for eighths, num_blocks in (
        ({"k": 8, "v": 8}, 8),
        ({"k": 8, "v": 3}, 3),
        ({"k": 1, "v": 2}, 1),
    ):
        assert [each.num_blocks for each in exported(**eighths)] == [num_blocks]
    with pytest.raises(TransportError, match="has no memory yet"):
        exported(k=8, v=0)


@given(
    st.tuples(*[st.integers(-1, 40)] * 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(-9, 9) | st.integers(0, 99), st.integers(1, 999)), max_size=2),
)
def test_a_part_is_read_only_if_each_of_its_elements_is_in_one_range(strides, num_blocks, ranges):
    worker = Exported()
    (table,) = worker.message.tables
    item = range(table.item_size_bytes)
    axes = num_blocks, table.num_heads, table.block_size, table.head_dim
    starts = np.tensordot(strides, np.indices(axes), 1).reshape(-1)
    touched = {start + byte for start in starts.tolist() for byte in item}
    places = [range(first, first + nbytes) for first, nbytes in ranges]
    is_shared = any(touched <= set(place) for place in places) and min(strides) >= 0
    rows = np.array([[ANYWHERE, *strides]] * len(rows_of(table)), "<i8").tobytes()
    first_table = worker.with_first_table(rows=rows, num_blocks=num_blocks)
    shared = [
        SharedRange(address=ANYWHERE + place.start, nbytes=len(place), offset=0) for place in places
    ]
    export = msgspec.structs.replace(first_table, ranges=tuple(shared))
    if is_shared and len(set().union(*places)) == sum(map(len, places)):
        check_export(export, worker.geometry)
    else:
        with pytest.raises(RemoteProtocolError, match=r"outside the memory|overlap"):
            check_export(export, worker.geometry)
