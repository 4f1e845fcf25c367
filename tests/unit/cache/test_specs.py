from copy import deepcopy
from dataclasses import replace

import pytest

from kvconnector.cache.specs import (
    CacheLimits,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DType,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    merge_specs,
    plan_kv_cache,
)
from kvconnector.errors import CacheSpecError

LIMITS = CacheLimits(max_model_len=1000, max_num_batched_tokens=64, max_num_encoder_tokens=1500)
SHARED = replace(LIMITS, decode_context_parallel_size=2)
BFLOAT16, FLOAT32 = DType("bfloat16"), DType("float32")
FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16)
MLA = FullAttentionSpec(
    block_size=64, num_kv_heads=1, head_size=576, dtype=DType("float8_e4m3fn"), use_mla=True
)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16, sliding_window=100
)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16, attention_chunk_size=108
)
CROSS = CrossAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16)
ENCODER = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16)
MAMBA = MambaSpec(block_size=512, shapes=((3, 10), (4, 8, 2)), dtypes=(BFLOAT16, FLOAT32))


RING = RingSpec(block_size=8, num_kv_heads=2, head_size=128, dtype=FLOAT32, use_mla=True)
C4 = FullAttentionSpec(
    block_size=256, num_kv_heads=1, head_size=584, dtype=DType("uint8"), use_mla=True, row_tokens=4
)
C128 = replace(C4, row_tokens=128)


@pytest.mark.parametrize(
    "spec,page_size_bytes,max_memory_usage_bytes",
    [
        # 64 rows of 584 bytes; 250 rows of 1000 tokens are 4 pages
        pytest.param(C4, 37_376, 149_504, id="rows of 4 tokens"),
        # 2 rows; 7 rows of 1000 tokens are 4 pages
        pytest.param(C128, 1168, 4672, id="rows of 128 tokens"),
        # 16 x 8 x 128 x 2 bytes, in 12 pages as below
        pytest.param(replace(WINDOW, use_mla=True), 32_768, 393_216, id="window of latents"),
        # 8 x 2 x 128 x 4 bytes, whatever the length
        pytest.param(RING, 8192, 8192, id="ring"),
        # 2 parts x 16 tokens x 8 heads x 128 x 2 bytes; ceil(1000 / 16) = 63 pages
        pytest.param(FULL, 65_536, 4_128_768, id="full"),
        # one part of 64 x 576 x 1 byte; ceil(1000 / 64) = 16 pages
        pytest.param(MLA, 36_864, 589_824, id="mla"),
        # 99 + 64 tokens: 11 pages, and one as the window may start inside a block
        pytest.param(WINDOW, 65_536, 786_432, id="window"),
        # starts at most 12 tokens into a block: 12 + 108 + 64 tokens are 12 pages
        pytest.param(CHUNKED, 65_536, 786_432, id="chunked"),
        # ceil(1500 / 16) = 94 pages
        pytest.param(CROSS, 65_536, 6_160_384, id="cross"),
        pytest.param(ENCODER, 65_536, 0, id="encoder-only"),
        # 30 x 2 bytes + 64 x 4 bytes, one page
        pytest.param(MAMBA, 316, 316, id="mamba"),
        # a state of the request and one for each of two speculative tokens
        pytest.param(
            replace(MAMBA, page_size_padded=512, num_speculative_blocks=2), 512, 1536, id="padded"
        ),
    ],
)
def test_page_and_memory_sizes(spec, page_size_bytes, max_memory_usage_bytes):
    assert spec.is_cached is (spec is not ENCODER)
    assert spec.page_size_bytes == page_size_bytes
    assert spec.max_memory_usage_bytes(LIMITS) == max_memory_usage_bytes


WINDOWED, LOCAL = replace(FULL, sliding_window=100), replace(FULL, attention_chunk_size=64)
MIXED = {"a": FULL, "b": WINDOW}
ONE = KVCacheGroupSpec(("a",), FULL)
PAGE = FULL.page_size_bytes


