"""Finds the rule by which an engine stores fp8: that of docs/conversion.md which makes the same of every number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvconnector.topology.geometry import ROUNDINGS, UNKNOWN_ROUNDING
from kvconnector_kernels.relayout import Conversion, PagedSide, PartTable, relayout

_NUM_NUMBERS = 1 << 16


def every_number(dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """Return all numbers of bf16 or fp16, `[token, head_dim]`. The last token may have the first ones again."""
    count = -(-_NUM_NUMBERS // head_dim) * head_dim
    bits = torch.arange(count, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).view(-1, head_dim)


def rule_of(
    stored: Sequence[npt.NDArray[np.uint8]],
    scales: Sequence[Sequence[float]],
    numbers: torch.Tensor,
    element: str,
) -> str:
    """Return the rule by which an engine has stored numbers, as `PartGeometry.rounding`.

    Args:
        stored: For each part, such as K and V, what every head of it has, `[head, token, dim]`.
        scales: For each part its scale, or one for each head.
        numbers: What was stored for every head, `[token, dim]`, in host memory.
        element: The type in which it was stored, one of `FP8_ELEMENTS`.
    """
    if len(stored) != len(scales) or any(part.shape[1:] != numbers.shape for part in stored):
        return UNKNOWN_ROUNDING
    for rule in ROUNDINGS:
        if all(
            np.array_equal(part, _expected(numbers, len(part), of_part, element, rule))
            for part, of_part in zip(stored, scales, strict=True)
        ):
            return rule
    return UNKNOWN_ROUNDING


def _expected(
    numbers: torch.Tensor, num_heads: int, scales: Sequence[float], element: str, rule: str
) -> npt.NDArray[np.uint8]:
    """Return what a rule makes of numbers, `[head, token, dim]`."""
    tokens, head_dim = numbers.shape
    found = np.empty((num_heads, tokens, head_dim), np.uint8)
    sizes = {"num_blocks": 1, "block_size": tokens, "num_heads": num_heads, "head_dim": head_dim}
    sides = []
    # every head has the same numbers
    for address, head_stride, item in (
        (numbers.data_ptr(), 0, 2),
        (found.ctypes.data, tokens * head_dim, 1),
    ):
        rows = np.array([(address, 0, head_stride, head_dim * item, item)], np.int64)
        table = PartTable(rows, **sizes, item_size_bytes=item, device="cpu")
        sides.append(PagedSide(table, np.zeros(1, np.int32)))
    pairs = np.ones((1, num_heads, 2), np.float32)
    pairs[:, :, 1] = scales
    source = str(numbers.dtype).removeprefix("torch.")
    conversion = Conversion(source, element, pairs, "cpu", rounding=rule)
    relayout(*sides, conversion=conversion, num_parts=1, num_heads=num_heads, num_tokens=tokens)
    return found
