"""Worst-case memory compared with the pages of every step, and pools whose blocks do not overlap."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.specs import (
    CacheLimits,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DType,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    plan_kv_cache,
)

SIZES = {"num_kv_heads": 1, "head_size": 1, "dtype": DType("uint8")}


@given(
    block_size=st.integers(1, 9),
    extent=st.integers(1, 40),
    batched=st.integers(1, 20),
    max_model_len=st.integers(1, 80),
)
def test_window_and_chunk_pages_cover_every_step(block_size, extent, batched, max_model_len):
    limits = CacheLimits(max_model_len=max_model_len, max_num_batched_tokens=batched)
    window = SlidingWindowSpec(block_size=block_size, sliding_window=extent, **SIZES)
    chunk = ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=extent, **SIZES)
    oldest_seen = {
        window: lambda computed: max(computed - extent + 1, 0),
        chunk: lambda computed: computed // extent * extent,
    }
    for spec, oldest in oldest_seen.items():
        worst = 0
        for computed in range(max_model_len):
            needed = range(oldest(computed), min(computed + batched, max_model_len))
            worst = max(worst, len({token // block_size for token in needed}))
        pages = spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
        assert worst <= pages <= worst + 1, spec


@given(
    block_size=st.integers(1, 9),
    max_model_len=st.integers(1, 80),
    dcp_size=st.integers(1, 5),
    encoder_tokens=st.integers(0, 80),
    m=st.sampled_from([1, 2, 5]),
)
def test_full_attention_pages_cover_the_largest_share(
    block_size, max_model_len, dcp_size, encoder_tokens, m
):
    limits = CacheLimits(
        max_model_len=max_model_len,
        max_num_batched_tokens=1,
        decode_context_parallel_size=dcp_size,
        max_num_encoder_tokens=encoder_tokens,
    )
    shares = [[t for t in range(max_model_len) if t % dcp_size == r] for r in range(dcp_size)]
    stored = {FullAttentionSpec: max(map(len, shares)), CrossAttentionSpec: encoder_tokens}
    for kind, num_tokens in stored.items():
        spec = kind(block_size=block_size, **SIZES)
        pages = len({token // block_size for token in range(num_tokens)})
        assert spec.max_memory_usage_bytes(limits) == pages * spec.page_size_bytes
    whole = [row for row in range(max_model_len) if (row + 1) * m <= max_model_len]
    most = max(len(whole[rank::dcp_size]) for rank in range(dcp_size))
    rows = FullAttentionSpec(block_size=block_size * m, row_tokens=m, **SIZES)
    pages = len({row // block_size for row in range(most)})
    assert rows.max_memory_usage_bytes(limits) == pages * rows.page_size_bytes


FULL = FullAttentionSpec(block_size=4, **SIZES)
KINDS = (
    FULL,
    replace(FULL, sliding_window=3),
    SlidingWindowSpec(block_size=4, sliding_window=5, **SIZES),
    SlidingWindowSpec(block_size=4, sliding_window=6, **SIZES),
    ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8, **SIZES),
    CrossAttentionSpec(block_size=4, **SIZES),
    EncoderOnlyAttentionSpec(block_size=4, **SIZES),
    MambaSpec(block_size=32, shapes=((3,),), dtypes=(DType("uint8"),), page_size_padded=8),
)
LIMITS = CacheLimits(max_model_len=19, max_num_batched_tokens=3, max_num_encoder_tokens=9)


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12), st.integers(0, 40))
def test_planned_pools_fill_the_memory_without_overlap(kinds, spare):
    specs = {f"layer.{index}": spec for index, spec in enumerate(kinds)}
    cached = {name: spec for name, spec in specs.items() if spec.is_cached}
    groups = KVCacheConfig.of(specs, 1).groups
    blocks_of_request = sum(
        max(-(-spec.max_memory_usage_bytes(LIMITS) // 8) for spec in group.layer_specs.values())
        for group in groups
    )
    most_layers = max((len(group.layer_names) for group in groups), default=0)
    available = 8 * most_layers * blocks_of_request + spare

    config = plan_kv_cache(specs, LIMITS, available)

    assert config.groups == groups
    assert sorted(name for group in groups for name in group.layer_names) == sorted(cached)
    for group in groups:
        assert (
            len({(spec.block_size, spec.uniform_kind) for spec in group.layer_specs.values()}) == 1
        )
    owners = {}
    for index, tensor in enumerate(config.tensors):
        assert tensor.size == 8 * config.num_blocks
        for name in tensor.shared_by:
            (group,) = (each for each in groups if name in each.layer_names)
            assert owners.setdefault((index, groups.index(group)), name) == name
    assert sorted(owners.values()) == sorted(cached)
    assert config.max_blocks_per_request(LIMITS) == blocks_of_request
    used = sum(tensor.size for tensor in config.tensors)
    assert not cached or available - config.block_size_bytes < used <= available
