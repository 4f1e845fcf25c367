"""`copy_kv_blocks`: copies whole blocks between two pools of any geometry, on the host or a device, in one launch.

A host pool that a GPU copies from or to must be pinned memory, which the kernel reads and writes directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError, GeometryError
from kvconnector.layout import KVView, check_block_ids, part_table
from kvconnector_kernels.relayout import PagedSide, PartTable, relayout, upload_block_ids

Direction: TypeAlias = Literal["h2d", "d2h", "d2d", "h2h"]


class KVPool:
    """The parts of one pool, for copies from and to it.

    Args:
        views: A view per part, all of one shape (see `part_table`). Their memory must outlive this object.
        device: The memory's device: "cpu" or "cuda:N".

    Raises:
        GeometryError: there is no view, or the views differ in shape.
    """

    def __init__(self, views: Sequence[KVView], device: str) -> None:
        self.device = device
        self._rows = part_table(views)
        self.view = views[0]
        self.num_blocks = min(view.num_blocks for view in views)
        self._tables: dict[str, PartTable] = {}

    @property
    def token_shape(self) -> tuple[int, int, int, int]:
        """(parts, heads, head dim, item size in bytes), which must be equal in two pools."""
        view = self.view
        return (len(self._rows), view.num_heads, view.head_dim, view.item_size_bytes)

    def side(self, ids: npt.NDArray[np.int32], device: str) -> PagedSide:
        """Return blocks of the pool as one side of a copy on `device`, for which the part table is made once."""
        if device not in self._tables:
            self._tables[device] = PartTable(
                self._rows,
                num_blocks=self.num_blocks,
                block_size=self.view.block_size,
                num_heads=self.view.num_heads,
                head_dim=self.view.head_dim,
                item_size_bytes=self.view.item_size_bytes,
                device=device,
            )
        uploaded = upload_block_ids(ids, num_blocks=self.num_blocks, device=device)
        return PagedSide(self._tables[device], uploaded)


def copy_kv_blocks(
    src: KVPool,
    dst: KVPool,
    src_ids: npt.NDArray[np.integer] | Sequence[int],
    dst_ids: npt.NDArray[np.integer] | Sequence[int],
    direction: Direction,
) -> None:
    """Copy the tokens of `src_ids`, in order, into `dst_ids`.

    Block sizes and layouts may differ. If a GPU is involved, the copy is queued on its current stream; otherwise it is
    done on return. No other blocks change, nor the slots of the last block that the tokens do not fill.

    Args:
        src: The pool to read.
        dst: The pool to write, which may be the same.
        src_ids: Block ids in `src`.
        dst_ids: Block ids in `dst`, exactly as many as the tokens need.
        direction: Source, then destination: "h" for the host, "d" for a device.

    Raises:
        GeometryError: the pools are not where `direction` says, or differ in parts, heads, head dim or item size.
        BlockIdError: an id is outside its pool; `dst_ids` has a duplicate, or the wrong length; or a block of the same
            pool is both source and destination.
    """
    device = _copying_device(src, dst, direction)
    if src.token_shape != dst.token_shape:
        raise GeometryError(
            "pools must agree in parts, heads, head dim and item size",
            src=src.token_shape,
            dst=dst.token_shape,
        )
    sources = check_block_ids(src_ids, src.num_blocks, what="src_ids")
    targets = check_block_ids(dst_ids, dst.num_blocks, what="dst_ids")
    tokens = len(sources) * src.view.block_size
    if len(targets) != -(-tokens // dst.view.block_size):
        raise BlockIdError(
            "dst_ids are not exactly the blocks of these tokens",
            tokens=tokens,
            blocks=len(targets),
            block_size=dst.view.block_size,
        )
    if len(np.unique(targets)) != len(targets):
        raise BlockIdError("dst_ids name a block twice", dst_ids=targets.tolist())
    if src is dst and (both := np.intersect1d(sources, targets)).size:
        raise BlockIdError("the copy would write blocks that it reads", block_ids=both.tolist())
    if tokens == 0:
        return
    num_parts, num_heads, _, _ = src.token_shape
    relayout(
        src.side(sources, device),
        dst.side(targets, device),
        num_parts=num_parts,
        num_heads=num_heads,
        num_tokens=tokens,
    )


def _copying_device(src: KVPool, dst: KVPool, direction: Direction) -> str:
    places = {"cpu": "h", "cuda": "d"}
    found = "2".join(places.get(pool.device.partition(":")[0], "?") for pool in (src, dst))
    if found != direction:
        raise GeometryError(
            "the pools are not where the direction says", direction=direction, found=found
        )
    return src.device if dst.device == "cpu" else dst.device
