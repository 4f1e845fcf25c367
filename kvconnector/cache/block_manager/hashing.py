"""Content hashes of full blocks: each commits to its tokens and to everything in front of them.

blake2b rather than Python's `hash()`: a collision would hand one request another one's KV cache, so
the hash must resist collisions that a client provokes through its prompt, and it must be the same
in every process and on every host, where `hash()` is salted per process and 64 bits wide.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as AbstractSequence
from hashlib import blake2b

from kvconnector.cache.block_manager.errors import SequenceError

ExtraKey = int | str | bytes
"""What besides tokens shapes the cache: adapter name, media digest, a tenant's salt."""

TOKEN_TYPECODE = "q"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


def encode_extra_keys(extra_keys: AbstractSequence[ExtraKey]) -> bytes:
    """Bytes that differ whenever the keys differ in number, order, type or value.

    Raises:
        SequenceError: a key is neither int, str nor bytes.
    """
    parts: list[bytes] = []
    for key in extra_keys:
        if isinstance(key, bytes):
            tag, payload = b"b", key
        elif isinstance(key, str):
            tag, payload = b"s", key.encode()
        elif isinstance(key, int):
            tag, payload = b"i", str(int(key)).encode()
        else:
            raise SequenceError("an extra key must be int, str or bytes", extra_key=key)
        parts.append(tag + len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
    return b"".join(parts)


def root_hash(block_size: int) -> bytes:
    """The parent of every sequence's first block; differs between block sizes."""
    size = block_size.to_bytes(_LENGTH_BYTES, "little")
    return blake2b(size, digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: array[int], encoded_extra_keys: bytes) -> bytes:
    """Hash of one full block behind `parent`, or behind `root_hash`. `token_ids` has typecode `TOKEN_TYPECODE`."""
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    content = parent + token_ids.tobytes() + encoded_extra_keys
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
