import copy
from dataclasses import replace

import pytest

from kvconnector.cache.dtypes import BFLOAT16, FLOAT8_E4M3FN, FLOAT32, UINT8, DType
from kvconnector.cache.specs import (
    CacheLimits,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    merge_specs,
)
from kvconnector.errors import CacheSpecError

LIMITS = CacheLimits(max_model_len=1000, max_num_batched_tokens=64, max_num_encoder_tokens=33)

FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16)
MLA = FullAttentionSpec(
    block_size=64, num_kv_heads=1, head_size=576, dtype=FLOAT8_E4M3FN, use_mla=True
)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16, attention_chunk_size=96
)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16, sliding_window=100
)
ENCODER = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16)
CROSS = CrossAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BFLOAT16)
MAMBA = MambaSpec(block_size=512, shapes=((3, 10), (4, 8, 2)), dtypes=(BFLOAT16, FLOAT32))


class TestDType:
    def test_unknown_name_is_refused_and_named(self) -> None:
        with pytest.raises(CacheSpecError, match="bfloat17"):
            DType("bfloat17")

    def test_numpy_types_are_understood(self) -> None:
        numpy = pytest.importorskip("numpy")
        assert DType.of(numpy.dtype("float32")) == FLOAT32
        assert DType.of(numpy.dtype("uint8")) == UINT8

    def test_torch_types_are_understood(self) -> None:
        torch = pytest.importorskip("torch")
        assert DType.of(torch.bfloat16) == BFLOAT16
        assert DType.of(torch.float8_e4m3fn) == FLOAT8_E4M3FN


class TestSizes:
    @pytest.mark.parametrize(
        "spec,page_size_bytes,max_memory_usage_bytes",
        [
            # 2 parts x 16 tokens x 8 heads x 128 x 2 bytes; ceil(1000 / 16) = 63 pages
            (FULL, 65_536, 4_128_768),
            # one part of 64 x 576 x 1 byte; ceil(1000 / 64) = 16 pages
            (MLA, 36_864, 589_824),
            # 96 + 64 tokens: 10 pages
            (CHUNKED, 65_536, 655_360),
            # 100 + 64 tokens behind a start at token 12 of a block: 11 pages
            (replace(CHUNKED, attention_chunk_size=100), 65_536, 720_896),
            # 98 + 64 tokens behind a start at token 14: 11 pages
            (replace(CHUNKED, attention_chunk_size=98), 65_536, 720_896),
            # 97 + 64 tokens behind a start at token 15: 11 pages
            (replace(CHUNKED, attention_chunk_size=97), 65_536, 720_896),
            # 99 + 64 tokens: 11 pages, and one as the window may start inside a block
            (WINDOW, 65_536, 786_432),
            (ENCODER, 65_536, 0),
            # 33 encoder tokens: 3 pages
            (CROSS, 65_536, 196_608),
            # 30 x 2 bytes + 64 x 4 bytes, one page
            (MAMBA, 316, 316),
            (replace(MAMBA, page_size_padded=65_536), 65_536, 65_536),
        ],
        ids=[
            "full",
            "mla",
            "chunked",
            "100",
            "98",
            "97",
            "window",
            "encoder",
            "cross",
            "mamba",
            "mamba-padded",
        ],
    )
    def test_table(self, spec, page_size_bytes: int, max_memory_usage_bytes: int) -> None:
        assert spec.page_size_bytes == page_size_bytes
        assert spec.max_memory_usage_bytes(LIMITS) == max_memory_usage_bytes

    @pytest.mark.parametrize(
        "spec,max_model_len,num_pages",
        [
            # The request itself is shorter than the window or chunk and a step.
            (CHUNKED, 90, 6),
            (WINDOW, 90, 7),
            (FULL, 90, 6),
            (FULL, 96, 6),
            (FULL, 97, 7),
            (FULL, 1, 1),
        ],
    )
    def test_short_requests(self, spec, max_model_len: int, num_pages: int) -> None:
        limits = replace(LIMITS, max_model_len=max_model_len)
        assert spec.max_memory_usage_bytes(limits) == num_pages * 65_536

    @pytest.mark.parametrize("ranks,num_pages", [(2, 32), (3, 21), (8, 8), (1000, 1)])
    def test_context_parallel_ranks_share_a_request(self, ranks: int, num_pages: int) -> None:
        limits = replace(LIMITS, decode_context_parallel_size=ranks)
        assert FULL.max_memory_usage_bytes(limits) == num_pages * 65_536

    def test_a_sliding_window_refuses_context_parallelism(self) -> None:
        with pytest.raises(CacheSpecError, match="decode_context_parallel_size=2"):
            WINDOW.max_memory_usage_bytes(replace(LIMITS, decode_context_parallel_size=2))


