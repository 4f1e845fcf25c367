"""The caches of served models as vLLM plans and allocates them, and which of their bytes a decode engine needs.

Shapes are those of the published `config.json`s, on one rank of a deployment's, with few layers. Specs have the
arguments that each model's `get_kv_cache_spec` gives them; vLLM builds these models on GPUs only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from tests.vllm.compressed_world import Engine

Layers = dict[str, tuple[Any, str]]
MAX_TOKENS = 4096
DRAFTING = "mtp.layers.0.self_attn.attn"


def latent(width: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> kv.MLAAttentionSpec:
    arguments = {"num_kv_heads": 1, "max_tp_shards": 1, "head_size": width, "dtype": dtype}
    return kv.MLAAttentionSpec(**{"block_size": 64, **arguments, **options})


def grouped(heads: int, dim: int, kind: Any = kv.FullAttentionSpec, **options: Any) -> Any:
    arguments = {"num_kv_heads": heads, "head_size": dim, "dtype": torch.bfloat16}
    return kind(**{"block_size": 16, **arguments, **options})


def states(
    shapes: tuple[tuple[int, ...], ...],
    page_bytes: int | None,
    num_spec: int = 0,
    kind: str = "GDN_ATTN",
    **options: Any,
) -> tuple[kv.MambaSpec, str]:
    """Return a recurrent layer's states in pages as large as the attention's, as the platform's hook pads them."""
    arguments = {"block_size": MAX_TOKENS, "dtypes": (torch.bfloat16, torch.float32)}
    spec = kv.MambaSpec(
        shapes=shapes,
        page_size_padded=page_bytes,
        mamba_type=MambaAttentionBackendEnum[kind],
        num_speculative_blocks=num_spec,
        **{**arguments, **options},
    )
    return spec, kind


def kimi_delta(heads: int, dim: int, num_spec: int = 0) -> tuple[tuple[int, ...], ...]:
    return MambaStateShapeCalculator.kda_state_shape(
        1, heads, dim, conv_kernel_size=4, num_spec=num_spec
    )


def kimi_k2() -> Layers:
    return {f"model.layers.{n}.self_attn.attn": (latent(576), "FLASHMLA") for n in range(3)}


def kimi_linear() -> Layers:
    """Three delta layers, then one of MLA: 4 heads of 32, as a rank of 8 has."""
    attention = latent(576, block_size=256)
    found: Layers = {}
    for number in range(4):
        if number % 4 == 3:
            found[f"model.layers.{number}.self_attn.attn"] = attention, "FLASHMLA"
        else:
            found[f"model.layers.{number}.self_attn"] = states(
                kimi_delta(4, 128), attention.page_size_bytes
            )
    return found


def kimi_k3() -> Layers:
    """As Kimi-Linear, with an fp8 cache and a token of speculation: a state has an input and a block more."""
    attention = latent(
        576, torch.uint8, block_size=512, kv_quant_mode=kv.KVQuantMode.FP8_PER_TENSOR
    )
    found: Layers = {}
    for number in range(4):
        name = f"language_model.model.layers.{number}.self_attn"
        if number % 4 == 3:
            found[f"{name}.attn"] = attention, "FLASHINFER_MLA"
        else:
            found[name] = states(kimi_delta(4, 128, 1), attention.page_size_bytes, 1)
    return found


def qwen3_5() -> Layers:
    """Three delta layers, then one of GQA: 4 key heads and 8 value heads."""
    return _delta_and_attention(528, 0)


def qwen3_5_mtp(num_spec: int, *, has_mtp: bool = True) -> Layers:
    """Qwen3.5's with twice as many layers, and its own layer that drafts, which is one of GQA."""
    found = _delta_and_attention(560, num_spec, num_layers=16)
    attention, backend = found["language_model.model.layers.3.self_attn.attn"]
    if has_mtp:
        found[DRAFTING] = attention, backend
    return found


