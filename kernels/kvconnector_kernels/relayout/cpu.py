"""Re-layout in host memory: a compiled loop in the caller's thread, without the GIL."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvconnector_kernels.relayout.cpu_kernel import copy_span
from kvconnector_kernels.relayout.errors import RelayoutError
from kvconnector_kernels.relayout.runs import ADJACENT
from kvconnector_kernels.relayout.sides import (
    ROW_COLUMNS,
    CopyGeometry,
    PackedSide,
    Side,
    check_copy,
)

# A larger copy leaves no second-level cache anything worth keeping, so it goes past the caches.
MIN_STREAMED_COPY_BYTES = 2 << 20


def relayout_cpu(
    src: Side,
    dst: Side,
    *,
    num_parts: int,
    num_heads: int,
    num_tokens: int,
    head_dim: int | None = None,
    item_size_bytes: int | None = None,
) -> None:
    """Copy between two sides in host memory, see `relayout`. Returns when the destination holds all of it.

    Raises:
        RelayoutError: the sides do not hold the copy, see `check_copy`.
    """
    geometry = check_copy(
        src,
        dst,
        num_parts=num_parts,
        num_heads=num_heads,
        num_tokens=num_tokens,
        head_dim=head_dim,
        item_size_bytes=item_size_bytes,
    )
    if src.device != "cpu":
        raise RelayoutError(f"this copy runs on the CPU, the sides are on {src.device}")
    if geometry.nbytes == 0:
        return
    source, destination = _host_side(src, geometry), _host_side(dst, geometry)
    copy_span(
        *(destination[0].ctypes.data, (destination[1].ctypes.data, *destination[2])),
        *(source[0].ctypes.data, (source[1].ctypes.data, *source[2])),
        geometry.num_heads,
        geometry.num_tokens,
        (geometry.head_dim, geometry.item_size_bytes),
        geometry.nbytes >= MIN_STREAMED_COPY_BYTES,
        0,
        geometry.num_parts * geometry.num_tokens,
    )


def _host_side(
    side: Side, geometry: CopyGeometry
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], tuple[int, ...]]:
    """One side as `copy_span` takes it: a part table's rows, block ids, and the rest of its window."""
    if isinstance(side, PackedSide):
        # each part is one block, number 0, that holds every token of the copy
        part_stride, *strides = side.strides_bytes(geometry)
        rows = np.empty((geometry.num_parts, ROW_COLUMNS), np.int64)
        rows[:, 0] = side.address + part_stride * np.arange(geometry.num_parts, dtype=np.int64)
        rows[:, 1:] = (0, *strides)
        ids, runs = np.zeros(1, np.int32), ADJACENT
        window = (geometry.num_tokens, 0, 0)
    else:
        if not isinstance(side.block_ids, np.ndarray):
            raise RelayoutError("block ids of a copy on the CPU must be a numpy array")
        rows, ids, runs = side.table.rows[side.part_start :], side.block_ids, side.runs
        window = (side.table.block_size, side.head_start, side.token_start)
    return rows, ids, (*window, runs.run_tokens, runs.step_tokens, runs.skip_tokens)
