"""`copy_kv_blocks`: whole blocks between two pools of any geometry, host or device, in one launch for all layers.

Host pools that a GPU copies from or to must be pinned memory: the kernel reads and writes them directly.
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
    """The views of one pool, for copies to and from it.

    Args:
        views: its parts, all of one shape (see `part_table`). The memory must outlive the pool.
        device: where the memory is: "cpu" or "cuda:N".

    Raises:
        GeometryError: there are no views, or views of different shapes.
    """

    def __init__(self, views: Sequence[KVView], device: str) -> None:
        self.device = device
        self._rows = part_table(views)
        self.view = views[0]
        self.num_blocks = min(view.num_blocks for view in views)
        self._tables: dict[str, PartTable] = {}

    @property
    def token_shape(self) -> tuple[int, int, int, int]:
        """What two pools must share: parts, heads, head dim, item size in bytes."""
        view = self.view
        return (len(self._rows), view.num_heads, view.head_dim, view.item_size_bytes)

    def side(self, ids: npt.NDArray[np.int32], device: str) -> PagedSide:
        """Blocks of the pool, for a copy that runs on `device`. Its table is made once for each device."""
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

    Block sizes and layouts may differ. On a GPU the copy is one launch on the current stream, not waited for; without
    a GPU it is done on return. Other blocks, and what of the last block the tokens do not fill, are not touched.

    Args:
        src: the pool to read.
        dst: the pool to write, which may be the same.
        src_ids: blocks of `src`.
        dst_ids: blocks of `dst`, exactly as many as these tokens need.
        direction: from host or device to host or device, which must be where the pools are.

    Raises:
        GeometryError: the pools are elsewhere, or differ in parts, heads, head dim or item size.
        BlockIdError: an id is outside its pool, a destination is named twice, or is a source in the same pool; or the
            destinations are too few or too many.
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
        raise BlockIdError("a launch would write blocks that it reads", block_ids=both.tolist())
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
