"""The oracle: one token at a time, on tensors whose logical axes are `[block, head, token, dim]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconnector_kernels.relayout.convert import Conversion, is_scaled
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
    conversion: Conversion | None = None,
    part_start: int = 0,
) -> None:
    """Copy part by part and token by token. Mutates `dst_parts`.

    Each part is a tensor of logical shape `[num_blocks, num_heads, block_size, head_dim]` with any strides.
    With a conversion the tensors are of integers of the elements' size, and the first part has the scales of row
    `part_start`.
    """
    src_heads = slice(src_head_start, src_head_start + num_heads)
    dst_heads = slice(dst_head_start, dst_head_start + num_heads)
    for part, (src, dst) in enumerate(zip(src_parts, dst_parts, strict=True)):
        for token in range(num_tokens):
            src_block, src_offset = divmod(src_token_start + src_runs.offset(token), src.shape[2])
            dst_block, dst_offset = divmod(dst_token_start + dst_runs.offset(token), dst.shape[2])
            numbers = src[src_block_ids[src_block], src_heads, src_offset]
            if conversion is not None:
                scales = torch.tensor(conversion.scales[part_start + part])
                numbers = _converted(numbers, conversion, scales, dst.dtype)
            dst[dst_block_ids[dst_block], dst_heads, dst_offset] = numbers


def _converted(
    numbers: torch.Tensor, conversion: Conversion, scales: torch.Tensor, stored: torch.dtype
) -> torch.Tensor:
    """Convert `[head, dim]` by torch's own casts, to which saturation and NaN without a sign are added, or by comparing
    with all numbers of the destination.
    """
    src, dst = (getattr(torch, each) for each in (conversion.src_element, conversion.dst_element))
    values = numbers.contiguous().view(src).float()
    if is_scaled(conversion.src_element):
        values = values * scales[:, :1].to(values.device)
    theirs = scales[:, 1:].to(values.device)
    if conversion.rounding == "truncated":
        return _truncated(values * (1 / theirs), dst)
    if is_scaled(conversion.dst_element):
        values = values / theirs
        if conversion.rounding == "cast":
            if dst == torch.float8_e4m3fn:  # before 2.13 torch stored NaN for what is too large
                values = values.clamp(-torch.finfo(dst).max, torch.finfo(dst).max)
            found = values.to(dst).view(stored)
            # which sign torch gives NaN depends on the number of elements
            has_sign = numbers >> (8 * numbers.element_size() - 1) != 0
            signed = 0x7F + 0x80 * (has_sign & conversion.signed_nan)
            return torch.where(values.isnan(), signed, found).to(stored)
        most = torch.finfo(dst).max
        values = values.clamp(-most, most)  # keeps NaN
    found = values.to(dst).view(stored)
    # NaN has one form in each type
    nan = {"float16": 0x7E00, "bfloat16": 0x7FC0}.get(conversion.dst_element, 0x7F)
    found[values.isnan()] = nan
    return found


def _truncated(values: torch.Tensor, dst: torch.dtype) -> torch.Tensor:
    """Return the bits of the largest number of `dst` that is not beyond each value, counted from zero."""
    last = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}[dst]
    every = torch.arange(last + 1, dtype=torch.uint8, device=values.device)
    sizes = values.double().abs()
    if (
        dst == torch.float8_e4m3fn
    ):  # a denormal comes from a float of which multiples of 2**-29 are left
        small = sizes < 2.0**-6
        sizes[small] = (sizes[small] * 2**29).round() / 2**29
    found = (torch.bucketize(sizes, every.view(dst).double(), right=True) - 1).to(torch.uint8)
    found[values.isnan()] = last
    found[(values < 0)] |= 0x80
    return found
