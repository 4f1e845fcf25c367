"""UCX's log: its warnings and errors go to Python's log, folded, and end no process.

UCX logs an error of an endpoint without peer error handling at level "fatal", and its log's own handler then aborts the
process: reading the memory of a peer that was killed would take this process along. The operation returns its status
nevertheless. And anybody who reaches UCX's port can make it log: a dump and a backtrace for each message that it does
not know. So a handler on top of UCX's own takes warnings and worse, and UCX prints none of them.

Threads. UCX logs in any thread and under its locks, while a thread that holds the GIL may wait for such a lock. So the
handler is compiled (`native`): it formats the message into a ring of notes, without a lock. The transport's owner reads
them in `report`, a few times a second. Messages that come faster than the ring holds are counted, not kept.

Folding. Only a message's first line is kept: the rest may be a peer's bytes. Backtraces are dropped. A few messages per
minute and place in UCX's sources are logged, then their number.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvconnector.folded_log import FoldedLog
from kvconnector.transport.ucx.library import UcxLibrary
from kvconnector.transport.ucx.native import LOG_HANDLER, LOG_MEMORY, NUM_NOTES

_logger = logging.getLogger(__name__)

_LEAK_SOURCES = ("mpool.c", "rcache.c")
_BACKTRACE = b"ucs_log_print_backtrace"

MAX_PER_PLACE = 3
"""Messages per place in UCX's sources that are logged in a minute; the others are only counted."""


class LogGuard:
    """The handler on top of UCX's own, installed while a transport is open. UCX's log is one per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._num_read = 0
        self._ring = LOG_MEMORY
        self._library: UcxLibrary | None = None
        self._log = FoldedLog(_logger, burst=MAX_PER_PLACE)

    def acquire(self, library: UcxLibrary) -> None:
        """Install the handler, for one more user."""
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._library = library
                library.keeping.ucs_log_push_handler(LOG_HANDLER)
                # UCX may log after Python has ended.
                atexit.register(self._remove)

    def release(self) -> None:
        """Release the handler; after the last user UCX's log is its own again."""
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
            if is_last:
                atexit.unregister(self._remove)
                self._remove()
        self.report(is_last=is_last)

    def report(self, *, is_last: bool = False) -> None:
        """Log messages noted by the handler since the last call; if `is_last`, also the numbers of folded ones."""
        with self._lock:
            for source, line, text in self._take():
                place = f"UCX reports ({source}:{line})"
                self._log.warn(place, f"{place}: {text}")
            self._log.flush(is_last=is_last)

    def _take(self) -> Iterator[tuple[str, int, str]]:
        """Source file, line and first line of text of each note that was not read."""
        count = self._ring.count
        if lost := max(0, count - self._num_read - NUM_NOTES):
            self._num_read += lost
            self._log.warn("UCX", f"UCX reported {lost} messages faster than they are kept", lost)
        while self._num_read < count:
            note = self._ring.notes[self._num_read % NUM_NOTES]
            if note.number <= self._num_read:
                break  # a thread is still writing it
            self._num_read += 1
            source = os.path.basename(ctypes.string_at(note.file).decode(errors="replace"))
            is_leak = note.leaks_expected and source in _LEAK_SOURCES
            if not is_leak and ctypes.string_at(note.function) != _BACKTRACE:
                text = note.text.partition(b"\n")[0].decode(errors="replace")
                yield source, note.line, text

    @contextmanager
    def leaks_expected(self) -> Iterator[None]:
        """Keep UCX from warning, while the block destroys a worker, that requests and memory were not released. A send
        through shared memory that its peer never received goes with its worker, which is safe.
        """
        self._ring.leaks_expected += 1
        try:
            yield
        finally:
            self._ring.leaks_expected -= 1

    def _remove(self) -> None:
        if self._library is not None:
            self._library.keeping.ucs_log_pop_handler()


LOG_GUARD = LogGuard()
