from dataclasses import replace

import pytest

from kvconnector.cache.specs import (
    CacheLimits,
    DType,
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    merge_specs,
)
from kvconnector.errors import CacheSpecError

LIMITS = CacheLimits(max_model_len=1000, max_num_batched_tokens=64)
SHARED = replace(LIMITS, decode_context_parallel_size=2)
BFLOAT16, FLOAT32 = DType("bfloat16"), DType("float32")
FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16)
MLA = FullAttentionSpec(
    block_size=64, num_kv_heads=1, head_size=576, dtype=DType("float8_e4m3fn"), use_mla=True
)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16, sliding_window=100
)
MAMBA = MambaSpec(block_size=512, shapes=((3, 10), (4, 8, 2)), dtypes=(BFLOAT16, FLOAT32))


@pytest.mark.parametrize(
    "spec,page_size_bytes,max_memory_usage_bytes",
    [
        # 2 parts x 16 tokens x 8 heads x 128 x 2 bytes; ceil(1000 / 16) = 63 pages
        pytest.param(FULL, 65_536, 4_128_768, id="full"),
        # one part of 64 x 576 x 1 byte; ceil(1000 / 64) = 16 pages
        pytest.param(MLA, 36_864, 589_824, id="mla"),
        # 99 + 64 tokens: 11 pages, and one as the window may start inside a block
        pytest.param(WINDOW, 65_536, 786_432, id="window"),
        # 30 x 2 bytes + 64 x 4 bytes, one page
        pytest.param(MAMBA, 316, 316, id="mamba"),
    ],
)
def test_sizes(spec, page_size_bytes, max_memory_usage_bytes):
    assert spec.page_size_bytes == page_size_bytes
    assert spec.max_memory_usage_bytes(LIMITS) == max_memory_usage_bytes


MIXED = {"a": FULL, "b": WINDOW}
REFUSED = [
    (lambda: replace(FULL, block_size=0), "block_size"),
    (lambda: replace(FULL, block_size=16.0), "block_size"),
    (lambda: replace(FULL, num_kv_heads=0), "num_kv_heads"),
    (lambda: replace(FULL, head_size=-1), "head_size"),
    (lambda: replace(FULL, dtype="bfloat16"), "dtype"),
    (lambda: replace(WINDOW, sliding_window=0), "sliding_window"),
    (lambda: replace(WINDOW, use_mla=True), "MLA"),
    (lambda: replace(MAMBA, shapes=((3, 10),)), "one dtype per state shape"),
    (lambda: replace(MAMBA, shapes=(), dtypes=()), "at least one state"),
    (lambda: replace(MAMBA, shapes=((3, 0), (1,))), "state_size"),
    (lambda: replace(MAMBA, dtypes=("bfloat16", FLOAT32)), "dtype"),
    (lambda: replace(LIMITS, max_model_len=0), "max_model_len"),
    (lambda: replace(LIMITS, max_num_batched_tokens=0), "max_num_batched_tokens"),
    (lambda: replace(LIMITS, decode_context_parallel_size=0), "decode_context_parallel_size"),
    (lambda: WINDOW.max_memory_usage_bytes(SHARED), "decode_context_parallel_size=2"),
    (lambda: DType("bfloat17"), "bfloat17"),
    (lambda: merge_specs([FULL, replace(FULL, num_kv_heads=4)]), "num_kv_heads=4"),
    (lambda: merge_specs([WINDOW, replace(WINDOW, sliding_window=9)]), "sliding_window"),
    (lambda: merge_specs([FULL, WINDOW]), "SlidingWindowSpec"),
    (lambda: merge_specs([]), "no spec"),
    (lambda: UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=MIXED), "one kind"),
    (lambda: UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL}), "block_size=32"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_no_spec_is_refused_by_name(number):
    call, complaint = REFUSED[number]
    with pytest.raises(CacheSpecError, match=complaint):
        call()


@pytest.mark.parametrize(
    "first,other,uniform",
    [
        (FULL, replace(FULL, num_kv_heads=1, dtype=FLOAT32), True),
        (FULL, replace(MLA, block_size=16), True),
        (FULL, replace(FULL, block_size=32), False),
        (FULL, WINDOW, False),
        (WINDOW, replace(WINDOW, head_size=64), True),
        (WINDOW, replace(WINDOW, sliding_window=99), False),
        (MAMBA, replace(MAMBA, block_size=256), False),
    ],
)
def test_which_layers_one_block_table_can_serve(first, other, uniform):
    for specs in ({"a": first, "b": other}, {"a": other, "b": first}):
        assert UniformTypeKVCacheSpecs.is_uniform_type(specs) is uniform
        assert (UniformTypeKVCacheSpecs.from_specs(specs) is not None) is uniform


def test_a_groups_size_follows_the_layer_that_needs_most_pages():
    small = replace(FULL, num_kv_heads=1)
    specs = {"a": FULL, "b": small}
    group = UniformTypeKVCacheSpecs.from_specs(specs)
    specs["c"] = FULL
    assert set(group.kv_cache_specs) == {"a", "b"}
    assert group.block_size == 16
    assert group.page_size_bytes == 65_536 + 8_192
    assert group.max_memory_usage_bytes(LIMITS) == 63 * 73_728
    assert group.tensors(3) == (KVCacheTensor(3 * 65_536, ("a",)), KVCacheTensor(3 * 8_192, ("b",)))
    with pytest.raises(CacheSpecError, match="equal specs"):
        group.tensors(3, cross_layers=True)


def test_nothing_and_groups_make_no_group_and_equal_specs_merge():
    group = UniformTypeKVCacheSpecs.from_specs({"a": FULL})
    assert UniformTypeKVCacheSpecs.from_specs({}) is None
    assert UniformTypeKVCacheSpecs.from_specs({"a": group}) is None
    assert merge_specs([FULL, replace(FULL), FULL]) == FULL
