"""`relayout`, the one entry point for every device."""

from __future__ import annotations

from typing import Unpack

from kvconnector_kernels.relayout.convert import Conversion
from kvconnector_kernels.relayout.sides import CopyCounts, Side


def relayout(
    src: Side, dst: Side, *, conversion: Conversion | None = None, **counts: Unpack[CopyCounts]
) -> None:
    """Copy `[num_parts, num_heads, num_tokens, head_dim]` items from `src` to `dst`, whatever their layouts. At least
    one side is paged.

    Writes exactly those items of `dst` and nothing between them. On `cpu` it returns when they are written (C, no
    GIL); on `cuda:N` it is one launch on the current stream, and both sides must stay alive until that has run.

    `conversion` says how elements change type on the way, if they do.

    The two sides must not overlap in memory, and a block must not occur twice in the written range of the destination.
    Block ids on the CPU are checked here, those on a GPU by `upload_block_ids`.

    Raises:
        RelayoutError: a count, range, chunk or device does not fit (also as BlockIdsError, GeometryMismatchError).
    """
    if src.device == "cpu":
        from kvconnector_kernels.relayout.cpu import relayout_cpu as copy
    else:
        from kvconnector_kernels.relayout.triton import relayout_triton as copy
    copy(src, dst, conversion=conversion, **counts)
