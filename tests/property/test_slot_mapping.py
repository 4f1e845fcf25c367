import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.block_table import BlockTable
from kvconnector.cache.slot_mapping import (
    BlockGeometry,
    ContextParallel,
    naive_slot,
)

NUM_ROWS, MAX_BLOCKS, MAX_TOKENS = 3, 5, 400


@st.composite
def geometries(draw):
    """Every block size up to 24, with all its divisors as kernel block and as interleave."""
    block_size = draw(st.integers(1, 24))
    divisors = [size for size in range(1, block_size + 1) if block_size % size == 0]
    world_size = draw(st.integers(1, 5))
    return BlockGeometry(
        block_size=block_size,
        kernel_block_size=draw(st.sampled_from(divisors)),
        context_parallel=ContextParallel(
            world_size=world_size,
            rank=draw(st.integers(0, world_size - 1)),
            interleave_tokens=draw(st.sampled_from(divisors)),
        ),
    )


rows_of_ids = st.lists(
    st.lists(st.integers(0, 1000), min_size=1, max_size=MAX_BLOCKS),
    min_size=NUM_ROWS,
    max_size=NUM_ROWS,
)


@given(geometry=geometries(), block_ids=rows_of_ids, data=st.data())
def test_a_tables_slots_are_the_naive_ones(geometry, block_ids, data):
    table = BlockTable(
        geometry=geometry,
        max_num_reqs=NUM_ROWS,
        max_num_blocks_per_req=MAX_BLOCKS,
        max_num_batched_tokens=MAX_TOKENS,
        device="cpu",
    )
    for row, ids in enumerate(block_ids):
        table.stage(ids, row, overwrite=True)
        table.write_staged()
    tokens = data.draw(
        st.lists(
            st.integers(0, NUM_ROWS - 1).flatmap(
                lambda row: st.tuples(
                    st.just(row),
                    st.integers(0, len(block_ids[row]) * geometry.virtual_block_tokens - 1),
                )
            ),
            max_size=20,
        )
    )
    rows = np.array([row for row, _ in tokens], dtype=np.int32)
    positions = np.array([position for _, position in tokens], dtype=np.int64)
    expected = [naive_slot(block_ids[row], position, geometry) for row, position in tokens]
    assert table.compute_slot_mapping(rows, positions).tolist() == expected
