"""UCX's log: what must not end the process, and what is known already.

UCX logs an error of an endpoint without peer error handling at level "fatal", and its log's own handler then
aborts the process: reading the memory of a peer on this host that was killed would take this process along. The
operation that failed returns its status all the same, so such a message is passed on to Python's log instead.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_logger = logging.getLogger(__name__)

_SONAME = "libucs.so.0"
_LEVEL_FATAL, _LEVEL_WARN = 0, 2
_STOP, _CONTINUE = 0, 1
_LEAK_SOURCES = ("mpool.c", "rcache.c")

# file, line, function, level, component, format; the va_list that follows is not touched.
_LogFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
)


class _LogGuard:
    """The handler on top of UCX's own, installed while at least one transport is open. UCX's log is one per
    process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._num_expecting_leaks = 0
        self._handler = _LogFunction(self._handle)

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                _libucs().ucs_log_push_handler(self._handler)
                # UCX may log after Python has ended.
                atexit.register(self._remove)

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                atexit.unregister(self._remove)
                self._remove()

    @contextmanager
    def leaks_expected(self) -> Iterator[None]:
        """Keep UCX from warning, while the block destroys a worker, that requests and memory were not given back.

        A send through shared memory that its peer never received cannot be taken back: it goes with its worker,
        which is safe, but UCX reports it as a leak.
        """
        self._num_expecting_leaks += 1
        try:
            yield
        finally:
            self._num_expecting_leaks -= 1

    def _remove(self) -> None:
        _libucs().ucs_log_pop_handler()

    def _handle(
        self, file: bytes, line: int, _function: bytes, level: int, _component: int, text: bytes
    ) -> int:
        source = os.path.basename(file.decode(errors="replace"))
        if level == _LEVEL_FATAL:
            words = text.decode(errors="replace")
            _logger.warning("UCX lost a peer within an operation (%s:%d: %s)", source, line, words)
            return _STOP
        if level == _LEVEL_WARN and self._num_expecting_leaks and source in _LEAK_SOURCES:
            return _STOP
        return _CONTINUE


def _libucs() -> Any:
    return ctypes.PyDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


LOG_GUARD = _LogGuard()
