from dataclasses import replace

import numpy as np
import pytest

from kvconnector.cache.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kvconnector.cache.specs import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    PartKind,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    lay_out_tensors,
    layer_parts,
    max_num_blocks,
)
from kvconnector.errors import CacheSpecError, GeometryError

FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=BFLOAT16)
WINDOW = SlidingWindowSpec(
    block_size=4, num_kv_heads=2, head_size=8, dtype=FLOAT16, sliding_window=6
)
MLA = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, dtype=BFLOAT16, use_mla=True)
MAMBA = MambaSpec(
    block_size=64, shapes=((3, 6), (2, 5)), dtypes=(BFLOAT16, FLOAT32), page_size_padded=256
)
PAGE = 256  # bytes: 2 x 4 x 2 x 8 x 2


def group(spec, *names: str) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(names, spec)


class TestConfig:
    def test_the_ith_layers_of_all_groups_share_a_tensor(self) -> None:
        groups = (group(FULL, "f0", "f1"), group(WINDOW, "w0", "w1", "w2"), group(MAMBA, "m0"))
        config = lay_out_tensors(groups, num_blocks=10)
        assert config.tensors == (
            KVCacheTensor(2560, ("f0", "w0", "m0")),
            KVCacheTensor(2560, ("f1", "w1")),
            KVCacheTensor(2560, ("w2",)),
        )
        assert config.size_bytes == 7680
        assert config.group_index("w2") == 1
        assert config.layer_spec("m0") == MAMBA

    def test_one_group_of_unequal_layers_has_a_tensor_per_layer(self) -> None:
        wide = replace(FULL, num_kv_heads=3)
        uniform = UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": wide})
        assert uniform is not None
        config = lay_out_tensors([group(uniform, "a", "b")], num_blocks=10)
        assert config.tensors == (KVCacheTensor(2560, ("a",)), KVCacheTensor(3840, ("b",)))
        assert config.layer_spec("b") == wide

    def test_layers_that_cache_nothing_get_no_tensor(self) -> None:
        encoder = EncoderOnlyAttentionSpec(
            block_size=4, num_kv_heads=2, head_size=8, dtype=BFLOAT16
        )
        groups = [group(FULL, "f0"), group(encoder, "e0", "e1")]
        config = lay_out_tensors(groups, num_blocks=10)
        assert config.tensors == (KVCacheTensor(2560, ("f0",)),)
        assert [part.layer_name for part in layer_parts(config, [0], layout="HND")] == ["f0", "f0"]
        assert max_num_blocks([groups[1]], 1 << 20) == 0

    @pytest.mark.parametrize(
        "available_bytes,num_blocks", [(0, 0), (767, 0), (768, 1), (7679, 9), (7680, 10)]
    )
    def test_blocks_that_fit(self, available_bytes: int, num_blocks: int) -> None:
        groups = (group(FULL, "f0", "f1"), group(WINDOW, "w0", "w1", "w2"))
        assert max_num_blocks(groups, available_bytes) == num_blocks

    def test_sharing_layers_need_equal_pages(self) -> None:
        groups = [group(FULL, "f0"), group(replace(WINDOW, head_size=16), "w0")]
        with pytest.raises(CacheSpecError, match=r"page_sizes_bytes=\[256, 512\]"):
            lay_out_tensors(groups, num_blocks=10)

    @pytest.mark.parametrize(
        "tensors,message",
        [
            ([(2560, "f0")], r"without_tensor=\['f1', 'w0'\]"),
            ([(2560, "f0", "w0"), (2560, "f1"), (2560, "x")], r"not_cached=\['x'\]"),
            ([(2560, "f0", "f1"), (2560, "w0")], "one group"),
            ([(2560, "f0", "w0"), (2560, "f1", "w0")], "more than one tensor"),
            ([(2560, "f0", "w0"), (2561, "f1")], "size=2561, num_blocks=10, page_size_bytes=256"),
        ],
    )
    def test_contradictions_are_refused(self, tensors, message: str) -> None:
        groups = (group(FULL, "f0", "f1"), group(WINDOW, "w0"))
        laid_out = tuple(KVCacheTensor(size, tuple(names)) for size, *names in tensors)
        with pytest.raises(CacheSpecError, match=message):
            KVCacheConfig(10, laid_out, groups)

    def test_a_layer_belongs_to_one_group(self) -> None:
        with pytest.raises(CacheSpecError, match="more than one group"):
            lay_out_tensors([group(FULL, "a"), group(WINDOW, "a")], num_blocks=10)

    def test_a_group_names_the_layers_of_its_spec(self) -> None:
        uniform = UniformTypeKVCacheSpecs.from_specs({"a": FULL})
        assert uniform is not None
        with pytest.raises(CacheSpecError, match=r"without_spec=\['b'\]"):
            group(uniform, "a", "b")

    def test_empty_groups_tensors_and_unknown_layers_are_refused(self) -> None:
        with pytest.raises(CacheSpecError, match="group without a layer"):
            group(FULL)
        with pytest.raises(CacheSpecError, match="tensor without a layer"):
            KVCacheTensor(16, ())
        with pytest.raises(CacheSpecError, match="layer_name='nope'"):
            lay_out_tensors([group(FULL, "a")], num_blocks=1).layer_spec("nope")


