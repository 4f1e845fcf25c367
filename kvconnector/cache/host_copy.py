"""`copy_kv_blocks`: whole blocks between two pools of any geometry, host or device, in one launch for all layers.

Swapping, host staging and copies inside one GPU are the same call. Host pools that a GPU copies from or to must be
pinned memory: the kernel reads and writes them directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnector.cache.views import KVView, check_block_ids, part_table
from kvconnector.errors import BlockIdError, GeometryError
from kvconnector_kernels.relayout import PagedSide, PartTable, relayout, upload_block_ids

Direction: TypeAlias = Literal["h2d", "d2h", "d2d", "h2h"]


class KVPool:
    """The views of one pool, all of one shape (see `part_table`), and where their memory is: "cpu" or "cuda:N".

    The tables that the kernel reads are made once for each device that copies. The memory must outlive the pool. Raises
    GeometryError: no views, or views of different shapes.
    """

    def __init__(self, views: Sequence[KVView], device: str) -> None:
        self.device = device
        self._rows = part_table(views)
        self._view = views[0]
        self.num_blocks = min(view.num_blocks for view in views)
        self._tables: dict[str, PartTable] = {}

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._view.block_size

    @property
    def num_parts(self) -> int:
        """Views of the pool."""
        return int(self._rows.shape[0])

    @property
    def token_shape(self) -> tuple[int, int, int, int]:
        """What two pools must share: parts, heads, head dim, item size in bytes."""
        view = self._view
        return (self.num_parts, view.num_heads, view.head_dim, view.item_size_bytes)

    def table(self, device: str) -> PartTable:
        """The part table for a copy that runs on `device`."""
        if device not in self._tables:
            view = self._view
            self._tables[device] = PartTable(
                self._rows,
                num_blocks=self.num_blocks,
                block_size=view.block_size,
                num_heads=view.num_heads,
                head_dim=view.head_dim,
                item_size_bytes=view.item_size_bytes,
                device=device,
            )
        return self._tables[device]


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

    Raises:
        GeometryError: `direction` is not where the pools are, or they differ in parts, heads, head dim or item size.
        BlockIdError: ids outside a pool, a destination twice, or blocks that do not hold exactly the tokens.
    """
    device = _copying_device(src, dst, direction)
    if src.token_shape != dst.token_shape:
        raise GeometryError(
            "pools must agree in parts, heads, head dim and item size",
            src=src.token_shape,
            dst=dst.token_shape,
        )
    sources = check_block_ids(np.asarray(src_ids, dtype=np.int64), src.num_blocks, what="src_ids")
    targets = check_block_ids(np.asarray(dst_ids, dtype=np.int64), dst.num_blocks, what="dst_ids")
    tokens = len(sources) * src.block_size
    if len(targets) != -(-tokens // dst.block_size):
        raise BlockIdError(
            "dst_ids are not exactly the blocks of these tokens",
            tokens=tokens,
            blocks=len(targets),
            block_size=dst.block_size,
        )
    if len(np.unique(targets)) != len(targets):
        raise BlockIdError("dst_ids name a block twice", dst_ids=targets.tolist())
    if tokens == 0:
        return
    relayout(
        PagedSide(
            src.table(device),
            upload_block_ids(sources, num_blocks=src.num_blocks, device=device),
        ),
        PagedSide(
            dst.table(device),
            upload_block_ids(targets, num_blocks=dst.num_blocks, device=device),
        ),
        num_parts=src.num_parts,
        num_heads=src.token_shape[1],
        num_tokens=tokens,
    )


def _copying_device(src: KVPool, dst: KVPool, direction: Direction) -> str:
    """Where the copy runs: the GPU, if one is involved."""
    places = {"cpu": "h", "cuda": "d"}
    found = "2".join(places.get(pool.device.partition(":")[0], "?") for pool in (src, dst))
    if found != direction:
        raise GeometryError(
            "the pools are not where the direction says", direction=direction, found=found
        )
    return src.device if dst.device == "cpu" else dst.device
