"""Block tables of all cache groups: staged row writes, rows of a batch, slots of its tokens.

`naive` is the oracle. `triton` runs each operation as one launch over all groups, `cpu` as compiled
loops; each is imported by its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal, cast

from kvconnector_kernels.block_table.operands import (
    PAD_SLOT_ID,
    PLACE_COLUMNS,
    WRITE_COLUMNS,
    BlockTableKernels,
    TableGeometry,
    TableSet,
)

if TYPE_CHECKING:
    import torch

Implementation = Literal["naive", "cpu", "triton"]

__all__ = [
    "PAD_SLOT_ID",
    "PLACE_COLUMNS",
    "WRITE_COLUMNS",
    "BlockTableKernels",
    "Implementation",
    "TableGeometry",
    "TableSet",
    "implementation",
    "implementation_for",
]


def implementation(name: Implementation) -> BlockTableKernels:
    """Return the implementation with this name."""
    return cast("BlockTableKernels", importlib.import_module(f"{__name__}.{name}"))


def implementation_for(device: torch.device) -> BlockTableKernels:
    """Return the implementation for tables on a device.

    Raises:
        ValueError: There is none.
    """
    if device.type == "cuda":
        return implementation("triton")
    if device.type == "cpu":
        return implementation("cpu")
    raise ValueError(f"no block table kernels for device {device}")
