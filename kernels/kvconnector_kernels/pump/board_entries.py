"""The entries of a lease board. kernels/native/board.c has the order in which they are written and read, and its
proof.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvconnector_kernels.library import keeping
from kvconnector_kernels.pump.records import ENTRIES_PER_BUCKET, BoardEntry

__all__ = ["ENTRIES_PER_BUCKET", "ENTRY", "ENTRY_BYTES", "claim", "clear", "look_up_lease", "write"]

ENTRY = np.dtype(BoardEntry)
ENTRY_BYTES = ctypes.sizeof(BoardEntry)

claim = keeping.kvc_board_claim
"""`claim(entry, key, expected)`: give an entry without a key to a lease, which may be read once `ready` equals
`expected`."""
clear = keeping.kvc_board_clear
"""`clear(entry)`: take the key from an entry. The blocks may be written from now on."""
write = keeping.kvc_board_write
"""`write(address, value)`: store a word of an entry. Everything before it is visible to a thread that reads it."""


def look_up_lease(board: int, num_buckets: int, key: bytes) -> tuple[int, int]:
    """Look up a lease.

    Args:
        board: Address of the first entry.
        num_buckets: Number of buckets, a power of two.
        key: 16 bytes, the first four of which, little-endian, choose the bucket.

    Returns:
        `num_tokens` and `ahead` of the lease with this key; -1 and 0 if it may not be read now.
    """
    found: int = keeping.kvc_board_look_up(board, num_buckets, key)
    return (-1, 0) if found < 0 else (found & 0xFFFFFFFF, found >> 32)
