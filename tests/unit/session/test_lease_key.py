"""What a lease is published under: every value of it counts."""

from __future__ import annotations

import hashlib

from kvconnector.planning import GroupBlocks
from kvconnector.session.lease import LEASE_KEY_BYTES, lease_key


def test_both_ends_make_the_same_bytes_whatever_their_version():
    key = lease_key("request-1", "s" * 32, [GroupBlocks.of([7, 1 << 30], 2)])
    told = hashlib.blake2b(digest_size=LEASE_KEY_BYTES)
    told.update((9).to_bytes(8, "little") + b"request-1")
    told.update((32).to_bytes(8, "little") + b"s" * 32)
    told.update((2).to_bytes(8, "little") + (2).to_bytes(8, "little"))
    told.update((7).to_bytes(4, "little") + (1 << 30).to_bytes(4, "little"))
    assert key == told.digest()
