"""Memory that a producer worker shares with the consumers on its host: an unnamed file, which both sides map.

The file begins with a page that holds a nonce and the epoch, then the lease board, then the caches of a worker on the
CPU. These stay at their addresses: their pages are replaced by pages of the file with the same content.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from kvconnector.datapath.direct.descriptor_socket import DescriptorServer, Segments
from kvconnector.errors import TransportError
from kvconnector.wire.export import BOARD_OFFSET, EPOCH_OFFSET, NONCE_BYTES, SharedRange

PAGE_BYTES = mmap.PAGESIZE
_F_SEAL_FUTURE_WRITE = 0x10
MIN_OWN_PAGES_BYTES = 32 << 20
"""Common allocators give larger allocations pages of their own: glibc's highest threshold is this, those of jemalloc,
tcmalloc and mimalloc are lower."""
_PIECE_BYTES = 64 << 20
_MAP_FIXED = 0x10
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
        _open.add(self)

    def share(self, ranges: Collection[tuple[int, int]]) -> tuple[SharedRange, ...]:
        """Move memory of this process into the file, in place. Nothing may write it meanwhile. From now on child
        processes share it and do not get copies.

        Args:
            ranges: Addresses `(start, stop)`.

        Returns:
            Where the memory is in the file.

        Raises:
            TransportError: Pages also hold other data, are registered with a device, or are already shared, by an open
                worker or with another program; or the kernel refuses.
        """
        places = []
        for start, stop in _whole_pages(ranges):
            if any(other.holds(start, stop) for other in _open):
                raise TransportError("another worker of this process shares these caches")
            places.append(SharedRange(address=start, nbytes=stop - start, offset=self._nbytes))
            self._nbytes += stop - start
        if num_pinned() > 0 or any(is_known_to_cuda(start) for start, _ in ranges):
            raise TransportError("memory of this process is registered with a device")
        self._places = places
        try:
            os.ftruncate(self.fd, self._nbytes)
            for place in places:
                self._move(place)
        except OSError as error:
            raise TransportError("the caches cannot be shared", reason=str(error)) from error
        return tuple(places)

    def holds(self, start: int, stop: int) -> bool:
        """Returns True if other processes may read memory between these addresses here."""
        return any(p.address < stop and start < p.address + p.nbytes for p in self._places)

    def is_intact(self) -> bool:
        """Returns True if what `share` moved here is still what this process has at these addresses."""
        inode, found = os.fstat(self.fd).st_ino, []
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            for line in maps:
                place, _, offset, _, number, *_ = line.split(maxsplit=5)
                if int(number) == inode:
                    start, stop = (int(edge, 16) for edge in place.split("-"))
                    found.append((start - int(offset, 16), start, stop))
        return all(
            any(
                first <= each.address and each.address + each.nbytes <= last
                for first, last in joined(
                    (start, stop)
                    for lead, start, stop in found
                    if lead == each.address - each.offset
                )
            )
            for each in self._places
        )

    @property
    def epoch(self) -> int:
        """How often the pools' memory was withdrawn."""
        return int(self._epoch[0])

    @property
    def socket_fd(self) -> int:
        """The descriptor by which processes here reach the server of `serve`; -1 if it is in a folder, or none."""
        return -1 if self._server is None else self._server.socket_fd

    def withdraw(self) -> None:
        """Let nobody read the pools' CUDA memory as theirs any more, before it is taken away. The leases on it must
        have ended.
        """
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

    def close(self) -> None:
        """Let no further process open the file. Existing mappings stay. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        fd, self.fd = self.fd, -1
        _open.discard(self)
        if fd >= 0:
            os.close(fd)

    def _move(self, place: SharedRange) -> None:
        """Move piece by piece: no more than one is in memory twice, and each is whole if the next one fails."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        for done in range(0, place.nbytes, _PIECE_BYTES):
            address, offset = place.address + done, place.offset + done
            nbytes = min(_PIECE_BYTES, place.nbytes - done)
            source = memoryview((ctypes.c_char * nbytes).from_address(address))
            while source:
                source = source[os.pwrite(self.fd, source, offset + nbytes - len(source)) :]
            found = _map()(
                address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, self.fd, offset
            )
            if found == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_open: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
"""Ranges whose caches consumers may read: if they moved again, consumers would read memory that is never written."""


def is_of_this_process(nonce: bytes) -> bool:
    """Returns True if memory that is open here has this nonce."""
    return any(each.nonce == nonce for each in _open)


def _whole_pages(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pages of these ranges, joined where they follow each other. Raises TransportError: their first or last
    page may hold something else, or another program has them.
    """
    mappings = _shared_mappings()
    starts, stops = ({each[edge] for each in mappings} for edge in (0, 1))
    pages = []
    for start, stop in joined(ranges):
        for first, last, name in mappings:
            if first < stop and start < last and name not in _MOVABLE:
                raise TransportError("the caches are shared with other programs", mapping=name)
        first, last = start - start % PAGE_BYTES, stop + -stop % PAGE_BYTES
        is_alone = (first == start or first in starts) and (last == stop or last in stops)
        if stop - start < MIN_OWN_PAGES_BYTES and not is_alone:
            raise TransportError(
                "caches that share pages with other data cannot be shared: map them (mmap), or allocate at least"
                f" {MIN_OWN_PAGES_BYTES >> 20} MiB at once",
                address=hex(start),
                nbytes=stop - start,
            )
        pages.append((first, last))
    return joined(pages)


def _shared_mappings() -> list[tuple[int, int, str]]:
    """Return start, stop and name of this process's shared mappings. No allocator hands out parts of them."""
    found = []
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            place, permissions, *_, name = line.rstrip("\n").split(maxsplit=5)
            if permissions.endswith("s"):
                start, stop = place.split("-")
                found.append((int(start, 16), int(stop, 16), name))
    return found


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
def _map() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    )
    return function
