"""Stores rows in a cache's pages with vLLM's own kernels: Triton's natively on a GPU, and elsewhere in its interpreter.

vLLM imports no Triton on a CPU, so there this is a process of its own:

    TRITON_INTERPRET=1 python -m tests.vllm.kernel_pages FILE

writes what `run` returns for each of `NAMES` into `FILE`, or None where a kernel needs what this Triton has no more.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import torch
import vllm

ROWS, PAGE = 100, 64
NAMES = ("indexer", "window", "block-sparse", "block-sparse-keys")


def run(name: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Store `ROWS` random rows in two pages with the kernel of this name. Returns `pages` and what it was given."""
    if name == "block-sparse":
        return attend(device)
    if name == "block-sparse-keys":
        return score(device)
    generator = torch.Generator().manual_seed(7)
    width = {"indexer": 128, "window": 512}[name]
    # numbers that fp8 holds exactly, with unlike scales, so that a row with another one's is noticed
    keys = torch.randint(-7, 8, (ROWS, width), generator=generator)
    keys = keys * 2.0 ** (torch.arange(ROWS) % 20 - 10)[:, None]
    keys = keys.to(torch.bfloat16).to(device)
    slots = torch.arange(ROWS, device=device)
    page_bytes = {"indexer": PAGE * 132, "window": 37440}[name]
    pages = torch.zeros(2, page_bytes, dtype=torch.uint8, device=device)
    (store_indexer if name == "indexer" else store_window)(keys, slots, pages)
    return {"keys": keys.cpu(), "pages": pages.cpu()}


