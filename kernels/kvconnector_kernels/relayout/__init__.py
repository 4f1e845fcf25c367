"""Re-layout of KV caches: any block size, layout and head range to any other, fused into one copy.

`relayout` copies between paged pools and dense chunks on the CPU (C) or a GPU (one Triton launch). `naive` is the
oracle that both must equal. Importing this package needs only numpy: torch and Triton are imported when they are first
needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvconnector_kernels.relayout.block_ids import BlockIdsAt, upload_block_ids
from kvconnector_kernels.relayout.checks import BlockIdsError, GeometryMismatchError, RelayoutError
from kvconnector_kernels.relayout.convert import Conversion
from kvconnector_kernels.relayout.dispatch import relayout
from kvconnector_kernels.relayout.receive import (
    receive_block_size,
    receive_block_size_and_layout,
    receive_layout,
)
from kvconnector_kernels.relayout.runs import TokenRuns
from kvconnector_kernels.relayout.sides import ElementOrder, PackedSide, PagedSide, PartTable, Side

if TYPE_CHECKING:
    from kvconnector_kernels.relayout.cpu import relayout_cpu
    from kvconnector_kernels.relayout.naive import relayout_naive
    from kvconnector_kernels.relayout.triton import relayout_triton

_LAZY = {
    "relayout_cpu": "cpu",
    "relayout_naive": "naive",
    "relayout_triton": "triton",
}

__all__ = [
    "BlockIdsAt",
    "BlockIdsError",
    "Conversion",
    "GeometryMismatchError",
    "ElementOrder",
    "PackedSide",
    "PagedSide",
    "PartTable",
    "RelayoutError",
    "Side",
    "TokenRuns",
    "receive_block_size",
    "receive_block_size_and_layout",
    "receive_layout",
    "relayout",
    "relayout_cpu",
    "relayout_naive",
    "relayout_triton",
    "upload_block_ids",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
