"""Rows that vLLM's kernels store on a GPU: moving some of them leaves what a kernel leaves that stores only these."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.vllm.cache_world import NAMES, attention, read, registered

pytestmark = [pytest.mark.vllm, pytest.mark.gpu, pytest.mark.timeout(280)]

HEAD_DIM, HEADS, KV_HEADS, INDEX_HEADS = 128, 16, 4, 4
STATE_BLOCK = {4: 4, 128: 8}
"""Rows in a block of a compressor's states, by the tokens of a row that it makes."""


def check_moved(spec, backend, store, *, size, layout=KVCacheLayout.BLHNC):
    """Store `2 * size` rows, move one block and a half of another, and compare all memory.

    `store(cache, rows)` stores these rows, each in the slot of its number, into a cache on the GPU. The caches have
    vLLM's strides, beside those of other layers.
    """
    source, theirs = registered(spec, layout, backend)
    target, ours = registered(spec, layout, backend)
    rows = range(size + size // 2)
    assert len(rows) > size
    expected = stored(theirs[NAMES[1]], store, rows)
    brought(theirs[NAMES[1]], stored(theirs[NAMES[1]], store, range(2 * size)))
    ours[NAMES[1]].untyped_storage().fill_(0)
    views = zip(source.cache.views[1], target.cache.views[1], strict=True)
    for their_view, our_view in views:
        for row in rows:
            at = row // size, slice(None), row % size
            read(our_view)[at] = read(their_view)[at]
    assert torch.equal(memory(ours[NAMES[1]]), expected)
    assert not torch.equal(memory(theirs[NAMES[1]]), expected)


def memory(cache):
    return torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())


def brought(cache, stored_bytes):
    memory(cache).copy_(stored_bytes)


def stored(cache, store, rows):
    """Return the bytes of a cache's whole memory after `store` on a GPU, in memory that was zero."""
    count = cache.untyped_storage().nbytes() // cache.element_size()
    on_gpu = torch.zeros(count, dtype=cache.dtype, device="cuda")
    view = on_gpu.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    store(view, list(rows))
    found = on_gpu.view(torch.uint8).cpu()
    assert found.any()
    return found


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def rotations(count, width=64, dtype=torch.bfloat16):
    """Return cosines, then sines, of each position."""
    angles = torch.arange(count, device="cuda")[:, None] / 10000 ** (
        torch.arange(0, width, 2, device="cuda") / width
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)


def minimax_stores(is_indexer, cache_dtype):
    """Return a function that stores MiniMax-M3's K and V, or its indexer's keys, with the kernel that stores both."""
    from vllm import _custom_ops as ops

    width = (HEADS + 2 * KV_HEADS + INDEX_HEADS + 1) * HEAD_DIM
    weights = numbers(4, HEAD_DIM, seed=1) * 0.1

    def store(cache, rows):
        slots = torch.tensor(rows, device="cuda")
        blocks, size = cache.shape[0], cache.shape[2]
        if is_indexer:
            index_cache = cache.squeeze(1)
            pages = numbers(blocks, KV_HEADS, size, 2 * HEAD_DIM)
        else:
            pages = cache
            index_cache = numbers(blocks, size, HEAD_DIM)
        qkv = numbers(4096, width)[slots].contiguous()
        q, index_q = (
            torch.empty(len(rows), heads * HEAD_DIM, dtype=qkv.dtype, device="cuda")
            for heads in (HEADS, INDEX_HEADS)
        )
        ops.fused_minimax_m3_qknorm_rope_kv_insert(
            qkv,
            weights[0],
            weights[1],
            rotations(4096),
            slots,
            HEADS,
            KV_HEADS,
            64,
            1e-6,
            weights[2],
            weights[3],
            INDEX_HEADS,
            slots,
            slots,
            pages,
            index_cache,
            size,
            q,
            index_q,
            cache_dtype,
        )

    return store


