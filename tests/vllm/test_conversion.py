"""Types and rules that vLLM's layers state, and what their own kernels store."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import _custom_ops  # noqa: F401 - loads the kernels
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconnector.integrations.vllm.caches import register_groups
from kvconnector.topology.geometry import UNKNOWN_ROUNDING
from kvconnector_kernels.relayout import Conversion, PagedSide, PartTable, relayout
from tests.vllm.cache_world import (
    DIM,
    HEADS,
    NAMES,
    SIZE,
    attention,
    one_group,
    placed,
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
    impl = object.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = "decoder", kv_cache_dtype
    return impl


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


def store_every_number(impl_of, kv_cache_dtype, spec, scale, device, **more):
    """Return a registered group whose first layer has stored every number of bf16, by its own backend, as K and as V of
    each head.
    """
    layer = layer_of(impl_of(kv_cache_dtype), kv_cache_dtype, scale, device)
    tokens = len(EVERY) // DIM
    config, caches = one_group(spec, KVCacheLayout.LBHNC, num_blocks=tokens // SIZE)
    engine = vllm_config(layer=layer, **more)
    engine.cache_config.cache_dtype = kv_cache_dtype
    (group,) = register_groups(engine, config, caches, placed())
    numbers = EVERY.view(torch.bfloat16).view(tokens, 1, DIM).expand(-1, HEADS, -1)
    cache = caches[NAMES[0]]
    engine.compilation_config.static_forward_context[NAMES[0]].impl.do_kv_cache_update(
        engine.compilation_config.static_forward_context[NAMES[0]],
        *(numbers.contiguous().to(cache.device) for _ in "kv"),
        cache,
        torch.arange(tokens, device=cache.device),
    )
    return group, caches


def side_of(view):
    rows = np.array([[view.address, *view.strides_bytes]], np.int64)
    sizes = dict(
        zip(("num_blocks", "num_heads", "block_size", "head_dim"), view.shape, strict=True)
    )
    table = PartTable(rows, **sizes, item_size_bytes=view.item_size_bytes, device="cpu")
    return PagedSide(table, np.arange(view.shape[0], dtype=np.int32))


@needs_fp8_on_cpu
@pytest.mark.parametrize("kv_cache_dtype", ELEMENTS)
@pytest.mark.parametrize("scale", [1.0, 0.0371, 3.7])
def test_a_conversion_has_the_bytes_that_the_cpu_kernel_stores(kv_cache_dtype, scale):
    where = {"backend": "CPU_ATTN", "isa": "vec"}
    wide, _caches = store_every_number(
        cpu_impl, "auto", attention(dtype=torch.bfloat16), 1.0, "cpu", **where
    )
    own, caches = store_every_number(
        cpu_impl, kv_cache_dtype, attention(**FP8), scale, "cpu", **where
    )
    (part, _), element = own.cache.geometry.parts, ELEMENTS[kv_cache_dtype]
    assert (part.element, part.rounding) == (element, "truncated")
    want = caches[NAMES[0]].clone()
    caches[NAMES[0]].zero_()
    for number, (src, dst) in enumerate(zip(wide.cache.views[0], own.cache.views[0], strict=True)):
        pairs = np.ones((1, HEADS, 2), np.float32)
        pairs[:, :, 1] = own.cache.geometry.scales[0][number]
        conversion = Conversion("bfloat16", element, pairs, "cpu", rounding=part.rounding)
        counts = {"num_parts": 1, "num_heads": HEADS, "num_tokens": len(EVERY) // DIM}
        relayout(side_of(src), side_of(dst), conversion=conversion, **counts)
    assert torch.equal(caches[NAMES[0]], want)
