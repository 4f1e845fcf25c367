"""The entries of a lease board, written and read in an order that holds on every processor.

An entry is a seqlock whose sequence is its key, since no key is ever published twice. The producer's stores are
releases, the consumer's loads acquires, and a fence separates them from the blocks. So on processors that reorder
loads and stores (aarch64, ppc64le), too:

- a reader that finds a key finds its `expected`, which was stored before it, or a later one;
- a reader that finds `ready` equal to it finds the numbers that were stored before `ready`, or later ones;
- a reader that then finds the key again has seen a single lease: a retracted entry loses its key first;
- the blocks are read after the first look and before the second.

On x86, where loads and stores are seen in order, all this costs no instruction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvconnector_kernels.pump.native import fence, load_flag, store_flag
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper

ENTRY = np.dtype(
    [
        ("key", "<u4", 4),
        ("expected", "<i4"),
        ("ready", "<i4"),
        ("num_tokens", "<i4"),
        ("ahead", "<i4"),
    ]
)
ENTRIES_PER_BUCKET = 8
ENTRY_BYTES = ENTRY.itemsize
_WORD_BYTES = 4
_EXPECTED, _READY, _NUM_TOKENS, _AHEAD = 16, 20, 24, 28


@helper
def _has_key(entry: Any, key: Any) -> Any:
    is_same = True
    for word in range(4):
        is_same = is_same and load_flag(entry + word * _WORD_BYTES) == key[word]
    return is_same


@helper
def _store_key(entry: Any, key: Any) -> None:
    for word in range(4):
        store_flag(entry + word * _WORD_BYTES, key[word])


def _compile(sources_hash: int) -> Any:
    """Compile the functions for Python. A key has four unsigned words; the first names one of `num_buckets`, 2**n."""

    @njit("UniTuple(int64, 2)(int64, int64, UniTuple(int64, 4))", cache=True)
    def look_up(board, num_buckets, key):
        """`num_tokens` and `ahead` of the lease with this key; -1 and 0 if it may not be read now."""
        _ = sources_hash
        fence()
        found = -1, 0
        bucket = board + (key[0] & (num_buckets - 1)) * (ENTRIES_PER_BUCKET * ENTRY_BYTES)
        for index in range(ENTRIES_PER_BUCKET):
            entry = bucket + index * ENTRY_BYTES
            if _has_key(entry, key):
                expected, ready = load_flag(entry + _EXPECTED), load_flag(entry + _READY)
                numbers = load_flag(entry + _NUM_TOKENS), load_flag(entry + _AHEAD)
                if expected != 0 and expected == ready and _has_key(entry, key):
                    found = numbers
        fence()
        return found

    @njit("void(int64, UniTuple(int64, 4), int64)", cache=True)
    def claim(entry, key, expected):
        """Give an entry without a key to a lease, which may be read once `ready` equals `expected`."""
        _ = sources_hash
        store_flag(entry + _EXPECTED, expected)
        _store_key(entry, key)

    @njit("void(int64)", cache=True)
    def clear(entry):
        """Take the key from an entry: the blocks may be written from now on."""
        _ = sources_hash
        _store_key(entry, (0, 0, 0, 0))
        store_flag(entry + _EXPECTED, 0)
        fence()

    @njit("void(int64, int64)", cache=True)
    def write(address, value):
        """Store a word of an entry; everything before it is visible to a thread that reads it."""
        _ = sources_hash
        store_flag(address, value)

    return look_up, claim, clear, write


look_up, claim, clear, write = _compile(SOURCES_HASH)
