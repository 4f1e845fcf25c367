"""Stores rows in a cache's pages with vLLM's own kernels: Triton's natively on a GPU, and elsewhere in its interpreter.

vLLM imports no Triton on a CPU, so there this is a process of its own:

    TRITON_INTERPRET=1 python -m tests.vllm.kernel_pages NAME FILE

writes a dictionary of `ROWS` rows stored in two pages of `FILE`: `pages`, and what the kernel was given.
"""

from __future__ import annotations

import sys
import types

import torch

ROWS, PAGE = 100, 64


def run(name: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Store random rows with the kernel of this name. Returns `keys`, and the `pages` that the kernel wrote."""
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


if __name__ == "__main__":
    with_triton()
    torch.save(run(sys.argv[1]), sys.argv[2])
