"""Safe use of numba's on-disk cache: a number for the sources of compiled code, and one process at a time.

The cache compares the cached function's own file only, so cached functions close over the number, which makes it part
of their key. Nor does the cache keep apart processes that write the same index at once.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PUMP = Path(__file__).parent
_LOCK_TIMEOUT_S, _LOCK_INTERVAL_S = 120.0, 0.01


def hash_sources() -> int:
    """Changes whenever a source file of the pump, or of what it calls, does."""
    found = 0
    for path in (*sorted(_PUMP.glob("*.py")), *sorted((_PUMP.parent / "relayout").glob("*.py"))):
        found = zlib.crc32(path.read_bytes(), found)
    return found


SOURCES_HASH = hash_sources()


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Keep other processes of this installation from compiling while the block does: they find its results in the
    cache. After two minutes, or where folders cannot be locked, the block runs anyway. Blocks do not nest.
    """
    until_s = time.monotonic() + _LOCK_TIMEOUT_S
    folder = os.open(_PUMP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            while time.monotonic() < until_s:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_INTERVAL_S)
        yield
    finally:
        with suppress(OSError):
            # a child that was forked meanwhile has the same lock
            fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)
