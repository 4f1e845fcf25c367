"""Caches that become shared in place: same addresses, same bytes, and no page with other data."""

import mmap
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.direct import shared_memory
from kvconnector.datapath.direct.shared_memory import MIN_OWN_PAGES_BYTES, SharedMemory, joined
from kvconnector.errors import TransportError

PAGE = mmap.PAGESIZE


def bounds(array):
    return array.ctypes.data, array.ctypes.data + array.nbytes


def in_pages(num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS):
    array = np.frombuffer(mmap.mmap(-1, num_bytes, flags), np.uint8)
    array[...] = random_bytes(num_bytes)
    return array


def random_bytes(count):
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


def as_peers_see(memory, place):
    with open(f"/proc/{os.getpid()}/fd/{memory.fd}", "rb") as opened:
        return np.fromfile(opened, np.uint8, place.nbytes, offset=place.offset)


@pytest.mark.parametrize("kind", ["pages", "a mapping", "private pages", "a large allocation"])
def test_shared_memory_keeps_its_address_and_shows_changes(kind):
    array = {
        "pages": lambda: in_pages(3 * PAGE),
        "a mapping": lambda: in_pages(2 * PAGE + 100),
        "private pages": lambda: in_pages(4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        "a large allocation": lambda: random_bytes(MIN_OWN_PAGES_BYTES + 100),
    }[kind]()
    before, memory = array.copy(), SharedMemory(1)
    for _ in range(2):  # a second worker may register the same caches
        (place,) = memory.share([bounds(array)])
        memory.seal()
        np.testing.assert_array_equal(array, before)
        assert place.address <= array.ctypes.data
        assert place.address + place.nbytes >= array.ctypes.data + array.nbytes
        array[-1] ^= 1
        before[-1] ^= 1
        lead = array.ctypes.data - place.address
        seen = as_peers_see(memory, place)[lead : lead + array.nbytes]
        np.testing.assert_array_equal(seen, before)
        memory.close()
        memory = SharedMemory(1)
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("start, stop", [(1, 0), (0, -1), (100, 2 * PAGE)])
def test_pages_with_other_data_are_not_shared(start, stop):
    array = in_pages(4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = array.ctypes.data
    memory = SharedMemory(1)
    with pytest.raises(TransportError, match="share pages with other data"):
        memory.share([(first + start, first + (stop if stop > 0 else array.nbytes + stop))])
    assert os.fstat(memory.fd).st_size == 2 * PAGE


def test_caches_belong_to_one_open_worker():
    """Otherwise consumers of the first worker would read memory that the engine no longer writes."""
    array, first = in_pages(PAGE), SharedMemory(1)
    (place,) = first.share([bounds(array)])
    with pytest.raises(TransportError, match="another worker"):
        SharedMemory(1).share([bounds(array)])
    array[0] ^= 1
    assert as_peers_see(first, place)[0] == array[0]


def test_memory_of_several_programs_is_refused(tmp_path):
    (tmp_path / "caches").write_bytes(bytes(PAGE))
    with open(tmp_path / "caches", "r+b") as opened:
        ours, theirs = (mmap.mmap(opened.fileno(), PAGE) for _ in range(2))
    array = np.frombuffer(ours, np.uint8)
    with pytest.raises(TransportError, match="shared with other programs"):
        SharedMemory(1).share([bounds(array)])
    theirs[0] = 7
    assert array[0] == 7


def test_a_failed_move_keeps_the_content_of_the_caches(monkeypatch):
    array = in_pages(3 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before, calls, move = array.copy(), [], shared_memory._map()

    def fails_once_moved(*arguments):
        calls.append(arguments)
        return move(*arguments) if len(calls) == 1 else move(*arguments[:4], -1, 0)

    monkeypatch.setattr(shared_memory, "_PIECE_BYTES", PAGE)
    monkeypatch.setattr(shared_memory, "_map", lambda: fails_once_moved)
    with pytest.raises(TransportError, match="cannot be shared"):
        SharedMemory(1).share([bounds(array)])
    assert len(calls) == 2
    np.testing.assert_array_equal(array, before)
    array[...] = 0
    assert not array.any()


@pytest.mark.parametrize("sign", ["num_pinned", "is_known_to_cuda"])
def test_memory_registered_with_a_device_is_not_moved(monkeypatch, sign):
    monkeypatch.setattr(shared_memory, sign, lambda *address: 4)
    with pytest.raises(TransportError, match="registered with a device"):
        SharedMemory(1).share([bounds(in_pages(PAGE))])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda p: (p[0], sum(p)))))
def test_joined_ranges_hold_the_same_bytes(ranges):
    found = joined(ranges)
    assert {b for r in ranges for b in range(*r)} == {b for r in found for b in range(*r)}
    assert all(first[1] < second[0] for first, second in pairwise(found))


def test_other_processes_cannot_write_shared_memory():
    memory = SharedMemory(1)
    memory.seal()
    opened = os.open(f"/proc/{os.getpid()}/fd/{memory.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(opened, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(opened, PAGE)
    os.close(opened)


@pytest.mark.gpu
def test_pinned_memory_is_recognised():
    import torch

    pinned = torch.zeros(MIN_OWN_PAGES_BYTES, dtype=torch.uint8, pin_memory=True)
    assert shared_memory.is_known_to_cuda(pinned.data_ptr())
    assert not shared_memory.is_known_to_cuda(in_pages(PAGE).ctypes.data)


def test_memory_that_its_owner_has_replaced_is_noticed():
    """As an engine does that gives its memory back while it sleeps."""
    arrays, memory = [in_pages(3 * PAGE) for _ in range(2)], SharedMemory(1)
    assert memory.is_intact()
    places = memory.share([bounds(array) for array in arrays])
    memory.seal()
    assert memory.is_intact()
    address = places[-1].address + PAGE
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | shared_memory._MAP_FIXED
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    assert shared_memory._map()(address, PAGE, writable, anonymous, -1, 0) == address
    assert not memory.is_intact()
    memory.close()
