"""Segments of pools: which hold a pool, how they are described and mapped, and how they pass through the socket."""

import os
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvconnector.datapath.direct import cuda_driver, cuda_segments, descriptor_socket, peer_memory
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.datapath.direct.cuda_segments import (
    Mapping,
    areas_of,
    num_blocks_inside,
    runs_of,
    segments_of,
)
from kvconnector.datapath.direct.descriptor_socket import fetch_segments
from kvconnector.datapath.direct.export import export_segments, memory_of
from kvconnector.datapath.direct.peer_memory import map_segments
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.wire.export import MAX_EXPORTED_SEGMENTS, PoolExport, SegmentRun
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.fakes import FakeClock
from tests.support.waiting import until

MiB = 1 << 20
FABRIC = 8

# -- planning, on a line of unit pages --

layouts = st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=12)
"""Pieces of addresses from 100 on: if one is mapped, and its length."""


def mappings_of(layout):
    mappings, address = [], 100
    for is_mapped, nbytes in layout:
        if is_mapped:
            mappings.append(Mapping(address, nbytes))
        address += nbytes
    return mappings, address


def naive_segments(ranges, mappings):
    """Walk each range page by page, and stop at the first that is not mapped."""
    found = set()
    for start, stop in ranges:
        for page in range(start, stop):
            (here,) = [each for each in mappings if each.address <= page < each.stop] or [None]
            if here is None:
                break
            found.add(here)
    return sorted(found, key=lambda each: each.address)


@given(st.data(), layouts)
def test_segments_are_those_of_a_walk_page_by_page(data, layout):
    mappings, stop = mappings_of(layout)
    edges = st.lists(st.integers(100, stop), min_size=2, max_size=2, unique=True).map(sorted)
    ranges = [tuple(each) for each in data.draw(st.lists(edges, max_size=5))]
    asked = []

    def segment_at(address):
        asked.append(address)
        return next((each for each in mappings if each.address <= address < each.stop), None)

    assert segments_of(ranges, segment_at) == naive_segments(ranges, mappings)
    assert len(asked) <= len(mappings) + len(ranges)  # each segment once, and each gap


@given(layouts)
def test_runs_and_areas_hold_each_segment_once_and_in_its_place(layout):
    mappings, _ = mappings_of(layout)
    runs = runs_of(mappings)
    listed = [(run.address + i * run.nbytes, run.nbytes) for run in runs for i in range(run.count)]
    assert listed == [(each.address, each.nbytes) for each in mappings]
    areas = areas_of(runs)
    placed = [
        (area.address + place.offset, place.nbytes, place.index)
        for area in areas
        for place in area.places
    ]
    assert placed == [(each.address, each.nbytes, i) for i, each in enumerate(mappings)]
    for area in areas:
        assert area.nbytes == sum(place.nbytes for place in area.places)
    # every page that follows a mapped one is in the same area
    pages = [page for each in mappings for page in range(each.address, each.stop)]
    for page, after in pairwise(pages):
        inside = [a for a in areas if a.address <= page < a.address + a.nbytes]
        assert (after == page + 1) == (after < inside[0].address + inside[0].nbytes)


def test_eighty_gigabytes_of_expandable_segments_are_one_run():
    segments = [Mapping(20 * MiB * number, 20 * MiB) for number in range(4096)]
    assert runs_of(segments) == (SegmentRun(address=0, nbytes=20 * MiB, count=4096),)


@given(
    st.tuples(*[st.integers(0, 30)] * 4),
    st.tuples(*[st.integers(1, 4)] * 4),
    st.integers(1, 4),
    st.integers(0, 60),
    st.tuples(st.integers(0, 4), st.integers(-4, 4)),
)
def test_blocks_with_memory_are_those_whose_every_byte_is_inside(strides, counts, item, at, edge):
    """The memory ends within a few bytes of a block's end."""
    (num_blocks, *others), (last, slack) = counts, edge
    end = (
        at + last * strides[0] + sum(s * (n - 1) for s, n in zip(strides[1:], others, strict=True))
    )
    room = max(0, end + item + slack - 10)
    inside = 0
    for block in range(num_blocks):
        starts = np.tensordot(strides[1:], np.indices(others), 1).reshape(-1) + block * strides[0]
        if any(at + start + item > 10 + room for start in starts.tolist()) or at < 10:
            break
        inside += 1
    found = num_blocks_inside((at, *strides), (*counts, item), [(0, 5), (10, 10 + room)])
    if at < 5:  # it may be in the other piece
        return
    assert found == inside


