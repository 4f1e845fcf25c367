"""Memory that a producer worker shares with the consumers on its host: an unnamed file, which both sides map.

The file begins with a page that holds a nonce and the epoch, then the lease board, then the caches of a worker on the
CPU. These stay at their addresses: their pages are replaced by pages of the file with the same content.

*Whose pages.* A page of the file is one memory for this process and for every child that it forks. With anything else
in it than caches, such as the C library's own records of its heap, a child would overwrite its parent's. So pages are
moved only if the caches have them for themselves, and never those of a heap, whose owner gives them to other data once
the caches are freed. When a worker closes, pages that were private are made private again, since an allocator may give
these, too, to other data.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kvconnector.agenda import NEVER
from kvconnector.datapath.direct.descriptor_socket import DescriptorServer, Segments
from kvconnector.errors import TransportError
from kvconnector.wire.export import BOARD_OFFSET, EPOCH_OFFSET, NONCE_BYTES, SharedRange

logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE
_F_SEAL_FUTURE_WRITE = 0x10
MIN_OWN_PAGES_BYTES = 32 << 20
"""Common allocators give larger allocations pages of their own: glibc's highest threshold is this, those of jemalloc,
tcmalloc and mimalloc are lower. But glibc takes free pages of a heap first, if there are as many in a row."""
_HEAP = "[heap]"
_HEAP_BYTES = 64 << 20
"""glibc's heaps of threads begin at multiples of this number and are no larger."""
_HEAP_INFO = struct.Struct("@4N")
"""The first fields of such a heap: the addresses of its arena and of the arena's previous heap, its bytes in use, and
the most bytes that it has had.
"""
_PIECE_BYTES = 64 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MREMAP_TO = 0x1 | 0x2  # MREMAP_MAYMOVE | MREMAP_FIXED
_CUDA_MEMORY_TYPE = 2
_MAP_FAILED = ctypes.c_void_p(-1).value
_NAME = "kvconnector"
_MOVABLE = ("/dev/zero (deleted)", f"/memfd:{_NAME} (deleted)")
"""Shared mappings that no other program has: anonymous ones, and those of earlier workers of ours."""