class TestViews:
    @pytest.mark.parametrize(
        "layout,strides_bytes", [("HND", (256, 64, 16, 2)), ("NHD", (256, 16, 32, 2))]
    )
    def test_attention(self, layout: str, strides_bytes: tuple[int, ...]) -> None:
        config = lay_out_tensors([group(FULL, "a")], num_blocks=3)
        key, value = layer_parts(config, [4096], layout=layout)
        assert (key.kind, value.kind) == (PartKind.KEY, PartKind.VALUE)
        assert (key.part_index, value.part_index) == (0, 1)
        assert key.view.address == 4096
        assert value.view.address == 4096 + 128
        for part in (key, value):
            assert part.layer_name == "a"
            assert part.view.shape == (3, 2, 4, 8)
            assert part.view.strides_bytes == strides_bytes

    def test_latent(self) -> None:
        config = lay_out_tensors([group(MLA, "a")], num_blocks=3)
        for layout in ("HND", "NHD"):
            (latent,) = layer_parts(config, [4096], layout=layout)
            assert latent.kind is PartKind.LATENT
            assert latent.view.shape == (3, 1, 4, 24)
            assert latent.view.block_stride_bytes == 192
            assert latent.view.token_stride_bytes == 48

    def test_states_follow_each_other_in_a_padded_page(self) -> None:
        config = lay_out_tensors([group(MAMBA, "m")], num_blocks=3)
        window, state = layer_parts(config, [4096], layout="HND")
        assert (window.kind, state.kind) == (PartKind.STATE, PartKind.STATE)
        assert window.view.shape == (3, 1, 1, 18)
        assert state.view.shape == (3, 1, 1, 10)
        assert state.view.address == 4096 + 36
        assert (window.view.item_size_bytes, state.view.item_size_bytes) == (2, 4)
        assert window.view.block_stride_bytes == state.view.block_stride_bytes == 256

    def test_sharing_layers_see_the_same_block_at_the_same_place(self) -> None:
        groups = (group(FULL, "f0"), group(WINDOW, "w0"), group(MAMBA, "m0"))
        config = lay_out_tensors(groups, num_blocks=5)
        first = {
            part.layer_name: part
            for part in layer_parts(config, [8192], layout="HND")
            if part.part_index == 0
        }
        assert [first[name].group_index for name in ("f0", "w0", "m0")] == [0, 1, 2]
        assert {part.view.address for part in first.values()} == {8192}
        assert {part.view.block_stride_bytes for part in first.values()} == {PAGE}

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    def test_views_cover_the_memory_exactly_once(self, layout: str) -> None:
        wide = replace(FULL, num_kv_heads=3)
        uniform = UniformTypeKVCacheSpecs.from_specs({"a": FULL, "b": wide})
        assert uniform is not None
        config = lay_out_tensors([group(uniform, "a", "b")], num_blocks=3)
        offsets = [0, config.tensors[0].size]
        touched = np.zeros(config.size_bytes, dtype=np.int64)
        for part in layer_parts(config, offsets, layout=layout):
            for index in np.ndindex(part.view.shape):
                start = part.view.address + int(np.dot(index, part.view.strides_bytes))
                touched[start : start + part.view.item_size_bytes] += 1
        assert (touched == 1).all()

    def test_wrong_calls_are_refused(self) -> None:
        config = lay_out_tensors([group(FULL, "a", "b")], num_blocks=3)
        with pytest.raises(GeometryError, match="num_tensors=2, num_addresses=1"):
            layer_parts(config, [0], layout="HND")
        with pytest.raises(GeometryError, match="DHN"):
            layer_parts(config, [0, 4096], layout="DHN")

    def test_misaligned_parts_are_refused(self) -> None:
        config = lay_out_tensors([group(FULL, "a")], num_blocks=3)
        with pytest.raises(GeometryError, match="aligned"):
            list(layer_parts(config, [4097], layout="HND"))
        odd = replace(MAMBA, shapes=((3,), (2, 5)))
        config = lay_out_tensors([group(odd, "m")], num_blocks=3)
        with pytest.raises(GeometryError, match=r"address=4102.*item_size_bytes=4"):
            list(layer_parts(config, [4096], layout="HND"))
