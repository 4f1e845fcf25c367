"""Types and rules that vLLM's layers state, and what their own kernels store."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import _custom_ops
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconnector.integrations.vllm.caches import register_groups
from kvconnector.topology.geometry import UNKNOWN_ROUNDING
from kvconnector_kernels.relayout import (
    Conversion,
    PagedSide,
    PartTable,
    relayout,
    upload_block_ids,
)
from tests.vllm.cache_world import (
    DIM,
    HEADS,
    NAMES,
    SIZE,
    attention,
    engine_of,
    one_group,
    placed,
    refused_for,
    registered,
    vllm_config,
)

pytestmark = pytest.mark.vllm

FP8 = {"dtype": torch.uint8, "kv_quant_mode": kv.KVQuantMode.FP8_PER_TENSOR}
ELEMENTS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
EVERY = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
needs_fp8_on_cpu = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported()
    or torch.cpu._is_amx_tile_supported()
    or not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"),
    reason="vLLM's CPU attention stores fp8 in rows with AVX-512, in tiles with AMX; sources alone have no kernels",
)


def layer_of(impl, kv_cache_dtype, scale=1.0, device="cpu"):
    """Return what a backend reads of a layer when it stores K and V."""
    return {
        "impl": impl,
        "kv_cache_dtype": kv_cache_dtype,
        "_k_scale": torch.tensor(scale, device=device),
        "_v_scale": torch.tensor(2 * scale, device=device),
        "_k_scale_float": torch.tensor(scale).item(),
        "_v_scale_float": torch.tensor(2 * scale).item(),
    }


def cpu_impl(kv_cache_dtype):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl = object.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = "decoder", kv_cache_dtype
    return impl


def flash_impl(kv_cache_dtype):
    """Return the backend whose `reshape_and_cache_flash` FLASHINFER and FLEX_ATTENTION call, too."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    impl = object.__new__(FlashAttentionImpl)
    impl.attn_type, impl.kv_cache_dtype, impl.head_size = "decoder", kv_cache_dtype, DIM
    return impl


PACKED_FP8 = {
    "dtype": torch.float8_e4m3fn,
    "kv_quant_mode": kv.KVQuantMode.FP8_PER_TOKEN_HEAD,
    "state_content_bytes": 2 * DIM + 8,
}
INDEX = {"num_kv_heads": 1, "head_size": 132, "dtype": torch.uint8, "block_size": 64}


@pytest.mark.parametrize(
    "spec, backend",
    [
        (attention(**FP8), "FLASH_ATTN"),
        (attention(**PACKED_FP8), "TRITON_ATTN"),
        (attention(kv.MLAAttentionSpec, **INDEX), "DEEPSEEK_V32_INDEXER"),
    ],
    ids=["numbers", "scales of each token and head", "planes"],
)
def test_gpus_with_an_fp8_of_their_own_are_refused(monkeypatch, spec, backend):
    """AMD's MI300 has `float8_e4m3fnuz`, in which the bytes of another GPU's fp8 are half of its numbers."""
    layer = layer_of(FakeImpl(lambda *_: None), "fp8")
    usual = engine_of([registered(spec, backend=backend, layer=layer)[0]])
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    fnuz = engine_of([registered(spec, backend=backend, layer=layer)[0]])
    for ours, theirs in ((usual, fnuz), (fnuz, usual)):
        assert "elements" in refused_for(ours, theirs)
        assert refused_for(ours, ours) == set()
    plain = {"dtype": torch.bfloat16}
    assert registered(attention(**plain))[0].cache.geometry.parts[0].element == "bfloat16"


class FakeImpl:
    """A backend that packs K and V of a head, and stores by a function of values and a scale."""

    def __init__(self, store):
        self._store = store

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        where = slot_mapping // kv_cache.shape[2], slice(None), slot_mapping % kv_cache.shape[2]
        both = ((key, layer._k_scale), (value, layer._v_scale))
        kv_cache[where] = torch.cat([self._store(each, scale) for each, scale in both], -1)


