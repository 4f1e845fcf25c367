import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconnector.errors import GeometryError
from kvconnector.integrations.vllm.blocks import retention_of
from kvconnector.integrations.vllm.caches import (
    REFUSED_KINDS,
    _uniform_parts,
    group_info,
    layer_number,
    register_groups,
)
from kvconnector.integrations.vllm.parts import PACKED_CONTENT, LayerCache, TpSplit, state_parts
from tests.vllm.cache_world import (
    BLOCKS,
    DIM,
    HEADS,
    NAMES,
    SIZE,
    attention,
    engine_of,
    one_group,
    placed,
    raw,
    read,
    refused_for,
    registered,
    vllm_config,
)

pytestmark = pytest.mark.vllm

CHANNELS, WIDTH = {"MAMBA1": 24, "MAMBA2": 40, "GDN_ATTN": 40}, 3


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLNHC])
def test_packed_k_and_v_are_found_in_every_layout(layout):
    group, caches = registered(attention(), layout)
    geometry = group.cache.geometry
    assert (geometry.block_size, geometry.layers) == (SIZE, (0, 1, 2))
    assert [part.name for part in geometry.parts] == ["k", "v"]
    for number, name in enumerate(NAMES):
        k, v = group.cache.views[number]
        assert np.array_equal(read(k), raw(caches[name][..., :DIM]))
        assert np.array_equal(read(v), raw(caches[name][..., DIM:]))


@pytest.mark.parametrize("numbers", [[0.5], [0.5, 0.25]])
def test_the_scales_of_fp8_caches_are_stated(numbers):
    """One for a layer's K and one for its V, or one for each head, as in checkpoints of compressed tensors."""
    scales = {"_k_scale": torch.tensor(numbers), "_v_scale": torch.tensor(numbers) / 2}
    fp8 = {"dtype": torch.float8_e4m3fn, "kv_quant_mode": kv.KVQuantMode.FP8_PER_TENSOR}
    k, v = tuple(numbers), tuple(number / 2 for number in numbers)
    group, _ = registered(attention(**fp8), layer=scales)
    assert group.cache.geometry.scales == ((k, v),) * 3
    latent = attention(kv.MLAAttentionSpec, **fp8, num_kv_heads=1, head_size_v=0)
    group, _ = registered(
        latent, backend="FLASHMLA", layer={name: scale[:1] for name, scale in scales.items()}
    )
    assert group.cache.geometry.scales == ((k[:1],),) * 3
    packed = {**fp8, "state_content_bytes": 2 * DIM}
    for without, has_scales in (({}, True), (packed, True), (fp8, False)):
        group, _ = registered(attention(**without), layer=scales if has_scales else ())
        assert group.cache.geometry.scales == ()


def store_in_tiles(key_NHD, value_NHD, key_cache, value_cache, slots, *isa, **scales):
    """Store bfloat16 as AMX code does: K as [16 tokens][dim pair][token][2], V as [16 dims][token pair][dim][2]."""
    size, dim = key_cache.shape[2:]
    for token, slot in enumerate(slots.tolist()):
        block, t = divmod(slot, size)
        d = torch.arange(dim)
        k = t // 16 * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2
        v = d // 16 * 16 * size + t // 2 * 32 + d % 16 * 2 + t % 2
        for cache, places, values in ((key_cache, k, key_NHD), (value_cache, v, value_NHD)):
            for head in range(cache.shape[1]):
                flat = cache[block, head].view(-1)  # a chunk's (block, head) is contiguous
                flat[places] = values[token, head]


