"""Which chunks lie in a pool as they travel: the planner's answer is that of the oracle, element by element."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.planning import joined_runs, naive_run_address, run_addresses

ORDERS = ("HND", "NHD", "HDN")


def strides_of(order, lengths, item_bytes):
    """Byte strides by axis of a dense array, the last axis of `order` finest."""
    found, stride = {}, item_bytes
    for axis in reversed(order):
        found[axis] = stride
        stride *= lengths[axis]
    return found


@given(data=st.data())
def test_a_chunk_is_in_place_exactly_if_its_elements_follow_each_other(data):
    heads, dim, block = (data.draw(st.integers(1, 3), label) for label in ("H", "D", "block"))
    item_bytes = data.draw(st.sampled_from([1, 2]))
    stored = data.draw(st.sampled_from(ORDERS))
    own = strides_of(stored, {"H": heads, "N": block, "D": dim}, item_bytes)
    block_bytes = heads * block * dim * item_bytes
    block_stride = block_bytes + data.draw(st.sampled_from([0, 0, item_bytes]))
    # parts follow each other, or do not, or lie the other way round
    num_rows = data.draw(st.integers(1, 4))
    num_blocks = data.draw(st.integers(1, 5))
    gap = data.draw(st.sampled_from([0, block_bytes, num_blocks * block_bytes, -7, 1000]))
    rows = np.array(
        [
            [10_000 + row * gap, block_stride, own["H"], own["N"], own["D"]]
            for row in range(num_rows)
        ]
    )
    block_ids = data.draw(
        st.one_of(
            st.just(list(range(1, num_blocks + 1))),
            st.lists(st.integers(0, 9), min_size=num_blocks, max_size=num_blocks),
        )
    )
    token_start = data.draw(st.integers(0, num_blocks * block - 1))
    num_tokens = data.draw(st.integers(1, num_blocks * block - token_start))
    head_start = data.draw(st.integers(0, heads - 1))
    counts = (data.draw(st.integers(1, heads - head_start)), num_tokens, dim)
    order = data.draw(st.sampled_from([stored, *ORDERS]))
    lengths = dict(zip("HND", counts, strict=True))
    travelling = strides_of(order, lengths, item_bytes)
    window = {"block_size": block, "head_start": head_start, "token_start": token_start}
    addresses = run_addresses(
        rows,
        np.array(block_ids, np.int32),
        counts=counts,
        strides_bytes=(travelling["H"], travelling["N"], travelling["D"]),
        **window,
    )
    chunks = [
        (first, count) for first in range(num_rows) for count in range(1, num_rows - first + 1)
    ]
    first_rows, num_parts = (np.array(column) for column in zip(*chunks, strict=True))
    part_bytes = int(np.prod(counts)) * item_bytes
    found = joined_runs(addresses, first_rows, num_parts, part_bytes)
    expected = [
        naive_run_address(
            rows[first : first + count].tolist(),
            block_ids,
            counts=counts,
            item_bytes=item_bytes,
            order=order,
            **window,
        )
        for first, count in chunks
    ]
    assert found.tolist() == expected
