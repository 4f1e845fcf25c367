"""Wakes a thread that waits for file descriptors, from any other thread."""

from __future__ import annotations

import contextlib
import socket
import threading


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