class SharedMemory:
    """`nbytes` of zeros, page aligned, in `array`, and the memory that `share` adds. Other processes open it by `fd`.

    Raises:
        TransportError: The kernel provides no such memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        nbytes += BOARD_OFFSET
        self._nbytes = nbytes + -nbytes % PAGE_BYTES
        self._places: list[SharedRange] = []
        self._were_private: list[SharedRange] = []
        """The parts of `_places` that were copied for child processes."""
        self._server: DescriptorServer | None = None
        try:
            self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self._nbytes)
            self._memory = mmap.mmap(self.fd, self._nbytes)
        except OSError as error:
            raise TransportError("no memory can be shared", reason=str(error)) from error
        self._memory[:NONCE_BYTES] = self.nonce
        self.array = np.frombuffer(self._memory, np.uint8)[BOARD_OFFSET:]
        self._epoch = np.frombuffer(self._memory, np.uint64, 1, EPOCH_OFFSET)
        with _open_lock:
            _open.add(self)

    def share(self, ranges: Collection[tuple[int, int]]) -> tuple[SharedRange, ...]:
        """Move memory of this process into the file, in place. Nothing may write to it during the call. Until `close`
        child processes share it and do not get copies, and it must not be freed.

        Args:
            ranges: Addresses `(start, stop)`.

        Returns:
            Where the memory is in the file.

        Raises:
            TransportError: Pages also hold other data, are a heap's, are registered with a device, or are already
                shared, by an open worker or with another program; or the kernel refuses.
        """
        places, mappings = [], _mappings()
        for start, stop in _whole_pages(ranges, mappings):
            if any(other.holds(start, stop) for other in _all_open()):
                raise TransportError("another worker of this process shares these caches")
            places.append(SharedRange(address=start, nbytes=stop - start, offset=self._nbytes))
            self._nbytes += stop - start
        if num_pinned() > 0 or any(is_known_to_cuda(start) for start, _ in ranges):
            raise TransportError("memory of this process is registered with a device")
        self._places = places
        private = [each for each in mappings if not each.is_shared]
        self._were_private = [
            SharedRange(address=start, nbytes=nbytes, offset=offset)
            for place in places
            for start, nbytes, offset in _common(place, private)
        ]
        try:
            os.ftruncate(self.fd, self._nbytes)
            for place in places:
                self._move(place)
        except OSError as error:
            self._make_private()
            self._places = []
            raise TransportError("the caches cannot be shared", reason=str(error)) from error
        return tuple(places)

    def holds(self, start: int, stop: int) -> bool:
        """Returns True if other processes may read memory between these addresses here."""
        return any(p.address < stop and start < p.address + p.nbytes for p in self._places)

    def is_intact(self) -> bool:
        """Returns True if this process still has at these addresses what `share` moved there."""
        mappings = self._own_mappings()
        return all(
            any(
                first <= place.address and place.address + place.nbytes <= last
                for first, last in joined((each.start, each.stop) for each in _at(place, mappings))
            )
            for place in self._places
        )

    def _own_mappings(self) -> list[_Mapping]:
        """Return where this process has mapped the file and shares it."""
        inode = os.fstat(self.fd).st_ino
        return [each for each in _mappings() if each.inode == inode and each.is_shared]

    @property
    def epoch(self) -> int:
        """How often the pools' memory was withdrawn."""
        return int(self._epoch[0])

    @property
    def socket_fd(self) -> int:
        """The descriptor by which processes here reach the server of `serve`; -1 if it is in a folder, or none."""
        return -1 if self._server is None else self._server.socket_fd

    def withdraw(self) -> None:
        """Invalidate all mappings of the pools' CUDA memory before it goes away. The leases on it must have ended."""
        self._epoch[0] += 1  # one store of a word: readers look at it after the lease
        if self._server is not None:
            self._server.segments = None

    def seal(self) -> None:
        """Fix the file's size, and let the kernel keep others from writing it. Idempotent."""
        if fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
            return
        with suppress(OSError):  # older kernels do not know it
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)

    def serve(self, folder: str, segments: Segments | None = None) -> None:
        """Let processes that see `folder` open the file, too, and fetch handles of CUDA memory. A further call only
        replaces these.

        Args:
            folder: The folder; empty for processes that see this one in /proc.
            segments: Returns handles by the numbers of segments; called in a thread of its own.

        Raises:
            ConfigError: the folder cannot be used.
            TransportError: there is no folder for temporary files.
        """
        if self._server is None:
            self._server = DescriptorServer(folder, self.fd, self.nonce)
        self._server.segments = None if segments is None else (self.epoch, segments)

    def close(self, until_s: float = NEVER) -> None:
        """Stop other processes from opening the file, and make the memory that `share` moved private to this process
        again. Existing mappings of other processes keep the content that it had at that time. Waits until `until_s`
        at the latest for a process that is being served. Idempotent.
        """
        server, self._server = self._server, None
        if server is not None:
            server.close(until_s)
        if self.fd >= 0:
            self._make_private()
        fd, self.fd = self.fd, -1
        with _open_lock:
            _open.discard(self)
        if fd >= 0:
            os.close(fd)

    def _make_private(self) -> None:
        """Map the pages that were private before `share` privately: nothing is copied until it is written."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        functions, mappings = _functions(), self._own_mappings()
        for place in self._were_private:
            # memory that the engine has replaced in the meantime is not ours
            for start, nbytes, offset in _common(place, _at(place, mappings)):
                flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
                # the mapping is made elsewhere first, because a mapping that the kernel refuses would leave a gap
                made = functions.mmap(None, nbytes, protection, flags, self.fd, offset)
                if made != _MAP_FAILED:
                    made = functions.mremap(made, nbytes, nbytes, _MREMAP_TO, start)
                if made == _MAP_FAILED:
                    reason = os.strerror(ctypes.get_errno())
                    logger.warning(
                        "child processes share the caches' memory from now on: %s", reason
                    )
        self._were_private = []

    def _move(self, place: SharedRange) -> None:
        """Move memory piece by piece, so that only one piece is in memory twice at a time, and each piece is complete
        if the next one fails.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        for done in range(0, place.nbytes, _PIECE_BYTES):
            address, offset = place.address + done, place.offset + done
            nbytes = min(_PIECE_BYTES, place.nbytes - done)
            source = memoryview((ctypes.c_char * nbytes).from_address(address))
            while source:
                source = source[os.pwrite(self.fd, source, offset + nbytes - len(source)) :]
            flags = mmap.MAP_SHARED | _MAP_FIXED
            found = _functions().mmap(address, nbytes, protection, flags, self.fd, offset)
            if found == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_open: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
"""Ranges whose caches consumers may read: if they moved again, consumers would read memory that is never written."""
_open_lock = threading.Lock()
"""Workers of one process open and close theirs in different threads."""


def _all_open() -> list[SharedMemory]:
    with _open_lock:
        return list(_open)


def is_of_this_process(nonce: bytes) -> bool:
    """Returns True if memory that is open here has this nonce."""
    return any(each.nonce == nonce for each in _all_open())


class _Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    stop: int
    permissions: str
    offset: int
    inode: int
    name: str

    @property
    def is_shared(self) -> bool:
        """Returns True if child processes get no copies. No allocator hands out parts of it."""
        return self.permissions.endswith("s")

    def overlaps(self, start: int, stop: int) -> bool:
        """Returns True if some of it is between these addresses."""
        return self.start < stop and start < self.stop


def _mappings() -> list[_Mapping]:
    """Return this process's mappings, in ascending order."""
    found = []
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            place, permissions, offset, _, inode, *name = line.rstrip("\n").split(maxsplit=5)
            start, stop = (int(edge, 16) for edge in place.split("-"))
            found.append(
                _Mapping(start, stop, permissions, int(offset, 16), int(inode), "".join(name))
            )
    return found


