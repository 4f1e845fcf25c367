"""A number for the sources of the compiled loop: numba's on-disk cache looks at the cached function's own file only."""

from __future__ import annotations

import zlib
from pathlib import Path


def hash_sources() -> int:
    """Changes whenever a source file of this package does."""
    found = 0
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found = zlib.crc32(path.read_bytes(), found)
    return found


SOURCES_HASH = hash_sources()
