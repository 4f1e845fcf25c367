"""Wakes a thread that waits for file descriptors, and polls descriptors without releasing the GIL: a poll takes a
microsecond, getting the GIL back can take many.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from functools import cache
from typing import Any


class Waker:
    """An event descriptor that `wake` makes readable.

    The lock keeps a late `wake` from writing to a file descriptor that `close` released and the process reused.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        """Readable from `wake` until `clear`."""
        return self._fd

    def wake(self) -> None:
        """Make `fileno` readable. No-op after `close`."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Consume every `wake` so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        with self._lock:
            if not self._closed:
                os.close(self._fd)
            self._closed = True


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Descriptors:
    """A set of file descriptors, as the one `fd` that is readable while any of them is: polling a thousand connections
    takes no longer than polling one. One thread at a time.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        self._item = _PollFd(self.fd, select.POLLIN, 0)

    def add(self, fd: int) -> None:
        """Watch one more."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Stop watching one, before it is closed."""
        self._epoll.unregister(fd)

    def is_any_readable(self) -> bool:
        """Returns True if one is readable now, or the call was interrupted."""
        return bool(_poll()(ctypes.byref(self._item), 1, 0))  # -1 if it was interrupted

    def close(self) -> None:
        self._epoll.close()


@cache
def _poll() -> Any:
    function = ctypes.PyDLL(None).poll
    function.restype = ctypes.c_int
    function.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)
    return function
