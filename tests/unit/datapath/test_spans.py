"""Chunks that differ in their parts only, against a look at each chunk by itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.pump.copies import _groups

keys = st.sampled_from([(0, 0, 32), (0, 32, 16), (1, 0, 32), (2, 0, 32)])
chunks = st.lists(st.tuples(keys, st.integers(0, 9), st.integers(1, 4)), max_size=12)


@given(chunks=chunks, num_segments=st.integers(1, 3))
def test_chunks_are_grouped_by_segment_and_tokens(chunks, num_segments):
    rows = [(key[0], first, count, *key[1:]) for key, first, count in chunks]
    fields = np.array(rows, np.int32).reshape(-1, 5)
    seen = []
    for members, own_fields, measured in _groups(fields, num_segments):
        indices = np.arange(len(chunks))[members].tolist()
        own = [chunks[index] for index in indices]
        assert own_fields.tolist() == fields[members].tolist()
        assert {key for key, _, _ in own} == {measured[3:]}
        assert measured[0] == len(own)
        assert measured[1] == max(first + count for _, first, count in own)
        assert measured[2] == max(count for _, _, count in own)
        seen += indices
    assert sorted(seen) == list(range(len(chunks)))
