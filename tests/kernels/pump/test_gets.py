"""The compiled look at a lease board's bucket says what the board's own does. What gets do is tested over UCX."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from kvconnector.datapath.direct.board import is_valid
from kvconnector.wire.export import BUCKET_BYTES
from kvconnector_kernels.pump import gets

_KEYS = (bytes(range(16)), bytes(range(15)) + b"\x80", b"\x80" + bytes(range(1, 16)), bytes(16))
_NUMBERS = st.sampled_from([0, 1, 5, 6, -1, (1 << 31) - 1, -(1 << 31)])


look: Any = njit(gets.is_published.py_func)


@given(
    entries=st.lists(
        st.tuples(st.sampled_from(_KEYS), _NUMBERS, _NUMBERS, _NUMBERS), min_size=8, max_size=8
    ),
    key=st.sampled_from(_KEYS[:3]),
    token_stop=st.sampled_from([1, 5, (1 << 31) - 1]),
)
def test_a_bucket_says_the_same_to_both(
    entries: list[tuple[bytes, int, int, int]], key: bytes, token_stop: int
) -> None:
    bucket = b"".join(struct.pack("<16siii4x", *entry) for entry in entries)
    assert len(bucket) == BUCKET_BYTES == gets.BUCKET_BYTES
    memory = np.frombuffer(bucket, np.uint8).copy()
    found = look(memory.ctypes.data, *struct.unpack("<qq", key), token_stop)
    assert found == is_valid(bucket, key, token_stop)
