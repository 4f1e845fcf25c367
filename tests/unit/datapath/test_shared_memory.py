"""Caches that become shared in place: same addresses, same bytes, and no page with other data."""

import mmap
import os
import subprocess
import sys
import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.direct import shared_memory
from kvconnector.datapath.direct.shared_memory import MIN_OWN_PAGES_BYTES, SharedMemory, joined
from kvconnector.errors import TransportError
from tests.support.headers import needs_compiler

PAGE = mmap.PAGESIZE


def bounds(array):
    return array.ctypes.data, array.ctypes.data + array.nbytes


def in_pages(num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS):
    array = np.frombuffer(mmap.mmap(-1, num_bytes, flags), np.uint8)
    array[...] = random_bytes(num_bytes)
    return array


def random_bytes(count):
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


def outside_the_heap():
    """Return a large allocation that has pages of its own. Tests before this one may have left as much of a heap."""
    made = []
    while not made or shared_memory._is_in_heap(*bounds(made[-1]), shared_memory._mappings()):
        made.append(random_bytes(MIN_OWN_PAGES_BYTES))
    return made[-1]


def are_shared_with_children(array):
    """Returns True if what a child process writes there is written here, too."""
    before = array[[0, -1]].tolist()
    child = os.fork()
    if child == 0:
        array[[0, -1]] ^= 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return before != array[[0, -1]].tolist()


def as_peers_see(memory, place):
    with open(f"/proc/{os.getpid()}/fd/{memory.fd}", "rb") as opened:
        return np.fromfile(opened, np.uint8, place.nbytes, offset=place.offset)


@pytest.mark.parametrize("kind", ["pages", "a mapping", "private pages", "a large allocation"])
def test_shared_memory_keeps_its_address_and_shows_changes(kind):
    array = {
        "pages": lambda: in_pages(3 * PAGE),
        "a mapping": lambda: in_pages(2 * PAGE + 100),
        "private pages": lambda: in_pages(4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        "a large allocation": outside_the_heap,
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


def private_pages():
    return in_pages(3 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@pytest.mark.parametrize("make", [private_pages, outside_the_heap])
def test_a_closed_worker_leaves_the_caches_to_their_process_alone(make):
    """An allocator that gets them back may use them for anything, and a child process would overwrite that."""
    array, memory = make(), SharedMemory(1)
    (place,) = memory.share([bounds(array)])
    memory.seal()
    peers = mmap.mmap(memory.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    lead = array.ctypes.data - place.address + place.offset
    before = array.copy()
    memory.close()
    np.testing.assert_array_equal(array, before)
    array[0] ^= 1
    assert peers[lead] == before[0]
    assert not are_shared_with_children(array)


def test_memory_that_replaced_the_caches_is_left_alone():
    array, memory = in_pages(3 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), SharedMemory(1)
    memory.share([bounds(array)])
    address, place = array.ctypes.data, mmap.MAP_ANONYMOUS | shared_memory._MAP_FIXED
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    functions = shared_memory._functions()
    replaced = functions.mmap(address + PAGE, PAGE, writable, mmap.MAP_PRIVATE | place, -1, 0)
    assert replaced == address + PAGE
    array[...] = 7
    memory.close()
    assert (array == 7).all()
    assert not are_shared_with_children(array)


IN_A_HEAP = """
import ctypes, sys, threading
from kvconnector.datapath.direct.shared_memory import MIN_OWN_PAGES_BYTES, SharedMemory
from kvconnector.errors import TransportError

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.aligned_alloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.aligned_alloc.argtypes = [ctypes.c_size_t], [ctypes.c_size_t] * 2
libc.free.argtypes = [ctypes.c_void_p]

def large():
    # once an allocation of this size was freed, glibc takes smaller ones from the heap, and keeps what they leave
    libc.free(libc.malloc(MIN_OWN_PAGES_BYTES - (1 << 16)))
    for smaller in (libc.malloc(24 << 20), libc.malloc(24 << 20)):
        libc.free(smaller)
    return libc.malloc(MIN_OWN_PAGES_BYTES + 100), MIN_OWN_PAGES_BYTES + 100

def whole_pages():
    return libc.aligned_alloc(4096, 8192), 8192

def share():
    address, nbytes = {"large": large, "whole pages": whole_pages}[sys.argv[1]]()
    try:
        SharedMemory(1).share([(address, address + nbytes)])
    except TransportError as error:
        print(error)
    else:
        print("shared")

if sys.argv[2] == "main":
    share()
else:
    thread = threading.Thread(target=share)
    thread.start()
    thread.join()
"""


glibc = pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="of glibc's heaps")


def share_from_a_heap(kind, thread, **variables):
    command = [sys.executable, "-c", IN_A_HEAP, kind, thread]
    environment = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.stdout + done.stderr


@glibc
@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.parametrize("kind", ["large", "whole pages"])
def test_a_heap_is_not_shared(kind, thread):
    """Child processes would write into its records and what it gives the pages to: 'corrupted size vs. prev_size'."""
    assert "caches in the C library's heap cannot be shared" in share_from_a_heap(kind, thread)


@glibc
@needs_compiler
@pytest.mark.parametrize(
    "name, words",
    [("tc_malloc", "shared"), ("mallctl", "caches from jemalloc cannot be shared")],
)
def test_other_allocators_are_known_by_a_function(name, words, tmp_path):
    """tcmalloc has the kernel's heap, but no records there. jemalloc would hand out the caches' content as zeros."""
    source, library = tmp_path / "allocator.c", tmp_path / "allocator.so"
    source.write_text(f"int {name}(void) {{ return 0; }}")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    said = share_from_a_heap("whole pages", "main", LD_PRELOAD=str(library))
    assert said.startswith(words), said


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


def test_workers_of_one_process_may_open_and_close_their_memory_at_any_time():
    """One driver's thread looks whose memory an export is while another worker opens its own."""
    opened = []

    class Looked:
        @property
        def nonce(self):
            other = threading.Thread(target=lambda: opened.append(SharedMemory(1)))
            other.start()
            other.join()
            return b""

    several = [Looked(), Looked()]
    with shared_memory._open_lock:
        shared_memory._open.update(several)
    try:
        assert not shared_memory.is_of_this_process(b"another process's")
    finally:
        with shared_memory._open_lock:
            shared_memory._open.difference_update(several)
        for memory in opened:
            memory.close()
    assert len(opened) == 2


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
    before, moves, functions = array.copy(), [], shared_memory._functions()

    def fails_once_moved(*arguments):
        moves.append(arguments)
        return functions.mmap(*arguments[:4], *arguments[4:] if len(moves) == 1 else (-1, 0))

    def map_or_fail(*arguments):
        is_move = arguments[3] & mmap.MAP_SHARED
        return (fails_once_moved if is_move else functions.mmap)(*arguments)

    failing = SimpleNamespace(mmap=map_or_fail, mremap=functions.mremap)
    monkeypatch.setattr(shared_memory, "_PIECE_BYTES", PAGE)
    monkeypatch.setattr(shared_memory, "_functions", lambda: failing)
    with pytest.raises(TransportError, match="cannot be shared"):
        SharedMemory(1).share([bounds(array)])
    assert len(moves) == 2
    np.testing.assert_array_equal(array, before)
    assert not are_shared_with_children(array)
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
    assert shared_memory._functions().mmap(address, PAGE, writable, anonymous, -1, 0) == address
    assert not memory.is_intact()
    memory.close()