def saturated(values, scale):
    found = (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    found[values.isnan()] = 0x7F
    return found


def half_up(values, scale):
    """Rounds ties away from zero, as nobody does."""
    found = saturated(values, scale)
    beyond = torch.nextafter(values.float() / scale, values.float() * torch.inf)
    return torch.where(values.isnan(), found, saturated(beyond, 1.0))


def parts_of(spec, backend, layer, **more):
    group, _ = registered(spec, backend=backend, layer=layer, **more)
    return {(part.element, part.rounding) for part in group.cache.geometry.parts}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_state_their_type(dtype):
    name = str(dtype).removeprefix("torch.")
    stated = {("" if dtype == torch.float32 else name, "nearest")}
    assert parts_of(attention(dtype=dtype), "FLASH_ATTN", ()) == stated
    latent = attention(kv.MLAAttentionSpec, dtype=dtype, num_kv_heads=1, head_size_v=0)
    assert parts_of(latent, "FLASHMLA", ()) == stated
    packed = attention(dtype=dtype, state_content_bytes=2 * DIM)
    assert parts_of(packed, "TURBOQUANT", ()) == {("", "nearest")}


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
@pytest.mark.parametrize("store, rule", [(saturated, "nearest"), (half_up, UNKNOWN_ROUNDING)])
def test_the_rule_is_that_by_which_the_backend_stores(layout, store, rule):
    layer = layer_of(FakeImpl(store), "fp8", scale=0.37)
    assert parts_of(attention(**FP8), "FLASH_ATTN", layer, layout=layout) == {
        ("float8_e4m3fn", rule)
    }


@pytest.mark.parametrize("impl", [None, SimpleNamespace(), FakeImpl(lambda values, scale: 1 / 0)])
def test_a_backend_that_cannot_be_asked_has_no_rule(impl):
    layer = layer_of(impl, "fp8")
    assert parts_of(attention(**FP8), "FLASH_ATTN", layer) == {("float8_e4m3fn", UNKNOWN_ROUNDING)}


def test_layers_of_a_group_that_store_by_several_rules_have_none():
    config, caches = one_group(attention(**FP8), KVCacheLayout.LBHNC)
    engine = vllm_config("FLASH_ATTN")
    other = type("OtherImpl", (FakeImpl,), {})
    impls = FakeImpl(saturated), other(half_up), FakeImpl(saturated)
    for name, impl in zip(NAMES, impls, strict=True):
        layer = engine.compilation_config.static_forward_context[name]
        layer.__dict__.update(layer_of(impl, "fp8"))
    (group,) = register_groups(engine, config, caches, placed())
    assert {part.rounding for part in group.cache.geometry.parts} == {UNKNOWN_ROUNDING}


def stored(spec, layer, store, *, device, layout=KVCacheLayout.LBHNC, **engine):
    """Return a registered group, and its caches, whose first layer has stored every number of bf16: `store` stores
    `[token, dim]` numbers, each in the slot of its row, into a cache of a layer.
    """
    tokens = len(EVERY) // spec.head_size
    config, caches = one_group(spec, layout, num_blocks=tokens // SIZE, device=device)
    made = vllm_config(layer=layer, **engine)
    made.cache_config.cache_dtype = layer["kv_cache_dtype"]
    (group,) = register_groups(made, config, caches, placed())
    numbers = EVERY.view(torch.bfloat16).view(tokens, spec.head_size).to(device)
    slots = torch.arange(tokens, device=device)
    (first, *_) = made.compilation_config.static_forward_context.values()
    store(first, numbers, caches[NAMES[0]], slots)
    return group, caches[NAMES[0]]


def store_by_impl(layer, numbers, cache, slots):
    """Store numbers as K and as V of each head, by the layer's own backend."""
    every = numbers.unsqueeze(1).expand(-1, HEADS, -1).contiguous()
    layer.impl.do_kv_cache_update(layer, every, every.clone(), cache, slots)


def store_latents(layer, numbers, cache, slots):
    """Store numbers as latents with rotary keys of 64 elements, by the kernel of vLLM's backends for MLA."""
    _custom_ops.concat_and_cache_mla(
        numbers[:, :-64].contiguous(),
        numbers[:, -64:].contiguous(),
        cache.squeeze(1),
        slots,
        layer.kv_cache_dtype,
        layer._k_scale,
    )


def side_of(view, device):
    rows = np.array([[view.address, *view.strides_bytes]], np.int64)
    sizes = dict(
        zip(("num_blocks", "num_heads", "block_size", "head_dim"), view.shape, strict=True)
    )
    table = PartTable(rows, **sizes, item_size_bytes=view.item_size_bytes, device=device)
    ids = upload_block_ids(list(range(view.shape[0])), num_blocks=view.shape[0], device=device)
    return PagedSide(table, ids)


def check_converted(wide, own, cache, rounding):
    """Convert the first layer of a group in bf16 to fp8, and compare with what is in the cache of that layer."""
    want = cache.clone()
    cache.zero_()
    device, geometry = own.cache.device, own.cache.geometry
    views = zip(wide.cache.views[0], own.cache.views[0], strict=True)
    for part, scales, (src, dst) in zip(geometry.parts, geometry.scales[0], views, strict=True):
        blocks, heads, block_size, _ = dst.shape
        pairs = np.ones((1, heads, 2), np.float32)
        pairs[:, :, 1] = scales
        conversion = Conversion("bfloat16", part.element, pairs, device, rounding=rounding)
        counts = {"num_parts": 1, "num_heads": heads, "num_tokens": blocks * block_size}
        relayout(side_of(src, device), side_of(dst, device), conversion=conversion, **counts)
    assert torch.equal(cache, want)


@pytest.mark.parametrize(
    "impl_of, rule, where, kv_cache_dtype",
    [
        *(
            pytest.param(
                cpu_impl,
                "truncated",
                {"device": "cpu", "backend": "CPU_ATTN", "isa": "vec"},
                name,
                marks=needs_fp8_on_cpu,
                id=f"cpu-{name}",
            )
            for name in ELEMENTS
        ),
        # vLLM's attention on GPUs takes no e5m2
        *(
            pytest.param(
                flash_impl,
                "nearest",
                {"device": "cuda", "backend": "FLASH_ATTN", "layout": KVCacheLayout.LBNHC},
                name,
                marks=pytest.mark.gpu,
                id=f"cuda-{name}",
            )
            for name in ("fp8", "fp8_e4m3")
        ),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.0371, 3.7])
def test_a_conversion_has_the_bytes_that_the_engines_kernel_stores(
    impl_of, rule, where, kv_cache_dtype, scale
):
    device = where["device"]
    layers = [
        layer_of(impl_of(name), name, factor, device)
        for name, factor in (("auto", 1.0), (kv_cache_dtype, scale))
    ]
    wide, _ = stored(attention(dtype=torch.bfloat16), layers[0], store_by_impl, **where)
    own, cache = stored(attention(**FP8), layers[1], store_by_impl, **where)
    part, _ = own.cache.geometry.parts
    assert (part.element, part.rounding) == (ELEMENTS[kv_cache_dtype], rule)
    check_converted(wide, own, cache, part.rounding)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 0.0371, 3.7])
def test_latents_are_stored_by_the_nearest_number_too(scale):
    """Though engines do not state so: no backend is asked how it stores latents."""
    latent = {"num_kv_heads": 1, "head_size": 512}
    where = {"device": "cuda", "backend": "FLASHMLA", "layout": KVCacheLayout.LBNHC}
    found = [
        stored(
            attention(kv.MLAAttentionSpec, **latent, **numbers),
            layer_of(None, name, factor, "cuda"),
            store_latents,
            **where,
        )
        for name, factor, numbers in (
            ("auto", 1.0, {"dtype": torch.bfloat16}),
            ("fp8", scale, FP8),
        )
    ]
    (wide, _), (own, cache) = found
    assert {part.rounding for part in own.cache.geometry.parts} == {UNKNOWN_ROUNDING}
    check_converted(wide, own, cache, "nearest")