@pytest.mark.parametrize("layout", [KVCacheLayout.BLHNC, KVCacheLayout.LBNHC])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_k_and_v_that_minimaxs_kernel_stored_are_moved(cache_dtype, layout):
    spec = attention(
        block_size=HEAD_DIM,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_DIM,
        dtype=torch.bfloat16 if cache_dtype == "auto" else torch.uint8,
    )
    store = minimax_stores(False, cache_dtype)
    check_moved(spec, "MINIMAX_M3_SPARSE", store, size=HEAD_DIM, layout=layout)


def test_keys_that_minimaxs_kernel_stored_are_moved():
    """Layer by layer, as vLLM allocates them: the kernel knows of no gap between the blocks of keys."""
    spec = attention(
        kv.MLAAttentionSpec,
        num_kv_heads=1,
        head_size=HEAD_DIM,
        dtype=torch.bfloat16,
        block_size=HEAD_DIM,
    )
    store = minimax_stores(True, "auto")
    layout = KVCacheLayout.LBNHC
    check_moved(spec, "MINIMAX_M3_SPARSE_INDEXER", store, size=HEAD_DIM, layout=layout)


def compressor_stores(tokens, width, path, name):
    """Return a function that makes rows of `tokens` tokens from DeepSeek-V4's states, and stores them."""
    kernel = getattr(importlib.import_module(f"vllm.models.deepseek_v4.{path}"), name)
    is_overlapping = tokens == 4
    block = STATE_BLOCK[tokens]
    state_width = width * (1 + is_overlapping)
    quantised = (64, 576, 8) if width == 512 else (128, 128, 4)

    def store(cache, rows):
        cache = cache.squeeze(1)
        count = cache.shape[0] * cache.shape[1] * tokens
        states = numbers(count // block, block, 2 * state_width, dtype=torch.float32)
        positions = torch.tensor(rows, device="cuda") * tokens + tokens - 1
        kernel(
            state_cache=states,
            num_actual=len(rows),
            token_to_req_indices=torch.zeros(len(rows), dtype=torch.int32, device="cuda"),
            positions=positions,
            slot_mapping=positions,
            block_table=torch.arange(len(states), dtype=torch.int32, device="cuda")[None],
            block_size=block,
            state_width=state_width,
            cos_sin_cache=rotations(count, dtype=torch.float32),
            kv_cache=cache,
            k_cache_metadata=SimpleNamespace(slot_mapping=torch.tensor(rows, device="cuda")),
            pdl_kwargs={"launch_pdl": False},
            head_dim=width,
            rope_head_dim=64,
            compress_ratio=tokens,
            overlap=is_overlapping,
            use_fp4_cache=False,
            rms_norm_weight=torch.ones(width, dtype=torch.bfloat16, device="cuda"),
            rms_norm_eps=1e-6,
            quant_block=quantised[0],
            token_stride=quantised[1],
            scale_dim=quantised[2],
        )

    return store


@pytest.mark.parametrize("tokens", [4, 128])
def test_latents_that_the_compressor_stored_are_moved(tokens):
    """DeepSeek-V4's rows of 4 and of 128 tokens, in pages of 256 tokens whose values come before their scales."""
    pytest.importorskip("cutlass", reason="vLLM stores these rows with CuTe")
    name = "_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL"
    store = compressor_stores(tokens, 512, "nvidia.ops.sparse_attn_compress_cutedsl", name)
    spec = attention(
        kv.MLAAttentionSpec,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        block_size=256,
        tokens_per_state=tokens,
        state_content_bytes=584,
        alignment=576,
    )
    check_moved(spec, "FLASHMLA_SPARSE_DSV4", store, size=256 // tokens)


def test_keys_that_the_indexers_compressor_stored_are_moved():
    """DeepSeek-V4's, of rows of 4 tokens."""
    path, name = "common.ops.fused_compress_quant_cache", "compress_norm_rope_store_triton"
    spec = attention(
        kv.MLAAttentionSpec,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        block_size=256,
        tokens_per_state=4,
        alignment=576,
    )
    store = compressor_stores(4, 128, path, name)
    check_moved(spec, "DEEPSEEK_V4_INDEXER", store, size=64)
