"""`KVView`: one address model for all cache layouts, a base address and four strides in bytes.

A view describes one *part* (K, V, an MLA latent, a recurrent state) of one layer as a logical array `[num_blocks,
num_heads, block_size, head_dim]`. HND, NHD, K and V packed in one tensor, blocks before K/V or after, transposed K, MLA
(one head) and opaque states (one head, one token) differ only in their strides. Where block sizes differ, each side
maps a token to its own (block, offset).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError, GeometryError

PART_TABLE_COLUMNS = ("address", "block_stride", "head_stride", "token_stride", "dim_stride")


@dataclass(frozen=True, slots=True)
class KVView:
    """One part of one layer in memory, over the axes block, head, token and dim. `address` is that of `[0, 0, 0, 0]`.
    Raises GeometryError: not four axes, a count or item size below 1, a negative stride or address, or an overlap.
    """

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_size_bytes: int

    def __post_init__(self) -> None:
        has_axes = len(self.shape) == len(self.strides_bytes) == 4
        is_positive = min(self.item_size_bytes, *self.shape) >= 1
        if not has_axes or not is_positive or min(self.address, *self.strides_bytes) < 0:
            raise GeometryError(
                "a view needs four axes (block, head, token, dim), positive counts and no negative stride",
                view=self,
            )
        # in ascending order of strides, each axis must step over everything that the axes before it cover
        covered = self.item_size_bytes
        for stride, count in sorted(zip(self.strides_bytes, self.shape, strict=True)):
            if count > 1 and stride < covered:
                raise GeometryError("strides make elements of the view overlap", view=self)
            covered += stride * (count - 1)

    @property
    def num_blocks(self) -> int:
        return self.shape[0]

    @property
    def num_heads(self) -> int:
        return self.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.shape[2]

    @property
    def head_dim(self) -> int:
        """Elements per head and token."""
        return self.shape[3]


def part_table(views: Sequence[KVView]) -> npt.NDArray[np.int64]:
    """Return the table of addresses that the re-layout kernels read: int64 `[num_parts, 5]`, by `PART_TABLE_COLUMNS`.
    Raises GeometryError: there is no view, or two differ in heads, block size, head dim or item size.
    """
    if not views:
        raise GeometryError("a part table needs at least one view")
    for view in views:
        if view.shape[1:] != views[0].shape[1:] or view.item_size_bytes != views[0].item_size_bytes:
            raise GeometryError(
                "views of one part table must agree in heads, block size, head dim and item size",
                first=views[0],
                other=view,
            )
    return np.array([(view.address, *view.strides_bytes) for view in views], dtype=np.int64)


def memory_orders(views: Mapping[int, Sequence[KVView]]) -> tuple[str, ...]:
    """Return the memory order of each part of a cache group: the axes of its tensor, slowest first.

    B stands for blocks, H for heads, N for tokens and D for dims; 2 for a layer's two parts (K and V); L for layers, if
    a block has all of them together. "2BNHD" is FlashAttention's `[2, num_blocks, block_size, num_heads, head_size]`,
    "B2HND" FlashInfer's with heads first, "BHN2D" has K and V packed in the last axis, "BND" is MLA's. Axes of one
    element are left out, except B.

    Args:
        views: A view per part for every layer of the group. All layers have the same strides.

    Returns:
        One order per part, in the order of the parts.
    """
    layers = list(views.values())
    orders = []
    for index, view in enumerate(layers[0]):
        block_stride = view.strides_bytes[0] if view.num_blocks > 1 else inf
        inner = zip(view.strides_bytes[1:], view.shape[1:], "HND", strict=True)
        axes = [
            (block_stride, "B"),
            *((stride, name) for stride, count, name in inner if count > 1),
        ]
        if len(layers) > 1:
            layer_stride = abs(layers[1][index].address - view.address)
            axes += [(layer_stride, "L")] if layer_stride < block_stride else []
        if len(layers[0]) == 2:
            part_stride = abs(layers[0][1].address - layers[0][0].address)
            axes.append((part_stride if part_stride < block_stride else inf, "2"))
        # K and V in separate regions: both strides are infinite then, and "2" is sorted before "B"
        orders.append("".join(name for _, name in sorted(axes, key=lambda a: (-a[0], a[1]))))
    return tuple(orders)


def check_block_ids(
    block_ids: npt.NDArray[np.integer] | Sequence[int], num_blocks: int | None, *, what: str
) -> npt.NDArray[np.int32]:
    """Return the ids as an int32 vector; `what` names them in errors. Raises BlockIdError: one is outside the pool of
    `num_blocks`, or of any pool where that is None.
    """
    try:
        ids = np.asarray(block_ids)
    except ValueError as error:  # sequences of different lengths
        raise BlockIdError(f"{what} must be a vector of block ids", given=block_ids) from error
    # an empty list becomes an empty vector of floats, and True among integers becomes 1
    has_truth = not isinstance(block_ids, np.ndarray) and bool in set(map(type, block_ids))
    if ids.ndim != 1 or has_truth or (ids.size and ids.dtype.kind not in "iu"):
        raise BlockIdError(
            f"{what} must be a vector of block ids", shape=ids.shape, dtype=str(ids.dtype)
        )
    limit = 1 << 31 if num_blocks is None else num_blocks
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        found = {"lowest": int(ids.min()), "highest": int(ids.max())}
        if num_blocks is None:
            raise BlockIdError(f"{what} must be integers from 0 to 2^31 - 1", **found)
        raise BlockIdError(f"{what} are outside the pool", **found, num_blocks=num_blocks)
    return np.ascontiguousarray(ids, dtype=np.int32)
