from __future__ import annotations

from math import ceil

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.dtypes import BFLOAT16, FLOAT32, UINT8
from kvconnector.cache.specs import (
    CacheLimits,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    lay_out_tensors,
    layer_parts,
    max_num_blocks,
)

counts = st.integers(1, 5)
dtypes = st.sampled_from([BFLOAT16, FLOAT32, UINT8])


any_sizes = given(
    block_size=st.integers(1, 9),
    reach=st.integers(1, 40),
    batched=st.integers(1, 20),
    max_model_len=st.integers(1, 80),
)


def check_worst_case(spec, limits, first_read):
    """The spec has pages for any step, at most one too many. `first_read` of the computed tokens is the first one that
    the next token needs.
    """
    worst = 0
    for computed in range(limits.max_model_len):
        stop = min(computed + limits.max_num_batched_tokens, limits.max_model_len)
        blocks = {token // spec.block_size for token in range(first_read(computed), stop)}
        worst = max(worst, len(blocks))
    pages = spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    assert worst <= pages <= worst + 1


@any_sizes
def test_a_sliding_window_always_fits_its_worst_case(block_size, reach, batched, max_model_len):
    spec = SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=UINT8, sliding_window=reach
    )
    limits = CacheLimits(max_model_len=max_model_len, max_num_batched_tokens=batched)
    check_worst_case(spec, limits, lambda computed: max(computed - reach + 1, 0))


@any_sizes
def test_a_chunk_always_fits_its_worst_case(block_size, reach, batched, max_model_len):
    spec = ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=UINT8, attention_chunk_size=reach
    )
    limits = CacheLimits(max_model_len=max_model_len, max_num_batched_tokens=batched)
    check_worst_case(spec, limits, lambda computed: computed // reach * reach)


@given(block_size=st.integers(1, 9), ranks=st.integers(1, 5), max_model_len=st.integers(1, 200))
def test_context_parallel_ranks_hold_one_block_per_virtual_block(block_size, ranks, max_model_len):
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=UINT8)
    limits = CacheLimits(
        max_model_len=max_model_len, max_num_batched_tokens=1, decode_context_parallel_size=ranks
    )
    virtual_blocks = ceil(max_model_len / (block_size * ranks))
    assert spec.max_memory_usage_bytes(limits) == virtual_blocks * spec.page_size_bytes


@st.composite
def layer_specs(draw):
    """A group's layers by name: any mixture that one block table can serve."""
    if draw(st.booleans()):
        # Elements of the widest state first keep every state aligned.
        shapes = draw(st.lists(st.lists(counts, max_size=3).map(tuple), min_size=1, max_size=3))
        spec = MambaSpec(block_size=8, shapes=tuple(shapes), dtypes=(draw(dtypes),) * len(shapes))
        return {f"layer{index}": spec for index in range(draw(counts))}
    block_size = draw(counts)
    return {
        f"layer{index}": FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=draw(counts),
            head_size=draw(counts),
            dtype=draw(dtypes),
            use_mla=draw(st.booleans()),
        )
        for index in range(draw(counts))
    }


@given(specs=layer_specs(), num_blocks=counts, layout=st.sampled_from(["HND", "NHD"]))
def test_every_byte_of_a_config_belongs_to_one_element(specs, num_blocks, layout):
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    assert uniform is not None
    groups = (KVCacheGroupSpec(tuple(specs), uniform),)
    config = lay_out_tensors(groups, num_blocks)
    assert max_num_blocks(groups, config.size_bytes) == num_blocks
    assert max_num_blocks(groups, config.size_bytes - 1) == num_blocks - 1

    gap = 8
    sizes = [tensor.size + -tensor.size % gap + gap for tensor in config.tensors]
    addresses = np.cumsum([0, *sizes[:-1]]).tolist()
    owners = np.zeros(sum(sizes), dtype=np.int64)
    for part in layer_parts(config, addresses, layout=layout):
        view = part.view
        grid = np.indices(view.shape).reshape(4, -1)
        starts = view.address + np.array(view.strides_bytes) @ grid
        for byte in range(view.item_size_bytes):
            np.add.at(owners, starts + byte, 1)
    expected = np.zeros_like(owners)
    for address, tensor in zip(addresses, config.tensors, strict=True):
        expected[address : address + tensor.size] = 1
    np.testing.assert_array_equal(owners, expected)
