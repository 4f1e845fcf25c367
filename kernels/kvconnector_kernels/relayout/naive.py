"""The oracle: one token at a time, on tensors whose logical axes are `[block, head, token, dim]`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvconnector_kernels.relayout.checks import RelayoutError
from kvconnector_kernels.relayout.runs import ADJACENT, TokenRuns
from kvconnector_kernels.relayout.sides import Order


def relayout_naive(
    src_parts: Sequence[torch.Tensor],
    dst_parts: Sequence[torch.Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    *,
    num_heads: int,
    num_tokens: int,
    src_head_start: int = 0,
    dst_head_start: int = 0,
    src_token_start: int = 0,
    dst_token_start: int = 0,
    src_runs: TokenRuns = ADJACENT,
    dst_runs: TokenRuns = ADJACENT,
) -> None:
    """Copy part by part and token by token. Mutates `dst_parts`.

    Each part is a tensor of logical shape `[num_blocks, num_heads, block_size, head_dim]` with any strides.
    """
    src_heads = slice(src_head_start, src_head_start + num_heads)
    dst_heads = slice(dst_head_start, dst_head_start + num_heads)
    for src, dst in zip(src_parts, dst_parts, strict=True):
        for token in range(num_tokens):
            src_block, src_offset = divmod(src_token_start + src_runs.offset(token), src.shape[2])
            dst_block, dst_offset = divmod(dst_token_start + dst_runs.offset(token), dst.shape[2])
            dst[dst_block_ids[dst_block], dst_heads, dst_offset] = src[
                src_block_ids[src_block], src_heads, src_offset
            ]


def packed_parts(
    buffer: torch.Tensor,
    order: Order,
    *,
    num_parts: int,
    num_heads: int,
    num_tokens: int,
    head_dim: int,
) -> list[torch.Tensor]:
    """A dense chunk as parts of one block each, `[1, num_heads, num_tokens, head_dim]`, sharing the buffer's memory.

    `buffer` is a vector of items, at least as long as the parts need.

    Raises:
        RelayoutError: it is shorter.
    """
    shape = {
        "HND": (num_parts, num_heads, num_tokens, head_dim),
        "NHD": (num_parts, num_tokens, num_heads, head_dim),
        "HDN": (num_parts, num_heads, head_dim, num_tokens),
    }[order]
    num_items = math.prod(shape)
    if buffer.numel() < num_items:
        raise RelayoutError(f"a buffer of {buffer.numel()} items cannot hold parts of {shape}")
    stored = buffer[:num_items].view(shape)
    axes = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "HDN": (0, 1, 3, 2)}[order]
    return [part.unsqueeze(0) for part in stored.permute(axes)]
