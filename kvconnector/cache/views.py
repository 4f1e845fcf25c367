"""`KVView`: the one address model. Every cache layout is a base address and four byte strides.

A view describes one *part* (K, V, an MLA latent, a recurrent state) of one layer as a logical array
`[num_blocks, num_heads, block_size, head_dim]`. HND, NHD, K and V packed in one tensor, blocks first or K/V first,
K stored transposed, MLA (one head) and opaque state (one head, one token) differ in strides alone, and unequal block
sizes are only `token -> (block, offset)` on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError, GeometryError

PART_TABLE_COLUMNS = ("address", "block_stride", "head_stride", "token_stride", "dim_stride")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """One part of one layer in memory. Sizes are counts, strides are bytes, `address` is that of `[0, 0, 0, 0]`.

    Raises:
        GeometryError: a count or the item size is not positive, a stride is negative, or two elements overlap.
    """

    address: int
    num_blocks: int
    num_heads: int
    block_size: int
    head_dim: int
    item_size_bytes: int
    block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int
    dim_stride_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_heads", "block_size", "head_dim", "item_size_bytes"):
            if getattr(self, name) < 1:
                raise GeometryError(f"{name} must be at least 1", **{name: getattr(self, name)})
        if self.address < 0:
            raise GeometryError("a view's address must not be negative", address=self.address)
        if min(self.strides_bytes) < 0:
            raise GeometryError("strides must not be negative", strides_bytes=self.strides_bytes)
        self._refuse_overlap()

    def _refuse_overlap(self) -> None:
        """Sorted by stride, every axis must step over all that the finer axes cover."""
        axes = sorted(
            (stride, count)
            for stride, count in zip(self.strides_bytes, self.shape, strict=True)
            if count > 1
        )
        covered = self.item_size_bytes
        for stride, count in axes:
            if stride < covered:
                raise GeometryError(
                    "strides make elements of the view overlap",
                    shape=self.shape,
                    strides_bytes=self.strides_bytes,
                    item_size_bytes=self.item_size_bytes,
                )
            covered = stride * (count - 1) + covered

    @classmethod
    def from_strides(
        cls,
        address: int,
        shape: Sequence[int],
        strides_bytes: Sequence[int],
        item_size_bytes: int,
    ) -> KVView:
        """A view from a logical `[num_blocks, num_heads, block_size, head_dim]` shape and its byte strides."""
        if len(shape) != 4 or len(strides_bytes) != 4:
            raise GeometryError(
                "a view has four axes: block, head, token, dim",
                shape=tuple(shape),
                strides_bytes=tuple(strides_bytes),
            )
        return cls(
            address=address,
            num_blocks=shape[0],
            num_heads=shape[1],
            block_size=shape[2],
            head_dim=shape[3],
            item_size_bytes=item_size_bytes,
            block_stride_bytes=strides_bytes[0],
            head_stride_bytes=strides_bytes[1],
            token_stride_bytes=strides_bytes[2],
            dim_stride_bytes=strides_bytes[3],
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(num_blocks, num_heads, block_size, head_dim)`."""
        return (self.num_blocks, self.num_heads, self.block_size, self.head_dim)

    @property
    def strides_bytes(self) -> tuple[int, int, int, int]:
        """Byte strides of the block, head, token and dim axes."""
        return (
            self.block_stride_bytes,
            self.head_stride_bytes,
            self.token_stride_bytes,
            self.dim_stride_bytes,
        )

    def table_row(self) -> tuple[int, int, int, int, int]:
        """This view's row of the part table: see `PART_TABLE_COLUMNS`."""
        return (self.address, *self.strides_bytes)


def part_table(views: Sequence[KVView]) -> npt.NDArray[np.int64]:
    """The pointer table that the re-layout kernels read: int64 `[num_parts, 5]`, columns `PART_TABLE_COLUMNS`.

    All views must agree in everything but address, strides and number of blocks.

    Raises:
        GeometryError: there is no view, or two differ in heads, block size, head dim or item size.
    """
    if not views:
        raise GeometryError("a part table needs at least one view")
    first = views[0]
    for view in views:
        mine = (view.num_heads, view.block_size, view.head_dim, view.item_size_bytes)
        if mine != (first.num_heads, first.block_size, first.head_dim, first.item_size_bytes):
            raise GeometryError(
                "views of one part table must agree in heads, block size, head dim and item size",
                first=first,
                other=view,
            )
    return np.array([view.table_row() for view in views], dtype=np.int64)


def check_block_ids(
    block_ids: npt.NDArray[np.integer] | Sequence[int], num_blocks: int, *, what: str
) -> npt.NDArray[np.int32]:
    """`block_ids` as a contiguous int32 vector, once every id is known to lie in `[0, num_blocks)`.

    Raises:
        BlockIdError: not a vector of integers, or an id outside the pool.
    """
    ids = np.asarray(block_ids)
    # an empty list becomes an empty vector of floats
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BlockIdError(
            f"{what} must be a vector of block ids", shape=ids.shape, dtype=str(ids.dtype)
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= num_blocks):
        raise BlockIdError(
            f"{what} are outside the pool",
            lowest=int(ids.min()),
            highest=int(ids.max()),
            num_blocks=num_blocks,
        )
    return np.ascontiguousarray(ids, dtype=np.int32)