def aligned(num_spec: int = 0, checkpoints: int = 0) -> Layers:
    """Qwen3.5's with a prefix cache, as vLLM starts it by default: a state lies where its block of tokens ends, drafts'
    behind it, and a checkpoint of the prompt before it.
    """
    options: dict[str, Any] = {"block_size": 560, "mamba_cache_mode": "align"}
    if checkpoints:  # vLLM 0.33
        options |= {"num_prefill_checkpoint_blocks": checkpoints}
        options |= {"prefill_checkpoint_alignment": 16}
    return _delta_and_attention(560, num_spec, **options)


def _delta_and_attention(
    attention_block: int, num_spec: int, *, num_layers: int = 8, **options: Any
) -> Layers:
    """`options` are those of the delta layers' spec, which has a block size of its own."""
    attention = grouped(1, 256, block_size=attention_block)
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 4, 8, 128, 128, 4, num_spec)
    found: Layers = {}
    for number in range(num_layers):
        name = f"language_model.model.layers.{number}"
        if number % 4 == 3:
            found[f"{name}.self_attn.attn"] = attention, "FLASH_ATTN"
        else:
            page = attention.page_size_bytes
            found[f"{name}.linear_attn"] = states(shapes, page, num_spec, **options)
    return found


def hybrid(kind: str, shapes: tuple[tuple[int, ...], ...], *dtypes: torch.dtype) -> Layers:
    """Three recurrent layers, then one of GQA, whose blocks are long enough for a state."""
    state_bytes = sum(
        int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    spec = grouped(8, 128, block_size=-(-state_bytes // (16 * 8 * 256 * 2)) * 16)
    found: Layers = {
        f"model.layers.{number}.mixer": states(
            shapes, spec.page_size_bytes, kind=kind, dtypes=dtypes
        )
        for number in range(3)
    }
    found["model.layers.3.self_attn.attn"] = spec, "FLASH_ATTN"
    return found


def nemotron_h() -> Layers:
    shapes = MambaStateShapeCalculator.mamba2_state_shape(1, 1024, 2, 16, 64, 128, 4)
    return hybrid("MAMBA2", shapes, torch.bfloat16, torch.float32)


def jamba() -> Layers:
    shapes = MambaStateShapeCalculator.mamba1_state_shape(1, 1024, 16, 4)
    return hybrid("MAMBA1", shapes, torch.bfloat16, torch.bfloat16)


def lfm2() -> Layers:
    """A convolution alone."""
    shapes = MambaStateShapeCalculator.short_conv_state_shape(1, 1024, 3)
    return hybrid("SHORT_CONV", shapes, torch.bfloat16)


def minimax_01() -> Layers:
    """Linear attention, whose state is one matrix a head."""
    return hybrid("LINEAR", ((4, 96, 96),), torch.float32)


def llama_4() -> Layers:
    """Chunks of tokens on three of four layers, here of 128."""
    chunk = grouped(2, 64, kv.ChunkedLocalAttentionSpec, attention_chunk_size=128)
    return {
        f"model.layers.{n}.self_attn.attn": (chunk if n % 4 != 3 else grouped(2, 64), "FLASH_ATTN")
        for n in range(8)
    }


def gemma_4() -> Layers:
    """Windows with other heads than the layers that keep all tokens: pages of unlike sizes share a block."""
    window = grouped(4, 256, kv.SlidingWindowSpec, sliding_window=128)
    return {
        f"model.layers.{n}.self_attn.attn": (
            window if n % 3 != 2 else grouped(2, 512),
            "TRITON_FLASH_ATTN",
        )
        for n in range(6)
    }


def skipped_windows(mode: kv.KVQuantMode, dtype: torch.dtype, content: int | None = None) -> Layers:
    """Quantised caches beside unquantised windows (`--kv-cache-dtype-skip-layers sliding_window`)."""
    window = grouped(8, 64, kv.SlidingWindowSpec, sliding_window=128)
    options = {"kv_quant_mode": mode, "dtype": dtype, "state_content_bytes": content}
    whole = grouped(8, 64, block_size=32, **options)
    return {f"model.layers.{n}.attn": (whole if n % 2 else window, "TRITON_ATTN") for n in range(4)}


def gpt_oss() -> Layers:
    """Windows of 128 tokens on every other layer."""
    window = grouped(8, 64, kv.SlidingWindowSpec, sliding_window=128)
    return {
        f"model.layers.{n}.attn": (grouped(8, 64) if n % 2 else window, "FLASH_ATTN")
        for n in range(4)
    }


def glm_5() -> Layers:
    """GLM-5.1 and 5.2: only the first of the layers that share a choice of tokens has an indexer."""
    packed = {"state_content_bytes": 656, "cache_dtype_str": "fp8_ds_mla"}
    found: Layers = {}
    for number in range(5):
        name = f"model.layers.{number}.self_attn"
        leads = number in (0, 1, 4)
        options: dict[str, Any] = {"is_index_group_leader": leads}
        found[f"{name}.attn"] = latent(576, torch.uint8, **packed, **options), "FLASHMLA_SPARSE"
        if leads:
            index = latent(132, torch.uint8, cache_role=kv.SparseCacheRole.INDEXER)
            found[f"{name}.indexer.k_cache"] = index, "DEEPSEEK_V32_INDEXER"
    return found


def deepseek_v3_2() -> Layers:
    """Each layer with an indexer; the last one is its draft's (MTP)."""
    packed = {"state_content_bytes": 656, "cache_dtype_str": "fp8_ds_mla"}
    found: Layers = {}
    for number in range(4):
        name = f"model.layers.{number}.self_attn"
        found[f"{name}.attn"] = latent(576, torch.uint8, **packed), "FLASHMLA_SPARSE"
        index = latent(132, torch.uint8, cache_role=kv.SparseCacheRole.INDEXER)
        found[f"{name}.indexer.k_cache"] = index, "DEEPSEEK_V32_INDEXER"
    return found


def glm_5_3() -> Layers:
    """GLM-5.3-Flash: keys of four tokens in a row, and in a ring those of the row that has begun, with their gates."""
    packed = {"state_content_bytes": 656, "cache_dtype_str": "fp8_ds_mla", "block_size": 256}
    keys = {"block_size": 256, "tokens_per_state": 4, "cache_role": kv.SparseCacheRole.INDEXER}
    ring = grouped(2, 128, kv.CircularBufferSpec, block_size=4, head_size_v=0, dcp_sharded=False)
    found: Layers = {}
    for number in range(3):
        name = f"model.layers.{number}.self_attn"
        found[f"{name}.attn"] = latent(576, torch.uint8, **packed), "FLASHMLA_SPARSE"
        found[f"{name}.indexer.k_cache"] = latent(132, torch.uint8, **keys), "DEEPSEEK_V32_INDEXER"
        found[f"{name}.indexer.tail_cache"] = ring, "KPOOL_TAIL"
    return found


def minimax_m3(index: torch.dtype = torch.bfloat16, backend: str = "MINIMAX_M3_SPARSE") -> Layers:
    """A dense layer, then sparse ones of the same GQA, each with an indexer's keys."""
    found: Layers = {}
    for number in range(4):
        name = f"language_model.model.layers.{number}.self_attn"
        spec = grouped(4, 128, block_size=128)
        found[f"{name}.attn"] = spec, backend if number else "FLASH_ATTN"
        if number:
            keys = latent(128, index, block_size=128, cache_role=kv.SparseCacheRole.INDEXER)
            found[f"{name}.attn.indexer.index_cache"] = keys, "MINIMAX_M3_SPARSE_INDEXER"
    return found


MODELS: dict[str, Callable[[], Layers]] = {
    "kimi-k2": kimi_k2,
    "kimi-linear": kimi_linear,
    "kimi-k3": kimi_k3,
    "qwen3.5": qwen3_5,
    "gpt-oss": gpt_oss,
    "deepseek-v3.2": deepseek_v3_2,
    "glm-5": glm_5,
    "glm-5.3": glm_5_3,
    "nemotron-h": nemotron_h,
    "jamba": jamba,
    "lfm2": lfm2,
    "minimax-01": minimax_01,
    "llama-4": llama_4,
    "gemma-4": gemma_4,
    "fp8, bf16 windows": lambda: skipped_windows(kv.KVQuantMode.FP8_PER_TENSOR, torch.uint8),
    "int8, bf16 windows": lambda: skipped_windows(
        kv.KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8, 2 * 64 + 8
    ),
    "int4, bf16 windows": lambda: skipped_windows(
        kv.KVQuantMode.INT4_PER_TOKEN_HEAD, torch.uint8, 2 * 32 + 8
    ),
    "minimax-m3": minimax_m3,
    "minimax-m3 fp8 index": lambda: minimax_m3(torch.float8_e4m3fn, "CUTLASS_MSA"),
}


class Moved(NamedTuple):
    """Bytes of an engine's memory: those of a row or a state that a request's load brings, or of a row beside them in
    their blocks.
    """

    is_read: bool
    where: np.ndarray[Any, np.dtype[np.intp]]
    """Offsets in the memory."""


def moved(engine: Engine, name: str, num_tokens: int, without: str | None = None) -> list[Moved]:
    """Return what a load of a request's first `num_tokens` tokens brings, row by row: obviously right, and slow.

    The rows of the layer `without` are not read. The block in which a window begins comes whole, since vLLM caches it
    like any other.
    """
    base = min(tensor.data_ptr() for tensor in engine.caches.values())
    found = []
    for table, group in zip(engine.tables[name], engine.cache_config.kv_cache_groups, strict=True):
        for layer in sorted(group.layer_names, key=lambda name: name == DRAFTING):
            backend, spec = engine.layers[layer][1], group.kv_cache_spec
            # the planner may have lengthened blocks, so that all pages are equally large
            spec = getattr(spec, "kv_cache_specs", {}).get(layer, spec)
            tensor = engine.caches[layer]
            item = tensor.element_size()
            start = tensor.data_ptr() - base
            block_bytes = tensor.stride(0) * item
            if isinstance(spec, kv.MambaSpec):
                if spec.mamba_cache_mode == "align":
                    block = table[-(-num_tokens // spec.block_size) - 1]
                else:
                    (block,) = table[: len(table) - spec.num_speculative_blocks]
                at = start + block * block_bytes
                state = np.arange(at, at + spec.state_content_size_bytes)
                found.append(Moved(True, np.delete(state, _of_drafts(spec))))
                continue
            if isinstance(spec, kv.CircularBufferSpec):
                (block,) = table
                at = start + block * block_bytes
                found.append(Moved(True, np.arange(at, at + tensor[0].numel() * item)))
                continue
            m = int(spec.tokens_per_state)
            size, oldest = spec.block_size // m, 0
            if isinstance(spec, kv.SlidingWindowSpec):
                oldest = max(0, num_tokens - spec.sliding_window + 1) // size * size
            if isinstance(spec, kv.ChunkedLocalAttentionSpec):
                chunk = spec.attention_chunk_size
                oldest = num_tokens // chunk * chunk // size * size
            for index in range(oldest // size, -(-(num_tokens // m) // size)):
                page = start + table[index] * block_bytes
                for row in range(size):
                    is_read = layer != without and index * size + row < num_tokens // m
                    found += [Moved(is_read, at) for at in row_of(tensor, page, row, backend)]
    return found


def _of_drafts(spec: kv.MambaSpec) -> slice:
    """Return which bytes of a state are the columns that its convolution keeps for drafts, which nobody else needs."""
    if not spec.num_speculative_blocks:
        return slice(0)
    columns, channels = spec.shapes[0]
    column_bytes = channels * spec.dtypes[0].itemsize
    return slice((columns - spec.num_speculative_blocks) * column_bytes, columns * column_bytes)


def row_of(tensor: torch.Tensor, page: int, row: int, backend: str) -> list[Any]:
    """Return the offsets of each plane of a row, of all heads."""
    _, heads, size, content = tensor.shape
    item = tensor.element_size()
    if backend == "DEEPSEEK_V32_INDEXER":
        scales = page + size * 128 + row * 4
        return [np.arange(page + row * 128, page + (row + 1) * 128), np.arange(scales, scales + 4)]
    first = [
        page + (head * tensor.stride(1) + row * tensor.stride(2)) * item for head in range(heads)
    ]
    return [np.concatenate([np.arange(at, at + content * item) for at in first])]
