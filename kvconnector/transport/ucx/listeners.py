"""UCX's listening sockets, kept open when this process runs out of descriptors.

UCX's tcp closes a listening socket for good at the first error of accept(2), which anybody who reaches the port can
cause by connecting until the process may open no more files. From then on no peer can connect, without any message. So
libucs calls a function of ours instead of accept(2), put into its table of imported functions:

- It turns connections away, by closing them, once descriptors get scarce: a part of the limit is kept for the rest of
  the process. A peer that is turned away greets again later.
- A passing error ends that one attempt; UCX sees "nothing to accept", and the socket stays open.

Threads. accept(2) is called in UCX's own thread, without the GIL (see `native`): the function only counts. The
transport's owner reports the counters. The import stays replaced until the process ends.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import mmap
import os
import resource
import struct

from kvconnector.errors import TransportError
from kvconnector.transport.ucx.library import LinkMap, UcxLibrary, link_map_of
from kvconnector.transport.ucx.native import ACCEPT, LISTENERS_MEMORY

_logger = logging.getLogger(__name__)

WANTED_DESCRIPTORS = 65_536
"""The soft limit on open files is raised to this, as far as the hard limit allows."""
FEW_DESCRIPTORS = 4096
"""A lower limit causes a warning: each connection of UCX's takes one descriptor."""
_KEPT_FRACTION = 8
"""One descriptor in this many is reserved from connections to UCX's ports."""

# the ELF format, 64 bits
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
_SYMBOL_BYTES = 24


def find_import(library: LinkMap, function: bytes) -> int | None:
    """Return where a loaded library keeps the address of an imported function, or None if it does not import it."""
    dynamic = library.dynamic
    tags: dict[int, int] = {}
    while (entry := struct.unpack("<QQ", ctypes.string_at(dynamic, 16)))[0]:
        tags.setdefault(*entry)
        dynamic += 16
    for start, nbytes in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
        table = ctypes.string_at(tags.get(start, 0), tags.get(nbytes, 0))
        for offset, symbol_and_type, _ in struct.iter_unpack("<QQq", table):
            symbol = tags[_DT_SYMTAB] + (symbol_and_type >> 32) * _SYMBOL_BYTES
            name = ctypes.c_uint32.from_address(symbol).value
            if name and ctypes.string_at(tags[_DT_STRTAB] + name) == function:
                return int(library.base + offset)
    return None


def replace_import(place: int, function: int) -> int:
    """Let a library call `function` from now on. Returns the address that it called before. Its page stays writable."""
    page = place // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise TransportError("a page cannot be written", errno=os.strerror(ctypes.get_errno()))
    word = ctypes.c_uint64.from_address(place)
    before, word.value = word.value, function
    return before


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files as far as UCX may need and the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else 1 << 31
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class ListenerGuard:
    """Replaces accept(2) in UCX. One per process, as UCX's listeners share its descriptors."""

    def __init__(self) -> None:
        self._counters = LISTENERS_MEMORY
        self._reported = (0, 0)
        self._limit = 0
        self._is_installed = False

    def install(self, library: UcxLibrary) -> None:
        """Raise the limit on open files, and guard the listeners of its libucs, once."""
        limit = raise_descriptor_limit()
        self._counters.ceiling = limit - limit // _KEPT_FRACTION
        if limit != self._limit and limit < FEW_DESCRIPTORS:
            _logger.warning(
                "this process may open %d files: connections of more peers than that are turned away; raise the hard"
                " limit (ulimit -Hn)",
                limit,
            )
        self._limit = limit
        if self._is_installed:
            return
        self._is_installed = True
        libucs = link_map_of(library.keeping.ucs_log_push_handler)
        place = find_import(libucs, b"accept")
        if place is None:
            _logger.warning(
                "the listeners of %s are not guarded: it imports no accept", libucs.path
            )
            return
        before = replace_import(place, ACCEPT)
        # UCX's thread may run after Python, and the code that it then calls is gone
        atexit.register(replace_import, place, before)

    def report(self) -> None:
        """Log the connections turned away since the last call."""
        now = (self._counters.refused, self._counters.failed)
        if now == self._reported:
            return
        refused, failed = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        _logger.warning(
            "turned away %d connections to UCX's ports, for fewer than one in %d of the %d files that this process may"
            " open are left; %d could not be accepted at all. See who connects (ss -tnp), or raise ulimit -n",
            refused,
            _KEPT_FRACTION,
            self._limit,
            failed,
        )


LISTENERS = ListenerGuard()