def pool(*tensors, groups=(ONE,), num_blocks=2):
    """Make a pool with tensors `(pages, layer name, ...)`."""
    placed = tuple(KVCacheTensor(pages * PAGE, tuple(names)) for pages, *names in tensors)
    return KVCacheConfig(num_blocks, placed, groups)


REFUSED = [
    (lambda: replace(FULL, block_size=0), "block_size"),
    (lambda: replace(FULL, block_size=16.0), "block_size"),
    (lambda: replace(FULL, num_kv_heads=0), "num_kv_heads"),
    (lambda: replace(FULL, head_size=-1), "head_size"),
    (lambda: replace(FULL, dtype="bfloat16"), "dtype"),
    (lambda: replace(FULL, sliding_window=0), "sliding_window"),
    (lambda: replace(FULL, attention_chunk_size=0), "attention_chunk_size"),
    (lambda: replace(WINDOWED, attention_chunk_size=64), "window or attention chunks"),
    (lambda: replace(WINDOW, sliding_window=0), "sliding_window"),
    (lambda: replace(WINDOW, row_tokens=4), "must have row_tokens 1"),
    (lambda: replace(CHUNKED, row_tokens=4), "must have row_tokens 1"),
    (lambda: replace(CROSS, row_tokens=4), "must have row_tokens 1"),
    (lambda: replace(ENCODER, row_tokens=4), "must have row_tokens 1"),
    (lambda: replace(RING, row_tokens=4), "must have row_tokens 1"),
    (lambda: replace(MLA, row_tokens=48), "multiple of row_tokens"),
    (lambda: replace(MLA, row_tokens=0), "row_tokens=0"),
    (lambda: RING.max_memory_usage_bytes(SHARED), "decode context parallelism"),
    (lambda: merge_specs([MLA, replace(MLA, row_tokens=4)]), "cannot be merged"),
    (lambda: replace(CHUNKED, attention_chunk_size=0), "attention_chunk_size"),
    (lambda: replace(MAMBA, shapes=((3, 10),)), "one dtype per state shape"),
    (lambda: replace(MAMBA, shapes=(), dtypes=()), "at least one state"),
    (lambda: replace(MAMBA, shapes=((3, 0), (1,))), "state_size"),
    (lambda: replace(MAMBA, dtypes=("bfloat16", FLOAT32)), "dtype"),
    (lambda: replace(MAMBA, page_size_padded=315), "page_size_padded must be .* at least 316"),
    (lambda: replace(MAMBA, num_speculative_blocks=-1), "num_speculative_blocks"),
    (lambda: replace(LIMITS, max_model_len=0), "max_model_len"),
    (lambda: replace(LIMITS, max_num_batched_tokens=0), "max_num_batched_tokens"),
    (lambda: replace(LIMITS, decode_context_parallel_size=0), "decode_context_parallel_size"),
    (lambda: replace(LIMITS, max_num_encoder_tokens=-1), "max_num_encoder_tokens"),
    (lambda: WINDOW.max_memory_usage_bytes(SHARED), "decode_context_parallel_size=2"),
    (lambda: DType("bfloat17"), "bfloat17"),
    (lambda: merge_specs([FULL, replace(FULL, num_kv_heads=4)]), "num_kv_heads=4"),
    (lambda: merge_specs([WINDOW, replace(WINDOW, sliding_window=9)]), "sliding_window"),
    (lambda: merge_specs([FULL, WINDOW]), "SlidingWindowSpec"),
    (lambda: merge_specs([WINDOWED, replace(FULL, sliding_window=9)]), "sliding_window=9"),
    (lambda: merge_specs([LOCAL, replace(FULL, attention_chunk_size=9)]), "chunk_size=9"),
    (lambda: merge_specs([FULL, WINDOWED, LOCAL]), "window or attention chunks"),
    (lambda: merge_specs([WINDOWED, replace(FULL, head_size=64)]), "head_size=64"),
    (lambda: merge_specs([]), "no spec"),
    (lambda: FullAttentionSpec.merge([]), "no spec"),
    (lambda: UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=MIXED), "one kind"),
    (lambda: UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL}), "block_size=32"),
    (lambda: KVCacheGroupSpec((), FULL), "needs layers"),
    (
        lambda: KVCacheGroupSpec(("b",), UniformTypeKVCacheSpecs.from_specs({"a": FULL})),
        "the same as its spec",
    ),
    (pool, r"without_tensor=\['a'\]"),
    (lambda: pool((2, "a"), (2, "b")), r"without_cache=\['b'\]"),
    (lambda: pool((2, "a"), (2, "a")), r"repeated=\['a'\]"),
    (lambda: pool((2, "a"), groups=(ONE, ONE)), r"repeated=\['a'\]"),
    (lambda: pool((2, "a"), groups=(KVCacheGroupSpec(("a",), ENCODER),)), "without_cache"),
    (lambda: pool((3, "a")), "page_size_bytes=65536"),
    (lambda: pool((2, "a", "b"), groups=(KVCacheGroupSpec(("a", "b"), FULL),)), "=131072"),
    (lambda: pool((0, "a"), num_blocks=0), "num_blocks"),
    (lambda: KVCacheConfig.of({"a": FULL}, 0), "num_blocks"),
    (lambda: KVCacheConfig.of({"a": FULL, "b": MAMBA}, 2), "pages of one size.*'b': 316"),
    (lambda: KVCacheConfig.of(MIXED, 2, cross_layers=True), "equal specs"),
    (lambda: KVCacheConfig.of({"a": FULL, "b": MLA}, 2, cross_layers=True), "equal specs"),
    (lambda: plan_kv_cache({"a": FULL}, LIMITS, 63 * PAGE - 1), "needed_bytes=4128768"),
    (lambda: plan_kv_cache({"a": CROSS}, replace(LIMITS, max_num_encoder_tokens=0), 9), "65536"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_wrong_specs_are_refused(number):
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
        (FULL, WINDOWED, True),
        (WINDOWED, LOCAL, True),
        (FULL, CROSS, False),
        (CROSS, replace(CROSS, num_kv_heads=1), True),
        (CHUNKED, replace(CHUNKED, num_kv_heads=1), True),
        (CHUNKED, replace(CHUNKED, attention_chunk_size=64), False),
        (MAMBA, replace(MAMBA, block_size=256), False),
        (MAMBA, replace(MAMBA, page_size_padded=512), True),
        (MAMBA, replace(MAMBA, num_speculative_blocks=1), False),
    ],
)
def test_layers_of_one_type_share_a_block_table(first, other, uniform):
    for specs in ({"a": first, "b": other}, {"a": other, "b": first}):
        assert UniformTypeKVCacheSpecs.is_uniform_type(specs) is uniform
        assert (UniformTypeKVCacheSpecs.from_specs(specs) is not None) is uniform