# -- with a driver --


@pytest.fixture
def cuda(monkeypatch):
    """A driver that all of this process uses."""
    cuda = FakeCuda()
    monkeypatch.setattr(cuda_driver, "load_libcuda", lambda *names: cuda)
    return cuda


def export_of(board, cuda, ranges, **changes):
    """Export memory as a worker with pools in these ranges would."""
    driver = CudaDriver()
    allocations, segments = memory_of(driver, ranges)
    board.memory.serve(
        changes.pop("folder", ""), lambda which: export_segments(driver, 0, segments, which)
    )
    export = PoolExport(
        pid=os.getpid(),
        fd=board.memory.fd,
        nonce=board.memory.nonce,
        num_buckets=board.num_buckets,
        device="cuda",
        tables=(),
        allocations=tuple(allocations),
        segments=runs_of(segments),
        socket_fd=board.memory.socket_fd,
        epoch=board.memory.epoch,
    )
    return replace(export, **changes)


@pytest.fixture
def board():
    board = LeaseBoard()
    yield board
    board.close()


def num_descriptors():
    """Return how many descriptors of segments are open, on either side."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # another thread has closed it
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:segment" in each for each in found)


@contextmanager
def no_descriptor_left():
    yield
    # the producer's thread may yet have to close those that it has sent
    until(lambda: not num_descriptors())


SIZES = [4 * MiB, 2 * MiB, 2 * MiB, 8 * MiB]


@pytest.mark.parametrize("in_folder", [False, True], ids=["no name", "folder"])
@pytest.mark.parametrize("types", [1, 9, FABRIC])
def test_a_consumer_maps_each_segment_at_its_place(cuda, board, tmp_path, types, in_folder):
    folder = str(tmp_path) if in_folder else ""
    there = cuda.lay_out(SIZES, types)
    theirs = dict(cuda.mapped)
    export = export_of(board, cuda, [(there + MiB, there + 15 * MiB)], folder=folder)
    with no_descriptor_left(), ExitStack() as opened:
        ((address, nbytes, offset),), how = map_segments(export, "cuda:3", folder, opened)
        assert how == ("CUDA fabric handles" if types == FABRIC else "CUDA file descriptors")
        assert (address, nbytes) == (there, sum(SIZES))
        ours = {at - offset: each for at, each in cuda.mapped.items() if at not in theirs}
        assert ours == theirs
        assert cuda.access == {(there + offset, there + offset + nbytes): 3}
        assert cuda.is_clean()
    assert cuda.mapped == theirs
    assert len(cuda.reserved) == 1
    assert cuda.is_clean()


def test_hundreds_of_segments_need_few_descriptors(cuda, board):
    there = cuda.lay_out([2 * MiB] * 300)
    export = export_of(board, cuda, [(there, there + 600 * MiB)])
    most = 0
    import_one = cuda.cuMemImportFromShareableHandle

    def counting(*arguments):
        nonlocal most
        most = max(most, num_descriptors())
        return import_one(*arguments)

    cuda.cuMemImportFromShareableHandle = counting
    with ExitStack() as opened:
        map_segments(export, "cuda:0", "", opened)
        assert cuda.calls["export"] == 300
    assert 0 < most <= 2 * descriptor_socket.MAX_ASKED  # of one question, on both sides


def test_a_gap_makes_two_areas(cuda, board):
    there = cuda.lay_out([2 * MiB, -2 * MiB, 4 * MiB])
    ranges = [(there, there + 2 * MiB), (there + 4 * MiB, there + 8 * MiB)]
    export = export_of(board, cuda, ranges)
    with ExitStack() as opened:
        found, _ = map_segments(export, "cuda:0", "", opened)
        assert [each[:2] for each in found] == [(there, 2 * MiB), (there + 4 * MiB, 4 * MiB)]


def test_pools_with_and_without_an_ipc_handle(cuda):
    usual, segmented = cuda.allocate_legacy(8 * MiB), cuda.lay_out([2 * MiB])
    ranges = [(usual, usual + MiB), (segmented, segmented + MiB), (usual + MiB, usual + 2 * MiB)]
    allocations, segments = memory_of(CudaDriver(), ranges)
    assert [(each.address, each.nbytes) for each in allocations] == [(usual, 8 * MiB)]
    assert segments == [Mapping(segmented, 2 * MiB)]


def test_memory_without_any_handle_is_refused_by_name(cuda):
    there = cuda.lay_out([2 * MiB], 0)
    with pytest.raises(TransportError, match="for this process alone"):
        memory_of(CudaDriver(), [(there, there + MiB)])
    nowhere = cuda.lay_out([-2 * MiB])
    with pytest.raises(TransportError, match="does not know an address"):
        memory_of(CudaDriver(), [(nowhere, nowhere + MiB)])
    assert cuda.is_clean()


def test_memory_that_is_mapped_twice_is_refused(cuda):
    there = cuda.lay_out([2 * MiB, 2 * MiB])
    cuda.mapped[there + 2 * MiB] = cuda.mapped[there]
    with pytest.raises(TransportError, match="same memory is mapped at two places"):
        memory_of(CudaDriver(), [(there, there + 4 * MiB)])
    assert cuda.is_clean()


def test_withdrawn_memory_is_given_to_nobody(cuda, board):
    there = cuda.lay_out(SIZES)
    export = export_of(board, cuda, [(there, there + MiB)])
    board.memory.withdraw()
    with pytest.raises(TransportError, match="withdrawn"), ExitStack() as opened:
        map_segments(export, "cuda:0", "", opened)
    again = export_of(board, cuda, [(there, there + MiB)])
    assert again.epoch == export.epoch + 1
    with pytest.raises(TransportError, match="withdrawn"), ExitStack() as opened:
        map_segments(export, "cuda:0", "", opened)
    with ExitStack() as opened:
        map_segments(again, "cuda:0", "", opened)
    assert len(cuda.reserved) == 1


def test_memory_that_goes_while_it_is_mapped_is_undone(cuda, board):
    there = cuda.lay_out([2 * MiB] * 40)
    export = export_of(board, cuda, [(there, there + 80 * MiB)])
    unmap_last = cuda.cuMemAddressReserve

    def reserve(*arguments):
        del cuda.mapped[there + 78 * MiB]
        return unmap_last(*arguments)

    cuda.cuMemAddressReserve = reserve
    with (
        no_descriptor_left(),
        pytest.raises(TransportError, match="does not share"),
        ExitStack() as opened,
    ):
        map_segments(export, "cuda:0", "", opened)
    assert len(cuda.mapped) == 39
    assert len(cuda.reserved) == 1
    assert cuda.is_clean()


def test_a_segment_of_another_size_is_refused_and_undone(cuda, board):
    there = cuda.lay_out([2 * MiB, 2 * MiB])
    export = export_of(board, cuda, [(there, there + 4 * MiB)])
    wrong = replace(export, segments=(replace(export.segments[0], nbytes=4 * MiB),))
    with (
        no_descriptor_left(),
        pytest.raises(TransportError, match="cannot be mapped"),
        ExitStack() as opened,
    ):
        map_segments(wrong, "cuda:0", "", opened)
    assert len(cuda.mapped) == 2
    assert len(cuda.reserved) == 1
    assert cuda.is_clean()


def test_memory_that_takes_too_long_to_map_is_left_and_undone(cuda, board, monkeypatch):
    there = cuda.lay_out([2 * MiB] * 200)
    export = export_of(board, cuda, [(there, there + 400 * MiB)])
    clock = FakeClock()
    monkeypatch.setattr(peer_memory, "time", SimpleNamespace(monotonic=clock))
    import_one = cuda.cuMemImportFromShareableHandle

    def slowly(*arguments):
        clock.advance(peer_memory.MAP_LIMIT_S / 100)
        return import_one(*arguments)

    cuda.cuMemImportFromShareableHandle = slowly
    with (
        no_descriptor_left(),
        pytest.raises(TransportError, match="too long"),
        ExitStack() as opened,
    ):
        map_segments(export, "cuda:0", "", opened)
    assert cuda.calls["export"] == 2 * descriptor_socket.MAX_ASKED
    assert len(cuda.mapped) == 200
    assert len(cuda.reserved) == 1
    assert cuda.is_clean()


def test_more_segments_than_can_be_mapped_in_time_are_neither_exported_nor_asked_for(
    cuda, board, monkeypatch
):
    there = cuda.lay_out([2 * MiB] * 5)
    ranges = [(there, there + 10 * MiB)]
    export = export_of(board, cuda, ranges)
    monkeypatch.setattr(cuda_segments, "MAX_MAPPED_SEGMENTS", 4)
    with pytest.raises(TransportError, match="allocate it in larger pieces") as refused:
        memory_of(CudaDriver(), ranges)
    assert refused.value.context == {"segments": 5, "most": 4}
    with (
        no_descriptor_left(),
        pytest.raises(TransportError, match="too many segments"),
        ExitStack() as opened,
    ):
        map_segments(export, "cuda:0", "", opened)
    assert not cuda.calls["export"]
    assert len(cuda.reserved) == 1  # of the producer
    monkeypatch.setattr(cuda_segments, "MAX_MAPPED_SEGMENTS", 5)
    with ExitStack() as opened:
        (area,), _ = map_segments(export_of(board, cuda, ranges), "cuda:0", "", opened)
    assert area[:2] == (there, 10 * MiB)


def test_another_gpu_that_cannot_be_reached_is_refused_and_undone(cuda, board):
    there = cuda.lay_out(SIZES)
    export = export_of(board, cuda, [(there, there + MiB)])
    cuda.cuMemSetAccess = lambda *arguments: fake_cuda.INVALID_VALUE
    with pytest.raises(TransportError, match="cannot reach"), ExitStack() as opened:
        map_segments(export, "cuda:0", "", opened)
    assert len(cuda.mapped) == len(SIZES)
    assert len(cuda.reserved) == 1


def test_questions_that_make_no_sense_are_refused(cuda, board):
    there = cuda.lay_out([2 * MiB] * 3)
    export = export_of(board, cuda, [(there, there + 6 * MiB)])
    place = f"/proc/{os.getpid()}/fd/{export.socket_fd}"
    for which, why in (
        (range(1, 4), "fewer segments"),
        (range(descriptor_socket.MAX_ASKED + 1), "too many"),
    ):
        with no_descriptor_left(), pytest.raises(TransportError, match=why):
            fetch_segments(place, export.nonce, export.epoch, which)
    with no_descriptor_left(), pytest.raises(TransportError, match="does not give out its memory"):
        fetch_segments(place, bytes(16), export.epoch, range(1))
    board.close()
    with pytest.raises((PeerLostError, TransportError)):
        fetch_segments(place, export.nonce, export.epoch, range(1))


def test_a_socket_without_a_folder_leaves_no_file(cuda, board, tmp_path, monkeypatch):
    monkeypatch.setattr(descriptor_socket.tempfile, "tempdir", str(tmp_path))
    there = cuda.lay_out(SIZES)
    export_of(board, cuda, [(there, there + MiB)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "supported,kinds",
    [
        ({103}, ["file descriptors"]),
        ({103, 128}, ["file descriptors", "fabric handles"]),
        (set(), []),
    ],
)
def test_a_gpu_tells_by_what_its_memory_can_be_shared(cuda, supported, kinds):
    def attribute_of(value, attribute, device):
        if attribute == 128 and 128 not in supported:
            return fake_cuda.INVALID_VALUE  # an older driver
        value._obj.value = attribute in supported
        return fake_cuda.OK

    cuda.cuDeviceGetAttribute = attribute_of
    assert CudaDriver().handle_kinds(0) == kinds


@pytest.mark.parametrize("count", [MAX_EXPORTED_SEGMENTS // 2 + 1])
def test_an_export_of_too_many_segments_is_refused(count):
    from kvconnector.datapath.direct.export_check import check_export
    from kvconnector.errors import RemoteProtocolError

    run = SegmentRun(address=1, nbytes=1, count=count)
    export = PoolExport(
        pid=1,
        fd=0,
        nonce=bytes(16),
        num_buckets=1,
        device="cuda",
        tables=(),
        segments=(run, replace(run, address=1 << 40)),
    )
    with pytest.raises(RemoteProtocolError, match="too many segments"):
        check_export(export, None)