def _at(place: SharedRange, mappings: Iterable[_Mapping]) -> list[_Mapping]:
    """Return those mappings of a file that have a place of it at its address."""
    return [each for each in mappings if each.start - each.offset == place.address - place.offset]


def _common(place: SharedRange, mappings: Iterable[_Mapping]) -> Iterator[tuple[int, int, int]]:
    """Yield the intersections of a place with mappings: address, number of bytes, and offset in the file."""
    for each in mappings:
        start = max(each.start, place.address)
        nbytes = min(each.stop, place.address + place.nbytes) - start
        if nbytes > 0:
            yield start, nbytes, place.offset + start - place.address


def _whole_pages(
    ranges: Iterable[tuple[int, int]], mappings: Sequence[_Mapping]
) -> list[tuple[int, int]]:
    """Return the pages of these ranges, joining adjacent ones. Raises TransportError: their first or last page may hold
    something else, they are a heap's, or another program has them.
    """
    shared = [each for each in mappings if each.is_shared]
    starts, stops = {each.start for each in shared}, {each.stop for each in shared}
    pages = []
    for start, stop in joined(ranges):
        for each in shared:
            if each.overlaps(start, stop) and each.name not in _MOVABLE:
                raise TransportError("the caches are shared with other programs", mapping=each.name)
        first, last = start - start % PAGE_BYTES, stop + -stop % PAGE_BYTES
        is_alone = (first == start or first in starts) and (last == stop or last in stops)
        place = {"address": hex(start), "nbytes": stop - start}
        if stop - start < MIN_OWN_PAGES_BYTES and not is_alone:
            raise TransportError(
                "caches that share pages with other data cannot be shared: map them (mmap), or allocate at least"
                f" {MIN_OWN_PAGES_BYTES >> 20} MiB at once",
                **place,
            )
        if _has_jemalloc() and any(not m.is_shared and m.overlaps(first, last) for m in mappings):
            raise TransportError(
                "caches from jemalloc cannot be shared, since it expects pages to read as zeros once it has"
                " given them"
                " back: map them (mmap, MAP_SHARED)",
                **place,
            )
        if not _has_tcmalloc() and _is_in_heap(first, last, mappings):
            raise TransportError(
                "caches in the C library's heap cannot be shared, since it gives their pages to other data later: map"
                " them (mmap)",
                **place,
            )
        pages.append((first, last))
    return joined(pages)


@cache
def _has_jemalloc() -> bool:
    """Returns True if this process allocates by jemalloc. It does not clear pages that it has given back (madvise), but
    private pages of a file then have the file's content again. tcmalloc and mimalloc clear them.
    """
    return hasattr(_functions(), "mallctl")


@cache
def _has_tcmalloc() -> bool:
    """Returns True if this process allocates by tcmalloc. It may have pages of the kernel's heap, too, but gives a page
    to one large allocation at a time.
    """
    return hasattr(_functions(), "tc_malloc")


def _is_in_heap(first: int, last: int, mappings: Iterable[_Mapping]) -> bool:
    """Returns True if pages are in glibc's heap, or in one of its heaps for threads."""
    if any(each.name == _HEAP and each.overlaps(first, last) for each in mappings):
        return True
    base = first - first % _HEAP_BYTES
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            words = os.pread(memory.fileno(), _HEAP_INFO.size, base)
    except OSError:  # nothing is mapped there
        return False
    arena, previous, used_bytes, most_bytes = _HEAP_INFO.unpack(words)
    # an arena lies in its first heap, behind what every heap begins with
    is_heap: bool = 0 < arena % _HEAP_BYTES < PAGE_BYTES and previous % _HEAP_BYTES == 0
    is_heap &= used_bytes % PAGE_BYTES == most_bytes % PAGE_BYTES == 0
    is_heap &= 0 < used_bytes <= most_bytes <= _HEAP_BYTES
    return is_heap and first - base < most_bytes


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in ascending order, with those that touch or overlap joined."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def num_pinned() -> int:
    """Return the KiB of this process that are pinned for devices, which would keep the old pages."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return sum(int(line.split()[1]) for line in status if line.startswith("VmPin:"))


def is_known_to_cuda(address: int) -> bool:
    """Returns True if an address is in memory that is registered with a GPU, counted by the kernel or not."""
    try:
        library = ctypes.PyDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # this process does not use it
        return False
    kind = ctypes.c_uint()
    status = library.cuPointerGetAttribute(
        ctypes.byref(kind), _CUDA_MEMORY_TYPE, ctypes.c_uint64(address)
    )
    return status == 0 and kind.value != 0


@cache
def _functions() -> Any:
    """Return the C library with mmap and mremap."""
    library = ctypes.CDLL(None, use_errno=True)
    size, address, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    library.mmap.restype = library.mremap.restype = address
    library.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    library.mremap.argtypes = (address, size, size, number, address)
    return library