class TestFieldsAreChecked:
    @pytest.mark.parametrize(
        "fields",
        [
            {"block_size": 0},
            {"block_size": 16.0},
            {"num_kv_heads": 0},
            {"head_size": -1},
            {"dtype": "bfloat16"},
            {"sliding_window": 0},
            {"attention_chunk_size": 0},
            {"sliding_window": 8, "attention_chunk_size": 8},
        ],
        ids=str,
    )
    def test_full_attention(self, fields: dict[str, object]) -> None:
        with pytest.raises(CacheSpecError, match=next(iter(fields))):
            replace(FULL, **fields)

    def test_window_over_latents_is_refused(self) -> None:
        with pytest.raises(CacheSpecError, match="MLA"):
            replace(WINDOW, use_mla=True)

    def test_padded_page_must_hold_the_states(self) -> None:
        assert replace(MAMBA, page_size_padded=316).page_size_bytes == 316
        with pytest.raises(CacheSpecError, match="page_size_padded=315, states_bytes=316"):
            replace(MAMBA, page_size_padded=315)

    @pytest.mark.parametrize(
        "fields",
        [
            {"shapes": ((3, 10),)},
            {"shapes": (), "dtypes": ()},
            {"shapes": ((3, 0), (1,))},
            {"dtypes": ("bfloat16", FLOAT32)},
            {"num_speculative_blocks": -1},
        ],
        ids=str,
    )
    def test_mamba(self, fields: dict[str, object]) -> None:
        with pytest.raises(CacheSpecError):
            replace(MAMBA, **fields)

    @pytest.mark.parametrize(
        "fields",
        [
            {"max_model_len": 0},
            {"max_num_batched_tokens": 0},
            {"decode_context_parallel_size": 0},
            {"max_num_encoder_tokens": -1},
        ],
        ids=str,
    )
    def test_limits(self, fields: dict[str, int]) -> None:
        with pytest.raises(CacheSpecError, match=next(iter(fields))):
            replace(LIMITS, **fields)


class TestMerge:
    @pytest.mark.parametrize("spec", [FULL, MLA, CHUNKED, WINDOW, ENCODER, CROSS, MAMBA])
    def test_equal_specs_merge_to_themselves(self, spec) -> None:
        assert merge_specs([spec, copy.deepcopy(spec), spec]) == spec

    @pytest.mark.parametrize(
        "spec,change",
        [
            (FULL, {"num_kv_heads": 4}),
            (CHUNKED, {"attention_chunk_size": 101}),
            (WINDOW, {"sliding_window": 101}),
            (CROSS, {"dtype": FLOAT32}),
            (MAMBA, {"num_speculative_blocks": 1}),
        ],
    )
    def test_different_specs_are_refused_and_the_field_named(self, spec, change) -> None:
        with pytest.raises(CacheSpecError) as caught:
            merge_specs([spec, replace(spec, **change)])
        ((name, value),) = change.items()
        assert caught.value.context == {name: (getattr(spec, name), value)}

    def test_different_types_are_refused(self) -> None:
        with pytest.raises(CacheSpecError, match="CrossAttentionSpec"):
            merge_specs([FULL, CROSS])

    def test_nothing_cannot_be_merged(self) -> None:
        with pytest.raises(CacheSpecError, match="no spec"):
            merge_specs([])
        with pytest.raises(CacheSpecError, match="no spec"):
            FullAttentionSpec.merge([])

    @pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
    def test_full_layers_take_over_the_one_window_or_chunk(self, field: str) -> None:
        with_value = replace(FULL, **{field: 128})
        for specs in ([FULL, with_value], [with_value, FULL, with_value]):
            assert FullAttentionSpec.merge(specs) == with_value

    @pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
    def test_full_layers_refuse_two_windows_or_chunks(self, field: str) -> None:
        with pytest.raises(CacheSpecError, match=rf"{field}=\[64, 128\]"):
            FullAttentionSpec.merge([replace(FULL, **{field: 128}), replace(FULL, **{field: 64})])

    def test_full_layers_refuse_a_window_beside_a_chunk(self) -> None:
        specs = [replace(FULL, sliding_window=64), replace(FULL, attention_chunk_size=64)]
        with pytest.raises(CacheSpecError, match="not both"):
            FullAttentionSpec.merge(specs)

    def test_a_taken_over_window_hides_no_other_difference(self) -> None:
        with pytest.raises(CacheSpecError, match="head_size"):
            FullAttentionSpec.merge([FULL, replace(FULL, sliding_window=64, head_size=64)])


