"""What a lease is published under: every value of it counts."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.planning import GroupBlocks
from kvconnector.session.lease import LEASE_KEY_BYTES, lease_key

texts = st.text(max_size=4)
groups = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=3)), max_size=3)
leases = st.tuples(texts, texts, groups)


def key_of(lease):
    transfer_id, secret, blocks = lease
    return lease_key(transfer_id, secret, [GroupBlocks.of(ids, first) for first, ids in blocks])


@given(leases, leases)
def test_two_leases_have_one_key_only_if_they_are_the_same(one, other):
    assert (key_of(one) == key_of(other)) == (one == other)


def test_both_ends_make_the_same_bytes_whatever_their_version():
    lease = ("request-1", "s" * 32, [(2, [7, 1 << 30])])
    told = hashlib.blake2b(digest_size=LEASE_KEY_BYTES)
    told.update((9).to_bytes(8, "little") + b"request-1")
    told.update((32).to_bytes(8, "little") + b"s" * 32)
    told.update((2).to_bytes(8, "little") + (2).to_bytes(8, "little"))
    told.update((7).to_bytes(4, "little") + (1 << 30).to_bytes(4, "little"))
    assert key_of(lease) == told.digest()