def test_a_groups_pages_hold_those_of_all_layers():
    small = replace(FULL, num_kv_heads=1)
    specs = {"a": FULL, "b": small}
    group = UniformTypeKVCacheSpecs.from_specs(specs)
    specs["c"] = FULL
    assert set(group.kv_cache_specs) == {"a", "b"}
    assert group.block_size == 16
    assert group.page_size_bytes == 65_536 + 8_192
    assert group.max_memory_usage_bytes(LIMITS) == 63 * 73_728


def test_no_specs_and_grouped_specs_make_no_group():
    group = UniformTypeKVCacheSpecs.from_specs({"a": FULL})
    assert UniformTypeKVCacheSpecs.from_specs({}) is None
    assert UniformTypeKVCacheSpecs.from_specs({"a": group}) is None


def test_specs_merge_if_one_mask_serves_all():
    assert merge_specs([FULL, replace(FULL), FULL]) == FULL
    assert merge_specs([FULL, WINDOWED, FULL]) == WINDOWED
    assert FullAttentionSpec.merge([LOCAL, FULL]) == LOCAL
    assert merge_specs([MAMBA, replace(MAMBA)]) == MAMBA


def test_layers_of_one_kind_make_one_group():
    small = replace(FULL, num_kv_heads=1)
    config = KVCacheConfig.of({"a": FULL, "e": ENCODER, "b": small}, 3)
    assert config.tensors == (
        KVCacheTensor(3 * 65_536, ("a",)),
        KVCacheTensor(3 * 8_192, ("b",)),
    )
    (group,) = config.groups
    assert (group.layer_names, dict(group.layer_specs)) == (("a", "b"), {"a": FULL, "b": small})
    assert config.block_size_bytes == group.spec.page_size_bytes == 73_728
    assert config.max_blocks_per_request(LIMITS) == 63