class TestUniformType:
    @pytest.mark.parametrize(
        "first,other,uniform",
        [
            (FULL, replace(FULL, num_kv_heads=1, dtype=FLOAT32), True),
            (FULL, replace(FULL, sliding_window=64), True),
            (FULL, replace(MLA, block_size=16), True),
            (FULL, replace(FULL, block_size=32), False),
            (FULL, CROSS, False),
            (FULL, WINDOW, False),
            (CROSS, replace(CROSS, head_size=64), True),
            (WINDOW, replace(WINDOW, head_size=64), True),
            (WINDOW, replace(WINDOW, sliding_window=99), False),
            (CHUNKED, replace(CHUNKED, head_size=64), True),
            (CHUNKED, replace(CHUNKED, attention_chunk_size=99), False),
            (MAMBA, replace(MAMBA, page_size_padded=512), True),
            (MAMBA, replace(MAMBA, num_speculative_blocks=1), False),
            (ENCODER, replace(ENCODER, head_size=64), True),
            (ENCODER, FULL, False),
        ],
    )
    def test_kinds(self, first, other, uniform: bool) -> None:
        for specs in ({"a": first, "b": other}, {"a": other, "b": first}):
            assert UniformTypeKVCacheSpecs.is_uniform_type(specs) is uniform
            assert (UniformTypeKVCacheSpecs.from_specs(specs) is not None) is uniform

    def test_no_layers_are_not_uniform(self) -> None:
        assert UniformTypeKVCacheSpecs.from_specs({}) is None

    def test_sizes_follow_the_layer_that_needs_most_pages(self) -> None:
        small = replace(FULL, num_kv_heads=1)
        group = UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": small})
        assert group is not None
        assert group.block_size == 16
        assert group.page_size_bytes == 65_536 + 8_192
        assert group.max_memory_usage_bytes(LIMITS) == 63 * 73_728

    def test_groups_cannot_be_nested(self) -> None:
        group = UniformTypeKVCacheSpecs.from_specs({"a": FULL})
        assert group is not None
        assert UniformTypeKVCacheSpecs.from_specs({"a": group}) is None

    def test_mixed_layers_or_a_wrong_block_size_are_refused(self) -> None:
        with pytest.raises(CacheSpecError, match="one kind"):
            UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": CROSS})
        with pytest.raises(CacheSpecError, match="block_size=32, layer_block_size=16"):
            UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL})

    def test_it_is_a_value(self) -> None:
        specs = {"a": FULL, "b": replace(FULL, num_kv_heads=1)}
        group = UniformTypeKVCacheSpecs.from_specs(specs)
        assert group is not None
        specs["c"] = FULL
        assert set(group.kv_cache_specs) == {"a", "b"}
        copied = copy.deepcopy(group)
        assert copied == group
        assert hash(copied) == hash(group)
        assert merge_specs([copied, group]) == group
        with pytest.raises(TypeError):
            group.kv_cache_specs["a"] = MLA  # type: ignore[index]
