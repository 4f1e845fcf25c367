"""A number for the sources of compiled code: numba's on-disk cache looks at the cached function's own file only.

What is kept in that cache closes over the number, which so is part of its key.
"""

from __future__ import annotations

import zlib
from pathlib import Path

_PUMP = Path(__file__).parent


def hash_sources() -> int:
    """Changes whenever a source file of the pump, or of what it calls, does."""
    found = 0
    for path in (*sorted(_PUMP.glob("*.py")), *sorted((_PUMP.parent / "relayout").glob("*.py"))):
        found = zlib.crc32(path.read_bytes(), found)
    return found


SOURCES_HASH = hash_sources()