def test_groups_have_as_many_layers_as_the_rarest_kind():
    padded = replace(MAMBA, page_size_padded=PAGE)
    specs = dict.fromkeys("abcde", FULL) | dict.fromkeys("wx", WINDOW) | {"m": padded, "n": padded}
    config = KVCacheConfig.of(specs, 7)
    names = ["ab", "cd", "e", "wx", "mn"]
    assert [group.layer_names for group in config.groups] == [tuple(each) for each in names]
    assert [group.spec for group in config.groups] == [FULL, FULL, FULL, WINDOW, padded]
    assert config.tensors == (
        KVCacheTensor(7 * PAGE, ("a", "c", "e", "w", "m")),
        KVCacheTensor(7 * PAGE, ("b", "d", "x", "n")),
    )
    # three groups of 63 blocks, 12 of the window, one of the state
    assert config.max_blocks_per_request(LIMITS) == 3 * 63 + 12 + 1


def test_equal_layers_can_share_one_tensor():
    config = KVCacheConfig.of({"a": FULL, "b": FULL}, 3, cross_layers=True)
    assert config.tensors == (KVCacheTensor(3 * 2 * PAGE, ("a", "b")),)
    assert config.block_size_bytes == 2 * PAGE


def test_a_model_without_caches_gets_no_blocks():
    for specs in ({}, {"e": ENCODER}):
        config = plan_kv_cache(specs, LIMITS, 1 << 30)
        assert config == KVCacheConfig(0, (), ())
        assert (config.block_size_bytes, config.max_blocks_per_request(LIMITS)) == (0, 0)
    of_encoder = KVCacheConfig(0, (), (KVCacheGroupSpec(("e",), ENCODER),))
    assert of_encoder.max_blocks_per_request(LIMITS) == 0


def test_configs_compare_and_copy_by_value():
    config = KVCacheConfig.of({"a": FULL, "b": replace(FULL, num_kv_heads=1)}, 3)
    copied = deepcopy(config)
    assert copied == config
    assert hash(copied) == hash(config)
    assert config != KVCacheConfig.of({"a": FULL, "b": replace(FULL, num_kv_heads=2)}, 3)


def test_a_prompt_shorter_than_a_row_needs_no_page_of_it():
    limits = replace(LIMITS, max_model_len=127)
    assert C128.max_memory_usage_bytes(limits) == 0
    assert C4.max_memory_usage_bytes(limits) == C4.page_size_bytes
    # 7 rows of 1000 tokens on two ranks: 4 on one of them
    assert C128.max_memory_usage_bytes(SHARED) == 2 * C128.page_size_bytes


def test_layers_with_rows_of_unlike_length_share_a_block_table():
    group = UniformTypeKVCacheSpecs.from_specs({"a": C4, "b": C128})
    assert group.page_size_bytes == 64 * 584 + 2 * 584
    assert group.max_memory_usage_bytes(LIMITS) == 4 * group.page_size_bytes