@pytest.mark.parametrize("sizes", [(64, 64), (32, 96), (96, 32)])
def test_tiles_are_moved_whole_between_engines_that_have_the_same(monkeypatch, sizes):
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", store_in_tiles)
    tokens, dim = 85, 64
    values = [torch.randn(tokens, HEADS, dim).to(torch.bfloat16) for _ in "kv"]
    made = []
    for size in sizes:
        spec = attention(block_size=size, head_size=dim, dtype=torch.bfloat16)
        group, caches = registered(spec, backend="CPU_ATTN", isa="amx")
        halves = caches[NAMES[0]].view(BLOCKS, HEADS, 2 * size, dim).chunk(2, dim=2)
        assert (group.info.tile_tokens, group.cache.geometry.block_size) == (16, size // 16)
        made.append((group, halves, caches[NAMES[0]]))
    (source, theirs, _), (target, ours, cache) = made
    assert source.cache.geometry.parts == target.cache.geometry.parts
    store_in_tiles(*values, *theirs, torch.arange(tokens))
    tiles = retention_of(target.info).missing(0, tokens)
    assert tiles == range(6)
    for read_from, write_to in zip(source.cache.views[0], target.cache.views[0], strict=True):
        for tile in tiles:
            (b1, t1), (b2, t2) = (divmod(tile, s // 16) for s in sizes)
            read(write_to)[b2, :, t2] = read(read_from)[b1, :, t1]
    moved = cache.clone()
    store_in_tiles(*values, *ours, torch.arange(tokens))
    assert torch.equal(cache, moved)


def test_engines_with_other_tiles_refuse_each_other(monkeypatch):
    def others(key, value, key_cache, value_cache, slots, *isa, **scales):
        store_in_tiles(value, key, value_cache, key_cache, slots)

    spec = attention(dtype=torch.bfloat16)
    parts = []
    for store in (store_in_tiles, others):
        monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", store)
        group, _ = registered(spec, backend="CPU_ATTN", isa="amx")
        parts.append({part.name for part in group.cache.geometry.parts})
    assert parts[0].isdisjoint(parts[1])


def test_a_way_of_storing_without_tiles_is_refused(monkeypatch):
    def shuffled(key, value, key_cache, value_cache, *others, **scales):
        del others, scales
        tokens, heads, dim = key.shape
        order = torch.randperm(tokens * dim, generator=torch.Generator().manual_seed(0))
        for cache, values in ((key_cache, key), (value_cache, value)):
            for head in range(heads):
                cache[0, head].view(-1)[order] = values[:, head].reshape(-1).roll(head)

    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", shuffled)
    with pytest.raises(GeometryError, match="amx"):
        registered(attention(), backend="CPU_ATTN", isa="amx")


DRAFTS = [
    "model.layers.3.self_attn.attn",  # numbered after the target's layers
    "draft_model.layers.0.self_attn.attn",
    "mtp.layers.0.self_attn.attn",
    "model.mtp_layers.0.self_attn.attn",
]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    "tp_size, target, drafting",
    [(8, 4, 8), (8, 8, 4), (4, 8, 2), (2, 2, 8), (2, 8, 1), (1, 4, 8)],
)
def test_the_ranks_hold_each_head_of_a_target_and_of_its_draft(draft, tp_size, target, drafting):
    for name, total in ((NAMES[0], target), (draft, drafting)):
        held = max(1, total // tp_size)
        shares = []
        for rank in range(tp_size):
            config, caches = one_group(
                attention(num_kv_heads=held), KVCacheLayout.LBHNC, names=[name]
            )
            engine = {"tp_size": tp_size, "total_kv_heads": target, "draft_kv_heads": drafting}
            (group,) = register_groups(
                vllm_config("FLASH_ATTN", names=[name], **engine), config, caches, placed(rank)
            )
            part = group.cache.geometry.parts[0]
            assert part.total_heads == total
            shares.append((part.head_start, part.head_stop))
        # as vLLM loads the weights: rank r has run r // replicas of the heads
        replicas = max(1, tp_size // total)
        assert shares == [
            (rank // replicas * held, (rank // replicas + 1) * held) for rank in range(tp_size)
        ]


def test_a_layer_with_heads_of_its_own_is_cut_by_its_own_number():
    """A single head is recognised if vLLM's configuration gives that layer's number of heads."""
    own = {"tp_size": 2, "total_kv_heads": 8, "place": placed(1)}
    part = registered(attention(num_kv_heads=2), **own)[0].cache.geometry.parts[0]
    assert (part.total_heads, part.head_start, part.head_stop) == (4, 2, 4)
    config, caches = one_group(attention(num_kv_heads=1), KVCacheLayout.LBHNC, names=[NAMES[1]])
    engine = {"tp_size": 4, "total_kv_heads": 8, "names": [NAMES[1]]}
    with pytest.raises(GeometryError, match="cannot tell which KV heads") as refused:
        register_groups(vllm_config("FLASH_ATTN", **engine), config, caches, placed(3))
    assert refused.value.context["layer"] == NAMES[1]
    (group,) = register_groups(
        vllm_config("FLASH_ATTN", **engine, layer_1=2), config, caches, placed(3)
    )
    part = group.cache.geometry.parts[0]
    assert (part.total_heads, part.head_start, part.head_stop) == (2, 1, 2)


@pytest.mark.parametrize(
    "spec,backend,expected",
    [  # a latent is one head on every rank, and quantised content is transferred with its scales
        (
            attention(kv.MLAAttentionSpec, num_kv_heads=1, head_size=576, dtype=torch.bfloat16),
            "FLASHMLA",
            ("latent", 1, 576, 2),
        ),
        (attention(dtype=torch.uint8, state_content_bytes=70), "TRITON_ATTN", ("kv", 8, 70, 1)),
    ],
)
def test_content_that_is_one_part_is_moved_whole(spec, backend, expected):
    engine = {"tp_size": 4, "total_kv_heads": 8, "place": placed(3)}
    group, caches = registered(spec, KVCacheLayout.LBNHC, backend, **engine)
    (part,) = group.cache.geometry.parts
    assert (part.name, part.total_heads, part.head_dim, part.item_size_bytes) == expected
    assert np.array_equal(read(group.cache.views[0][0]), raw(caches[NAMES[0]]))


def test_layers_of_different_shape_share_a_block_table():
    specs = {
        NAMES[0]: attention(kv.MLAAttentionSpec, num_kv_heads=1, head_size=576),
        "model.layers.0.self_attn.indexer.k_cache": attention(
            kv.MLAAttentionSpec, num_kv_heads=1, head_size=132, dtype=torch.uint8
        ),
    }
    config = kv.KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            kv.KVCacheGroupSpec(
                layer_names=list(specs),
                kv_cache_spec=kv.UniformTypeKVCacheSpecs(block_size=SIZE, kv_cache_specs=specs),
            )
        ],
    )
    caches = {
        name: torch.zeros(BLOCKS, 1, SIZE, spec.head_size, dtype=spec.dtype)
        for name, spec in specs.items()
    }
    backends = dict(zip(specs, ("FLASHMLA_SPARSE", "DEEPSEEK_V32_INDEXER"), strict=True))
    groups = register_groups(vllm_config(backends, names=list(specs)), config, caches, placed())
    assert [group.info.vllm_group for group in groups] == [0, 0]
    shapes = {
        tuple((part.name, part.head_dim) for part in group.cache.geometry.parts) for group in groups
    }
    assert shapes == {(("latent", 576),), (("index", 128), ("index-scales", 4))}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_layers_of_unlike_heads_are_in_one_order_at_any_parallelism(tp_size):
    """Two engines exchange their groups by place, and a rank of one may hold 8 and 16 heads, of the other 4 and 8."""
    heads = {"model.layers.0.attn": 16, "model.layers.1.attn": 8}
    specs = {name: attention(num_kv_heads=total // tp_size) for name, total in heads.items()}
    shared = kv.UniformTypeKVCacheSpecs(block_size=SIZE, kv_cache_specs=specs)
    group = kv.KVCacheGroupSpec(layer_names=list(specs), kv_cache_spec=shared)
    assert [names for _, names in _uniform_parts(group)] == [[name] for name in reversed(heads)]


def test_the_scale_of_compressed_latents_is_stated():
    fp8 = {"dtype": torch.float8_e4m3fn, "kv_quant_mode": kv.KVQuantMode.FP8_PER_TENSOR}
    latent = attention(kv.MLAAttentionSpec, **fp8, num_kv_heads=1, head_size_v=0)
    scale = {"_flashinfer_fp8_kv_scale": torch.tensor([0.5])}
    group, _ = registered(latent, backend="FLASHINFER_MLA_SPARSE_DSV4", layer=scale)
    assert group.cache.geometry.scales == (((0.5,),),) * 3


def test_a_layer_that_shares_anothers_cache_is_moved_once():
    config, caches = one_group(attention(), KVCacheLayout.LBHNC)
    config.kv_cache_groups[0].layer_names.append("model.layers.9.self_attn.attn")
    caches["model.layers.9.self_attn.attn"] = caches[NAMES[0]]
    (group,) = register_groups(vllm_config("FLASH_ATTN"), config, caches, placed())
    assert group.cache.geometry.layers == (0, 1, 2)


@pytest.mark.parametrize(
    "spec,backend,text",
    [
        (attention(), "SOME_NEW_ATTN", "SOME_NEW_ATTN"),
        (attention(num_head_slots=2 * HEADS), "FLASHINFER", "num_head_slots"),
        (attention(kv_quant_mode=kv.KVQuantMode.NVFP4), "FLASHINFER", "kv_quant_mode"),
        (attention(kv_quant_mode=kv.KVQuantMode.INT8_PER_TOKEN_HEAD), "FLASH_ATTN", "INT8_PER"),
        (attention(kv_quant_mode=kv.KVQuantMode.TURBOQUANT_4BIT_NC), "TRITON_ATTN", "TURBOQUANT"),
        (
            attention(
                kv.MLAAttentionSpec,
                num_kv_heads=1,
                kv_quant_mode=kv.KVQuantMode.INT8_PER_TOKEN_HEAD,
            ),
            "TRITON_MLA",
            "INT8_PER",
        ),
        (attention(tokens_per_state=2), "FLASHMLA", "tokens_per_state"),
        (attention(kv.SinkFullAttentionSpec, sink_len=4), "FLASH_ATTN", "SinkFullAttentionSpec"),
    ],
)
def test_an_unknown_cache_is_refused_by_name(spec, backend, text):
    with pytest.raises(GeometryError, match=text):
        registered(spec, backend=backend)


def test_chunked_attention_keeps_a_chunk():
    group, _ = registered(attention(kv.ChunkedLocalAttentionSpec, attention_chunk_size=64))
    assert (group.info.keeps, group.info.extent_tokens) == ("chunk", 64)


@pytest.mark.parametrize(
    "name,number",
    [
        ("model.layers.3.self_attn.attn", 3),
        ("language_model.model.layers.12.mixer", 12),
        ("model.layers.3.self_attn.1.attn", 4096 + 3),
        ("draft_model.layers.3.self_attn.attn", 8 * 4096 + 3),
        ("mtp.layers.0.self_attn.attn", 8 * 4096),
        ("model.mtp_layers.0.self_attn.attn", 8 * 4096),
    ],
)
def test_layers_are_numbered_by_name(name, number):
    assert layer_number(name) == number
    with pytest.raises(GeometryError, match=r"model\.attn"):
        layer_number("model.attn")


def recurrent(kind, is_dim_first):
    channels = CHANNELS[kind]
    conv = (channels, WIDTH) if is_dim_first else (WIDTH, channels)
    temporal = (channels, 16) if kind == "MAMBA1" else (6, 4, 16)
    return kv.MambaSpec(
        block_size=SIZE,
        shapes=(conv, temporal),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum[kind],
    )


@pytest.mark.parametrize("kind", CHANNELS)
def test_a_recurrent_state_reads_the_same_in_both_channel_orders(kind):
    conv = torch.randint(-99, 99, (BLOCKS, CHANNELS[kind], WIDTH)).to(torch.bfloat16)
    found = {}
    for is_dim_first in (True, False):
        spec = recurrent(kind, is_dim_first)
        page = torch.zeros(BLOCKS, 1, 1, spec.state_content_size_bytes + 64, dtype=torch.int8)
        stored = conv if is_dim_first else conv.transpose(1, 2).contiguous()
        nbytes = CHANNELS[kind] * WIDTH * 2
        page[:, 0, 0, :nbytes] = stored.reshape(BLOCKS, -1).view(torch.int8)
        page[:, 0, 0, nbytes : spec.state_content_size_bytes] = 3
        parts = state_parts(LayerCache("l", spec, page), TpSplit(0, 1), is_dim_first=is_dim_first)
        found[is_dim_first] = {g.name: (g, read(view).copy()) for g, view in parts}
    first, last = found[True], found[False]
    assert list(first) == list(last)
    assert first["temporal"][1].min() == first["temporal"][1].max() == 3
    for name, (geometry, values) in first.items():
        assert geometry == last[name][0]
        assert np.array_equal(values, last[name][1])
    channels = np.concatenate([v for name, (_, v) in first.items() if name != "temporal"], axis=1)
    assert np.array_equal(channels[:, :, 0], raw(conv[:, :, None])[:, :, 0])


def test_other_states_need_equal_engines():
    spec = recurrent("MAMBA1", True)
    other = kv.MambaSpec(
        block_size=SIZE,
        shapes=spec.shapes,
        dtypes=spec.dtypes,
        mamba_type=MambaAttentionBackendEnum.LINEAR,
    )
    cache = LayerCache("l", other, torch.zeros(BLOCKS, 1, 1, spec.state_content_size_bytes))
    parts = [state_parts(cache, TpSplit(0, size), is_dim_first=True) for size in (1, 2)]
    assert parts[0][0][0].name != parts[1][0][0].name


@pytest.mark.parametrize("name", ["TRITON_FLASH_ATTN", "TRITON_FLASHINFER"])
def test_two_backends_that_share_a_cache_store_it_as_each_does_alone(name):
    """vLLM's first choice for models that see images in both directions, as Gemma 3: on H100s, and on B200s."""
    made = {
        "TRITON_FLASH_ATTN": ("triton_flash_attn", "TritonFlashAttentionBackend"),
        "TRITON_FLASHINFER": ("triton_flashinfer", "TritonFlashInferBackend"),
    }
    module, kind = made[name]
    found = pytest.importorskip(f"vllm.v1.attention.backends.{module}", exc_type=ImportError)
    backend = getattr(found, kind)
    both = {each.get_name() for each in (backend.general_backend_cls, backend.causal_backend_cls)}
    assert len(both) == 2
    assert both < PACKED_CONTENT
    assert [
        part.name
        for part in registered(attention(), backend=backend.get_name())[0].cache.geometry.parts
    ] == ["k", "v"]


def states(kind, dtypes):
    """Return an engine whose states are of these types, each with as many shapes as types."""
    spec = kv.MambaSpec(
        block_size=SIZE,
        shapes=((24, 3), (24, 16))[: len(dtypes)],
        dtypes=dtypes,
        mamba_type=MambaAttentionBackendEnum[kind],
    )
    group, _ = registered(spec, backend=kind)
    return engine_of([group])


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "kind, ours, theirs",
    [
        ("MAMBA1", (BF16, BF16), (FP16, FP16)),  # another --dtype beside a cache in fp8
        ("MAMBA1", (BF16, BF16), (BF16, FP16)),  # --mamba-ssm-cache-dtype
        ("MAMBA1", (BF16, FP32), (FP16, FP32)),
        ("SHORT_CONV", (BF16,), (FP16,)),
        ("LINEAR", (FP32,), (torch.int32,)),
    ],
    ids=str,
)
def test_states_of_another_type_with_as_many_bytes_are_refused(kind, ours, theirs):
    """Their bytes would arrive, and read as other numbers."""
    for each, other in ((ours, theirs), (theirs, ours)):
        assert "elements" in refused_for(states(kind, each), states(kind, other))
        assert refused_for(states(kind, each), states(kind, each)) == set()


def test_rings_of_another_type_with_as_many_bytes_are_refused():
    bf16, fp16 = (
        engine_of([registered(attention(kv.CircularBufferSpec, dtype=dtype))[0]])
        for dtype in (BF16, FP16)
    )
    assert "elements" in refused_for(bf16, fp16)
    assert refused_for(bf16, bf16) == set()


ACCEPTED_KINDS = {
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 64},
    "CircularBufferSpec": {},
    "FullAttentionSpec": {},
    "MLAAttentionSpec": {},
    "MambaSpec": {},
    "SlidingWindowMLASpec": {"sliding_window": 64},
    "SlidingWindowSpec": {"sliding_window": 64},
}
"""Kinds of groups that are moved, with the arguments that such a spec also has."""
NO_GROUPS = {"AttentionSpec", "KVCacheSpec", "UniformTypeKVCacheSpecs"}
"""Classes of which no group of layers is: bases, and a group's list of specs, each of which is judged."""


def kinds_of_vllm():
    """Return vLLM's classes of cache specs by name."""
    return {
        name: kind
        for name, kind in vars(kv).items()
        if isinstance(kind, type) and issubclass(kind, kv.KVCacheSpec) and name not in NO_GROUPS
    }


def test_every_kind_of_group_of_vllm_is_known():
    """A class that a release adds has to be read: it must not be taken for the class that it is derived from."""
    assert kinds_of_vllm().keys() - {*ACCEPTED_KINDS, *REFUSED_KINDS} == set()


@pytest.mark.parametrize("name", sorted(ACCEPTED_KINDS))
def test_accepted_kinds_say_what_they_keep(name):
    kind = kinds_of_vllm()[name]
    spec = (
        recurrent("GDN_ATTN", True)
        if name == "MambaSpec"
        else attention(kind, **ACCEPTED_KINDS[name])
    )
    keeps = {"Chun": "chunk", "Circ": "state", "Mamb": "state", "Slid": "window"}
    assert group_info(spec, 0, 1).keeps == keeps.get(name[:4], "all")


@pytest.mark.parametrize("name", sorted(REFUSED_KINDS))
def test_other_kinds_are_refused_by_name_with_the_reason(name):
    if name not in (kinds := kinds_of_vllm()):
        pytest.skip("this release of vLLM does not have it")
    spec = object.__new__(kinds[name])  # nothing but the class is looked at
    with pytest.raises(GeometryError, match=name) as refused:
        group_info(spec, 0, 1)
    assert refused.value.context["why"] == REFUSED_KINDS[name]


def test_prompts_whose_tokens_see_later_ones_are_refused():
    """Of a model with a prefix LM: vLLM itself gives it no prefix cache."""
    with pytest.raises(GeometryError, match="FullAttentionSpec") as refused:
        group_info(attention(non_causal=True), 0, 1)
    assert "see later ones" in refused.value.context["why"]


def test_windows_whose_tokens_are_computed_again_are_refused():
    """DeepSeek-V4.1's."""
    if not hasattr(kv.SlidingWindowMLASpec, "bounded_replay"):
        pytest.skip("this release of vLLM does not have them")
    spec = attention(kv.SlidingWindowMLASpec, sliding_window=64, bounded_replay=True)
    with pytest.raises(GeometryError, match="SlidingWindowMLASpec") as refused:
        group_info(spec, 0, 1)
    assert "--no-swa-bounded-replay" in refused.value.context["why"]


def test_a_kind_that_a_later_release_adds_is_refused():
    class KeptElsewhereSpec(kv.FullAttentionSpec):
        pass

    with pytest.raises(GeometryError, match="nobody has read what it stores"):
        group_info(attention(KeptElsewhereSpec), 0, 1)


@pytest.mark.parametrize("sizes", [(4, 2), (1, 4), (2, 8)])
def test_a_kimi_delta_state_is_cut_like_its_heads(sizes):
    """Kimi-Linear's and K3's: a rank's Q, K and V channels, one after the other, and its heads' states. The kernels
    that write them need a GPU, so this cuts a whole model's state as their projections are sharded.
    """
    heads, dim, width = 8, 4, MambaStateShapeCalculator.kda_state_shape(1, 8, 4)[0]
    taps = min(width)
    conv = torch.arange(3 * heads * dim * taps, dtype=torch.int16).reshape(3, heads, dim, taps)
    temporal = torch.randn(heads, dim, dim)
    found = []
    for tp_size in sizes:
        by_name = {}
        for rank in range(tp_size):
            shapes = MambaStateShapeCalculator.kda_state_shape(tp_size, heads, dim)
            spec = kv.MambaSpec(
                block_size=SIZE,
                shapes=shapes,
                dtypes=(torch.bfloat16, torch.float32),
                mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            )
            own = slice(rank * heads // tp_size, (rank + 1) * heads // tp_size)
            channels = conv[:, own].reshape(-1, taps)
            stored = channels if shapes[0][1] == taps else channels.T
            raw_bytes = [
                stored.contiguous().view(torch.uint8).flatten(),
                temporal[own].contiguous().view(torch.uint8).flatten(),
            ]
            page = torch.cat(raw_bytes).view(torch.int8).reshape(1, 1, 1, -1)
            parts = state_parts(
                LayerCache("l", spec, page), TpSplit(rank, tp_size), is_dim_first=stored is channels
            )
            for geometry, view in parts:
                whole = by_name.setdefault(geometry.name, [])
                assert (len(whole), geometry.head_stop) == (
                    geometry.head_start,
                    geometry.head_start + view.num_heads,
                )
                whole += read(view)[0].copy().tolist()
        found.append(by_name)
    assert list(found[0]) == ["conv-Q", "conv-K", "conv-V", "temporal"]
    assert found[0] == found[1]
    for number, name in enumerate(found[0]):
        expected = temporal if name == "temporal" else conv[number]
        raw_bytes = expected.contiguous().view(torch.uint8).flatten().numpy()
        assert np.array(found[0][name], dtype=np.uint8).tobytes() == raw_bytes.tobytes()
