"""Looking at file descriptors without giving up the GIL: a look takes a microsecond, getting it back can take many."""

from __future__ import annotations

import ctypes
import select
from collections.abc import Sequence
from functools import cache
from typing import Any

_INTERRUPTED = -1


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Descriptors:
    """Some file descriptors. One thread at a time."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        self._items = (_PollFd * len(self.fds))(*(_PollFd(fd, select.POLLIN, 0) for fd in self.fds))

    def is_any_readable(self) -> bool:
        """Whether one is readable now, or there was no telling."""
        found = int(_poll()(self._items, len(self.fds), 0))
        return found > 0 or found == _INTERRUPTED


@cache
def _poll() -> Any:
    function = ctypes.PyDLL(None).poll
    function.restype = ctypes.c_int
    function.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)
    return function
