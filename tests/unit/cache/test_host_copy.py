"""Copies between pools: every token arrives, nothing else changes, and wrong calls are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.host_copy import KVPool, copy_kv_blocks
from kvconnector.errors import BlockIdError, GeometryError
from tests.support.fakes import LAYOUTS, FakeCaches, FakeEngine, attention_model

LAYOUT = st.sampled_from(LAYOUTS)


def make_pool(num_blocks, block_size, layout, seed):
    """Return `(arrays as logical [block, head, token, dim], pool)`; the arrays are the pool's memory."""
    sizes = {"block_sizes": (block_size,), "num_blocks": (num_blocks,), "layout": layout}
    engine = FakeEngine("e", attention_model(), **sizes)
    caches = FakeCaches(engine, engine.geometry().ranks[0], np.random.default_rng(seed))
    (group,) = caches.groups()
    views = [view for layer in group.views.values() for view in layer]
    return list(caches.arrays.values()), KVPool(views, "cpu")


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    layouts=st.tuples(LAYOUT, LAYOUT),
    num_blocks=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_a_copy_writes_its_tokens_and_nothing_else(sizes, layouts, num_blocks, seed):
    num_tokens = num_blocks * sizes[0]
    src_arrays, src = make_pool(24, sizes[0], layouts[0], seed)
    dst_arrays, dst = make_pool(24, sizes[1], layouts[1], seed + 1)
    rng = np.random.default_rng(seed)
    src_ids = rng.permutation(24)[:num_blocks]
    dst_ids = rng.permutation(24)[: -(-num_tokens // sizes[1])]
    before = [array.copy() for array in dst_arrays]

    copy_kv_blocks(src, dst, src_ids, dst_ids, "h2h")

    for source, target, old in zip(src_arrays, dst_arrays, before, strict=True):
        wanted = np.concatenate([source[block] for block in src_ids], axis=1)
        for position in range(num_tokens):
            block, offset = divmod(position, sizes[1])
            old[dst_ids[block], :, offset] = wanted[:, position]
        np.testing.assert_array_equal(target, old)


def test_wrong_copies_are_refused():
    _, src = make_pool(4, 2, "HND", 0)
    arrays, dst = make_pool(4, 2, "NHD", 1)
    before = [array.copy() for array in arrays]
    with pytest.raises(GeometryError, match="not where the direction says"):
        copy_kv_blocks(src, dst, [0], [0], "h2d")
    with pytest.raises(BlockIdError, match="outside the pool"):
        copy_kv_blocks(src, dst, [4], [0], "h2h")
    with pytest.raises(BlockIdError, match="twice"):
        copy_kv_blocks(src, dst, [0, 1], [2, 2], "h2h")
    with pytest.raises(BlockIdError, match=r"writes? blocks that it reads.*\[1, 2\]"):
        copy_kv_blocks(dst, dst, [0, 1, 2], [1, 2, 3], "h2h")
    with pytest.raises(BlockIdError, match="not exactly the blocks"):
        copy_kv_blocks(src, dst, [0, 1], [2], "h2h")
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_a_pool_has_as_many_blocks_as_its_smallest_part():
    pools = [make_pool(num_blocks, 2, "NHD", seed=0) for num_blocks in (4, 3)]
    mixed = KVPool([pool.view for _, pool in pools], "cpu")
    assert mixed.num_blocks == 3
    other = KVPool([pools[0][1].view] * 2, "cpu")
    with pytest.raises(BlockIdError, match=r"src_ids are outside the pool.*num_blocks=3"):
        copy_kv_blocks(mixed, other, [3], [0], "h2h")
    for ids in ([0.5], [True], [[0]]):
        with pytest.raises(BlockIdError, match="src_ids must be a vector of block ids"):
            copy_kv_blocks(mixed, other, ids, [0], "h2h")


@pytest.mark.gpu
def test_copies_within_a_gpu():
    """Minillm's swaps test copies between device and host memory."""
    import torch

    from kvconnector.runtime import view_of

    sources, targets = (
        [torch.randint(0, 99, (16, 2, size, 8), dtype=torch.int16, device="cuda:0") for _ in "kv"]
        for size in (4, 8)
    )
    src, dst = (KVPool([view_of(one) for one in pool], "cuda:0") for pool in (sources, targets))
    src_ids, dst_ids = [3, 9, 1, 12, 0, 7], [5, 2, 11]
    copy_kv_blocks(src, dst, src_ids, dst_ids, "d2d")
    for source, target in zip(sources, targets, strict=True):
        wanted = torch.cat([source[block] for block in src_ids], dim=1)
        assert torch.equal(torch.cat([target[block] for block in dst_ids], dim=1), wanted)
