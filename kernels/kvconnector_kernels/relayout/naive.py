"""The oracle: one token at a time, on tensors whose logical axes are `[block, head, token, dim]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconnector_kernels.relayout.runs import ADJACENT, TokenRuns


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
