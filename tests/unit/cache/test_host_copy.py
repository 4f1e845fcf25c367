"""Copies between pools: every token arrives, nothing else changes, wrong calls are refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.host_copy import KVPool, copy_kv_blocks
from kvconnector.cache.views import KVView
from kvconnector.errors import BlockIdError, GeometryError

HEADS, DIM, PARTS = 2, 3, 4


def make_pool(num_blocks, block_size, layout, seed):
    """`(arrays as logical [block, head, token, dim], pool)`; the arrays are the pool's memory."""
    rng = np.random.default_rng(seed)
    arrays = []
    for _ in range(PARTS):
        if layout == "HND":
            array = rng.integers(0, 2**16, (num_blocks, HEADS, block_size, DIM)).astype(np.uint16)
        else:
            memory = rng.integers(0, 2**16, (num_blocks, block_size, HEADS, DIM)).astype(np.uint16)
            array = memory.transpose(0, 2, 1, 3)
        arrays.append(array)
    views = [KVView(a.ctypes.data, a.shape, a.strides, a.itemsize) for a in arrays]
    return arrays, KVPool(views, "cpu")


def tokens_of(array, ids, num_tokens):
    """Logical `[head, token, dim]` of the first tokens of some blocks."""
    return np.concatenate([array[block] for block in ids], axis=1)[:, :num_tokens]


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    layouts=st.tuples(st.sampled_from(["HND", "NHD"]), st.sampled_from(["HND", "NHD"])),
    num_blocks=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_tokens_arrive_and_nothing_else_changes(sizes, layouts, num_blocks, seed):
    num_tokens = num_blocks * sizes[0]
    src_arrays, src = make_pool(24, sizes[0], layouts[0], seed)
    dst_arrays, dst = make_pool(24, sizes[1], layouts[1], seed + 1)
    rng = np.random.default_rng(seed)
    src_ids = rng.permutation(24)[:num_blocks]
    dst_ids = rng.permutation(24)[: -(-num_tokens // sizes[1])]
    before = [array.copy() for array in dst_arrays]

    copy_kv_blocks(src, dst, src_ids, dst_ids, "h2h")

    for source, target, old in zip(src_arrays, dst_arrays, before, strict=True):
        wanted = tokens_of(source, src_ids, num_tokens)
        np.testing.assert_array_equal(tokens_of(target, dst_ids, num_tokens), wanted)
        for position in range(num_tokens):
            block, offset = divmod(position, sizes[1])
            old[dst_ids[block], :, offset] = wanted[:, position]
        np.testing.assert_array_equal(target, old)


def test_wrong_calls_are_refused():
    _, src = make_pool(4, 2, "HND", 0)
    arrays, dst = make_pool(4, 2, "NHD", 1)
    before = [array.copy() for array in arrays]
    with pytest.raises(GeometryError, match="not where the direction says"):
        copy_kv_blocks(src, dst, [0], [0], "h2d")
    with pytest.raises(BlockIdError, match="outside the pool"):
        copy_kv_blocks(src, dst, [4], [0], "h2h")
    with pytest.raises(BlockIdError, match="twice"):
        copy_kv_blocks(src, dst, [0, 1], [2, 2], "h2h")
    with pytest.raises(BlockIdError, match="not exactly the blocks"):
        copy_kv_blocks(src, dst, [0, 1], [2], "h2h")
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "src_device, dst_device", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")]
)
def test_copies_with_a_gpu(src_device, dst_device):
    import torch

    from kvconnector.runtime import view_of

    def pool(device, block_size):
        where = "cuda:0" if device == "cuda" else "cpu"
        tensors = [
            torch.randint(
                -(2**15), 2**15, (16, HEADS, block_size, 8), dtype=torch.int16, device=where
            )
            for _ in range(PARTS)
        ]
        if device == "cpu":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return tensors, KVPool([view_of(tensor) for tensor in tensors], where)

    sources, src = pool(src_device, 4)
    targets, dst = pool(dst_device, 8)
    src_ids, dst_ids = [3, 9, 1, 12, 0, 7], [5, 2, 11]
    letter = {"cpu": "h", "cuda": "d"}
    copy_kv_blocks(src, dst, src_ids, dst_ids, f"{letter[src_device]}2{letter[dst_device]}")
    torch.cuda.synchronize()
    for source, target in zip(sources, targets, strict=True):
        wanted = torch.cat([source[block] for block in src_ids], dim=1).cpu()
        assert torch.equal(torch.cat([target[block] for block in dst_ids], dim=1).cpu(), wanted)
