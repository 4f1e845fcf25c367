"""Rows of K and V that vLLM's backends store with their own Triton kernels: natively on a GPU, elsewhere in Triton's
interpreter.

vLLM imports no Triton on a CPU, so there `save` is called in a process of its own, which has let vLLM import it before
anything else, see `kernel_pages.with_triton`.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.vllm.cache_world import HEADS, NAMES, attention, registered

SIZE, DIM, SMALL_DIM = 16, 64, 32
"""Rows of a block, and the elements of K and, where V has fewer, of V."""
PART, WHOLE = SIZE + SIZE // 2, 2 * SIZE
STORES = {
    "plain": ("TRITON_ATTN", "auto", torch.float32),
    "a scale for each int8 head": ("TRITON_ATTN", "int8_per_token_head", torch.int8),
    "a scale for each fp8 head": ("TRITON_ATTN", "fp8_per_token_head", torch.float8_e4m3fn),
    "a scale for each int4 head": ("TRITON_ATTN", "int4_per_token_head", torch.uint8),
    "images and text by two backends": ("TRITON_FLASH_ATTN", "auto", torch.float32),
    "values of another size": ("TRITON_ATTN_DIFFKV", "auto", torch.float32),
    "turboquant with K in fp8": ("TURBOQUANT", "turboquant_k8v4", torch.uint8),
    "turboquant": ("TURBOQUANT", "turboquant_3bit_nc", torch.uint8),
    "ultraquant": ("ULTRAQUANT", "ultraquant_4bit", torch.uint8),
}
"""The backend, vLLM's name of the type, and the elements of each cache."""
MODULES = {
    "TRITON_ATTN": ("triton_attn", "TritonAttentionBackend"),
    "TRITON_FLASH_ATTN": ("triton_flash_attn", "TritonFlashAttentionBackend"),
    "TRITON_ATTN_DIFFKV": ("triton_attn_diffkv", "TritonAttentionDiffKVBackend"),
    "TURBOQUANT": ("turboquant_attn", "TurboQuantAttentionBackend"),
    "ULTRAQUANT": ("ultraquant_attn", "UltraQuantAttentionBackend"),
}


CASES = [
    (name, layout)
    for name, (backend, *_) in STORES.items()
    for layout in ("LBHNC", "LBNHC", "BLHNC")
    # some backends have vLLM lay out all caches as they need it
    if layout == "LBNHC" or backend not in ("TURBOQUANT", "ULTRAQUANT")
]
"""Each store with each layout that its backend takes."""


def backend_of(name: str) -> Any:
    """Return the class of a store's backend. Raises ImportError: this release of vLLM has none."""
    module, found = MODULES[STORES[name][0]]
    return getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), found)


def plain_spec(name: str) -> kv.AttentionSpec:
    """Return the spec of a layer before its backend has seen it."""
    backend, dtype_name, dtype = STORES[name]
    return attention(
        block_size=SIZE,
        head_size=DIM,
        head_size_v=SMALL_DIM if backend == "TRITON_ATTN_DIFFKV" else DIM,
        dtype=dtype,
        kv_quant_mode=kv.get_kv_quant_mode(dtype_name),
    )


@functools.cache
def engine_config() -> VllmConfig:
    """Return a configuration for backends that ask for one when they are made."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=WHOLE, is_diffusion=False)
    return config


def store(name: str, cache: torch.Tensor, rows: int) -> None:
    """Store the first `rows` of the same random rows, each in the slot of its number."""
    backend, dtype_name, _ = STORES[name]
    generator = torch.Generator().manual_seed(3)
    k, v = (
        torch.randn(WHOLE, HEADS, dim, generator=generator)[:rows].to(cache.device)
        for dim in (DIM, plain_spec(name).head_size_v)
    )
    if backend == "ULTRAQUANT":  # it takes no others
        k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)
    one = torch.ones(1, device=cache.device)
    layer, slots = SimpleNamespace(_k_scale=one, _v_scale=one), torch.arange(rows)
    with set_current_vllm_config(engine_config()):
        impl = backend_of(name).get_impl_cls()(2 * HEADS, DIM, 1.0, HEADS, None, None, dtype_name)
    slots = slots.to(cache.device)
    if backend in ("TURBOQUANT", "ULTRAQUANT"):
        impl._ensure_on_device(layer, cache.device)
        impl._store_kv(k, v, cache.transpose(1, 2), slots, layer)
    else:
        impl.do_kv_cache_update(layer, k, v, cache, slots)


def stored(name: str, layout: str, device: str = "cpu") -> dict[str, Any]:
    """Return the bytes of caches in vLLM's layout, of the `first` row alone, of a `part` of `PART` rows and of the
    `whole`, and the `content` bytes of a row in their spec.
    """
    backend = backend_of(name)
    assert layout in [each.name for each in backend.supported_kv_cache_layouts() or KVCacheLayout]
    spec = backend.customize_spec(plain_spec(name))
    _, caches = registered(spec, KVCacheLayout[layout], STORES[name][0])
    like = caches[NAMES[1]]
    count = like.untyped_storage().nbytes() // like.element_size()
    found: dict[str, Any] = {"content": spec.state_content_bytes}
    for what, rows in (("first", 1), ("part", PART), ("whole", WHOLE)):
        memory = torch.zeros(count, dtype=like.dtype, device=device)
        store(name, memory.as_strided(like.shape, like.stride(), like.storage_offset()), rows)
        found[what] = memory.view(torch.uint8).cpu()
    return found


def save(path: str) -> None:
    """Write what `stored` returns for each of `CASES` to a file, None for backends that this release lacks."""
    # vLLM asks how wide a GPU's accesses are
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    found: dict[tuple[str, str], dict[str, Any] | None] = {}
    for name, layout in CASES:
        try:
            backend_of(name)
        except ImportError:
            found[name, layout] = None
        else:
            found[name, layout] = stored(name, layout)
    torch.save(found, path)
