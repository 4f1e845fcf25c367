"""The wire version. A major that differs is refused before the body is decoded; fields are only ever appended.

History:
    1: first version.
"""

from __future__ import annotations

WIRE_MAJOR = 1
MAGIC = b"KVCN"
