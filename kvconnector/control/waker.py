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


MAX_READY = 256
"""Most descriptors that one wait returns. The others are still readable in the next one."""
_MAX_MS = (1 << 31) - 1
# struct epoll_event, which the kernel packs on x86-64 alone. Descriptors are the 32 bits after `events`, or after a gap
_IS_PACKED = os.uname().machine == "x86_64"
_WORDS, _FD = (3, 1) if _IS_PACKED else (4, 2)


class Descriptors:
    """A set of file descriptors, as the one `fd` that is readable while any of them is: a wait costs as much as there
    are readable ones, no matter how many there are. One thread at a time.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        self._ready = (ctypes.c_int * (_WORDS * MAX_READY))()

    def add(self, fd: int) -> None:
        """Watch one more."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Stop watching one, before it is closed."""
        self._epoll.unregister(fd)

    def wait(self, timeout_ms: int) -> list[int]:
        """Return descriptors that are readable, at most `MAX_READY`, as soon as there are some; none if the time is
        over or the wait was interrupted. Without a wait it keeps the GIL.
        """
        releasing, keeping = _functions()
        function = releasing if timeout_ms else keeping
        count = function(self.fd, self._ready, MAX_READY, min(timeout_ms, _MAX_MS))
        # all at once: attributes of C structs take longer; -1 if it was interrupted
        return self._ready[_FD : _WORDS * count : _WORDS] if count > 0 else []

    def close(self) -> None:
        self._epoll.close()


@cache
def _functions() -> tuple[Any, Any]:
    """Return epoll_wait as a caller sees it that releases the GIL, and as one that keeps it."""
    found = ctypes.CDLL(None).epoll_wait, ctypes.PyDLL(None).epoll_wait
    for function in found:
        function.restype = ctypes.c_int
        function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return found
