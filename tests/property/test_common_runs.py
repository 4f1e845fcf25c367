"""The runs that two pools have in common: those of the oracle, element by element, and none that could be longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import LocalError
from kvconnector.planning.common_runs import Window, common_runs
from kvconnector.planning.naive import naive_pieces
from tests.property.test_runs import ORDERS, strides_of

ITEM_BYTES = 2


@st.composite
def windows(draw: st.DrawFn, counts: tuple[int, int, int, int], base: int) -> Window:
    """One side of a read of so many parts, heads, tokens and elements, in a pool of its own."""
    num_parts, num_heads, num_tokens, dim = counts
    head_start, block = draw(st.integers(0, 2)), draw(st.integers(1, 5))
    lengths = {"H": head_start + num_heads + draw(st.integers(0, 1)), "N": block, "D": dim}
    own = strides_of(draw(st.sampled_from(ORDERS)), lengths, ITEM_BYTES)
    block_bytes = lengths["H"] * block * dim * ITEM_BYTES
    run = draw(st.integers(1, num_tokens))
    skip = draw(st.integers(0, run - 1))
    step = run + draw(st.sampled_from([0, 0, 1, 3]))
    places = np.arange(skip, skip + num_tokens)
    positions = draw(st.integers(0, 4)) + places // run * step + places % run
    num_blocks = int(positions[-1]) // block + 1
    ids = draw(
        st.one_of(st.just(list(range(num_blocks))), st.permutations(list(range(num_blocks))))
    )
    # parts behind each other, or interleaved block by block
    is_interleaved = draw(st.booleans())
    part_step = block_bytes if is_interleaved else num_blocks * block_bytes
    block_stride = block_bytes * (num_parts if is_interleaved else 1)
    rows = [
        [base + part * part_step, block_stride, own["H"], own["N"], own["D"]]
        for part in range(num_parts)
    ]
    return Window(np.array(rows), np.array(ids), block, head_start, positions.astype(np.int64))


@given(data=st.data())
def test_runs_are_those_elements_joined_as_far_as_can_be(data: st.DataObject) -> None:
    counts = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), st.integers(1, 3))
    )
    there = data.draw(windows(counts, 10_000))
    here = data.draw(windows(counts, 900_000))
    knobs = {"num_heads": counts[1], "head_dim": counts[3], "item_bytes": ITEM_BYTES}
    runs = common_runs(there, here, max_runs=1 << 20, **knobs)
    elements = sorted(naive_pieces(there, here, **knobs))
    found = [
        (remote + at, local + at, ITEM_BYTES)
        for remote, local, nbytes in runs.tolist()
        for at in range(0, nbytes, ITEM_BYTES)
    ]
    assert sorted(found) == elements
    ends = {(remote + nbytes, local + nbytes) for remote, local, nbytes in runs.tolist()}
    assert not any((remote, local) in ends for remote, local, _ in runs.tolist())


def test_more_runs_than_may_be_are_refused_before_they_are_made() -> None:
    rows = np.array([[4096, 1 << 20, 2, 2, 1 << 10]])
    ids, positions = np.arange(1 << 15), np.arange(1 << 15)
    window = Window(rows, ids, 1, 0, positions)
    with pytest.raises(LocalError, match="too many runs"):
        common_runs(window, window, num_heads=1, head_dim=64, item_bytes=2, max_runs=1 << 10)