def store_indexer(keys: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> None:
    """Store an indexer's keys as DeepSeek-V3.2 and GLM-5.x do, with the function that their fused kernel calls."""
    from tests.vllm.indexer_kernel import store_rows

    store_rows[(len(keys),)](
        keys,
        slots,
        pages.view(torch.float8_e4m3fn),
        pages.view(torch.float32),
        pages.stride(0),
        PAGE,
    )


def store_window(keys: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> None:
    """Store DeepSeek-V4's window latents."""
    from vllm.models.deepseek_v4.common.ops.cache_utils import quantize_and_insert_k_cache

    quantize_and_insert_k_cache(keys, pages, slots, block_size=PAGE)


BLOCK, BLOCKS, HEADS, DIM = 128, 3, 2, 128
"""MiniMax-M3's: tokens of a block, blocks, KV heads, and their elements."""


def of_minimax(path: str) -> types.ModuleType:
    """Return a module of MiniMax-M3's kernels, without its package's model if that cannot be imported here."""
    package = "vllm.models.minimax_m3"
    try:
        return importlib.import_module(f"{package}.{path}")
    except ImportError:
        bare = types.ModuleType(package)
        bare.__path__ = [str(Path(vllm.__file__).parent / "models" / "minimax_m3")]
        sys.modules[package] = bare
        return importlib.import_module(f"{package}.{path}")


TABLE = (2, 0, 1)
"""The sequence's blocks; the last one lacks five tokens."""
KINDS = ((64, 32, 32), (32, 16, 16), (16, 8, 8), (8, 4, 4))
"""In each block of the sequence, how many of its tokens each of a KV head's four query heads attends to."""


def attend(device: str) -> dict[str, torch.Tensor]:
    """Read pages of K and V with MiniMax-M3's attention. Only CUDA's kernel writes them, so `pages` are ours: `output`
    is what the queries `q` get of them.

    A query has the pattern of the keys of its own kind, and is orthogonal to all others, whose weights are 0. The
    weights of its kind are equal, and their number is a power of two, as are the factors of a product; values are
    integers. So every step is exact in whatever precision a device multiplies: a query gets the mean of its values.
    """
    sparse = of_minimax("common.ops.sparse_attn")
    generator = torch.Generator().manual_seed(7)
    signs = torch.tensor([[1.0]])
    while len(signs) < DIM:  # Hadamard's: rows are orthogonal
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    patterns = signs[torch.randperm(DIM, generator=generator)[: len(KINDS) + 1]]
    values = torch.randint(-64, 65, (HEADS, BLOCKS * BLOCK, DIM), generator=generator).float()
    # beyond its counts a token is of the last kind, to which nothing attends
    kinds = torch.full((HEADS, BLOCKS, BLOCK), len(KINDS))
    for head, block in torch.cartesian_prod(torch.arange(HEADS), torch.arange(BLOCKS)).tolist():
        counts = torch.tensor([of_kind[block] for of_kind in KINDS])
        of_tokens = torch.repeat_interleave(torch.arange(len(KINDS)), counts)
        places = torch.randperm(BLOCK - 5, generator=generator)[: len(of_tokens)]
        kinds[head, block, places] = of_tokens
    kinds = kinds.reshape(HEADS, -1)
    pages = torch.empty(BLOCKS, HEADS, BLOCK, 2 * DIM)
    both = torch.cat([patterns[kinds], values], -1).reshape(HEADS, BLOCKS, BLOCK, -1)
    pages[list(TABLE)] = both.transpose(0, 1)
    q = 16 * patterns[: len(KINDS)].repeat(HEADS, 1)[None].to(device)
    count = BLOCKS * BLOCK - 5
    output = torch.zeros_like(q)
    at = {"dtype": torch.int32, "device": device}
    sparse.minimax_m3_sparse_attn(
        q,
        pages.to(device),
        torch.tensor([[range(BLOCKS)]] * HEADS, **at),
        torch.tensor([TABLE], **at),
        torch.tensor([0, 1], **at),
        torch.tensor([count], **at),
        torch.tensor([count - 1], **at),
        1,
        HEADS,
        0.125,
        output,
    )
    return {"q": q.cpu(), "pages": pages, "output": output.cpu()}


def score(device: str) -> dict[str, torch.Tensor]:
    """Score pages of keys with MiniMax-M3's indexer.

    Queries `q` at the last positions of `ROWS` + 100 tokens see blocks 1 and 0, each query the keys up to its own.
    Under the name of each type of keys are the largest products in each block: of bf16 and, unscaled, of fp8 on a
    GPU, and of float32 in the interpreter, which multiplies no others.
    """
    index = of_minimax("common.ops.index_topk")
    generator = torch.Generator().manual_seed(7)
    on_cpu = device == "cpu"
    keys = torch.randint(-7, 8, (2, BLOCK, DIM), generator=generator).float().to(device)
    q = torch.randint(-7, 8, (ROWS, 1, DIM), generator=generator).float().to(device)
    dtypes = [torch.float32] if on_cpu else [torch.bfloat16, torch.float8_e4m3fn]
    at = {"dtype": torch.int32, "device": device}
    found = {"q": q.cpu(), "keys": keys.cpu()}
    for dtype in dtypes:
        scores = index.minimax_m3_index_score(
            q if on_cpu else q.to(torch.bfloat16),
            keys.to(dtype),
            torch.tensor([[1, 0]], **at),
            torch.tensor([0, ROWS], **at),
            torch.tensor([ROWS + 100], **at),
            torch.tensor([100], **at),
            ROWS,
            ROWS + 100,
            1,
        )
        found[str(dtype)] = scores[0, :, :2].cpu()
    return found


def with_triton() -> None:
    """Let vLLM import Triton where it has found no device for it."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from vllm.triton_utils import importing

    importing.HAS_TRITON = True
    module = types.ModuleType("vllm.triton_utils")
    found = sys.modules["vllm.triton_utils"]
    module.__dict__.update(vars(found))
    module.__dict__.update(triton=triton, tl=tl, tldevice=libdevice)
    sys.modules["vllm.triton_utils"] = module


def run_if_possible(name: str) -> dict[str, torch.Tensor] | None:
    """Return what `run` returns; None for a kernel of vLLM 0.31 whose block pointers Triton has removed since."""
    try:
        return run(name)
    except Exception as error:
        if "Block pointers have been removed" not in str(error):
            raise
        return None


if __name__ == "__main__":
    with_triton()
    torch.save({name: run_if_possible(name) for name in NAMES}, sys.argv[1])
