"""Waking a thread that waits for file descriptors, and looking at these without giving up the GIL: a look takes a
microsecond, getting the GIL back can take many.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any


class Waker:
    """A socket pair whose one end becomes readable by `wake`.

    The lock keeps a late `wake` from writing to a file descriptor that `close` released and the process reused.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        """Readable from `wake` until `clear`."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make `fileno` readable. A full buffer is as good as one byte. No-op after `close`."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(b"\0")

    def clear(self) -> bool:
        """Consume every `wake` so far; whether there was one."""
        woken = False
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                woken = True
        return woken

    def close(self) -> None:
        """Release both ends. Idempotent."""
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()


_INTERRUPTED = -1


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Descriptors:
    """Some file descriptors, as the one `fd` that is readable when any of them is: a look takes no longer for a
    thousand connections than for one. One thread at a time.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._epoll = select.epoll()
        for fd in fds:
            self._epoll.register(fd, select.EPOLLIN)
        self.fd = self._epoll.fileno()
        self._item = _PollFd(self.fd, select.POLLIN, 0)

    def is_any_readable(self) -> bool:
        """Whether one is readable now, or there was no telling."""
        found = int(_poll()(ctypes.byref(self._item), 1, 0))
        return found > 0 or found == _INTERRUPTED

    def close(self) -> None:
        """Give up looking."""
        self._epoll.close()


@cache
def _poll() -> Any:
    function = ctypes.PyDLL(None).poll
    function.restype = ctypes.c_int
    function.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)
    return function
