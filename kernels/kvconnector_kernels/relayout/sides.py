"""The two kinds of memory a re-layout reads and writes: windows into paged pools, and dense chunks.

Legend: a *part* is K, V, a latent or a state of one layer, as a logical `[block, head, token, dim]` array given by its
address and four byte strides. A *row* of a part table is `(address, block, head, token, dim stride)`, all in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import numpy as np
import numpy.typing as npt

from kvconnector_kernels.relayout.block_ids import BlockIds, BlockIdsAt, check_block_ids
from kvconnector_kernels.relayout.checks import (
    ITEM_SIZES_BYTES,
    BlockIdsError,
    GeometryMismatchError,
    RelayoutError,
    check_device,
    check_ids_in_pool,
)
from kvconnector_kernels.relayout.convert import Conversion
from kvconnector_kernels.relayout.runs import ADJACENT, TokenRuns

if TYPE_CHECKING:
    import torch

ElementOrder: TypeAlias = Literal["HND", "NHD", "HDN"]
ROW_COLUMNS = 5
_ORDERS: tuple[str, ...] = get_args(ElementOrder)


class PartTable:
    """One side's pool: the same part of every layer, `rows` int64 `[num_parts, 5]` (see the module's legend).

    All parts share the counts and the item size; addresses and strides may differ. `device` is where the copy runs and
    from where every address must be reachable: for `cuda:N` that is its own memory, a peer's mapped memory, or pinned
    host memory. For a GPU the rows are uploaded once, here.

    Raises:
        RelayoutError: rows of another shape, an address or a count below 1, a negative stride, an item size other than
            1, 2, 4 or 8 bytes, an unknown device.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        *,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        item_size_bytes: int,
        device: str,
    ) -> None:
        self.sizes = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "item_size_bytes": item_size_bytes,
        }
        """The counts and the item size by name, as this takes them."""
        for name, count in self.sizes.items():
            if count < 1:
                raise RelayoutError(f"{name} must be at least 1, not {count}")
        if item_size_bytes not in ITEM_SIZES_BYTES:
            raise RelayoutError(
                f"item_size_bytes must be one of {ITEM_SIZES_BYTES}: {item_size_bytes}"
            )
        check_device(device)
        self.rows = _checked_rows(rows)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.item_size_bytes = item_size_bytes
        self.device = device
        strides = self.rows[:, 1:]
        self.is_dim_contiguous = head_dim == 1 or bool((strides[:, 3] == item_size_bytes).all())
        self.is_token_contiguous = bool((strides[:, 2] == item_size_bytes).all())
        is_alike = bool((strides == strides[0]).all())
        self.strides_bytes = tuple(strides[0].tolist()) if is_alike else None
        """The strides of every part, or None if the parts differ in them."""
        self.address_bits = _address_bits(self.rows, (num_blocks, num_heads, block_size, head_dim))
        self.num_parts = len(self.rows)
        self.device_rows = None if device == "cpu" else _upload_and_wait(self.rows, device)
        self.rows_address: int = (
            self.rows.ctypes.data if self.device_rows is None else self.device_rows.data_ptr()
        )

    @property
    def order(self) -> ElementOrder:
        """The axes of one block by falling stride. With one head or one token, HND.

        Raises:
            GeometryMismatchError: the parts of this table differ in it.
        """
        orders = {self._order_of(row) for row in self.rows[:, 2:]}
        if len(orders) != 1:
            raise GeometryMismatchError(f"the parts of one table are stored as {sorted(orders)}")
        return orders.pop()

    def _order_of(self, strides: npt.NDArray[np.int64]) -> ElementOrder:
        head, token, dim = (int(stride) for stride in strides)
        if self.block_size > 1 and self.head_dim > 1 and dim > token:
            return "HDN"
        if self.num_heads > 1 and self.block_size > 1 and token > head:
            return "NHD"
        return "HND"

    def __repr__(self) -> str:
        return (
            f"PartTable({self.num_parts} parts of [{self.num_blocks}, {self.num_heads}, {self.block_size}, "
            f"{self.head_dim}] x {self.item_size_bytes} bytes on {self.device})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class PagedSide:
    """A window into paged pools: parts from `part_start`, heads from `head_start`, and tokens of a list of blocks.

    Token `t` of the copy is at position `token_start + runs.offset(t)` of the list, by default `token_start + t`, and
    position `p` is in block `block_ids[p // block_size]`. `block_ids` is a contiguous int32 vector: a numpy array for a
    table on the CPU, else a torch tensor on the table's device (`upload_block_ids` checks and uploads), or where such a
    vector is.

    Raises:
        RelayoutError: a negative start. BlockIdsError: ids of another type, shape or device.
    """

    table: PartTable
    block_ids: BlockIds
    part_start: int = 0
    head_start: int = 0
    token_start: int = 0
    runs: TokenRuns = ADJACENT

    def __post_init__(self) -> None:
        for name, start in (("part_start", self.part_start), ("head_start", self.head_start)):
            if start < 0:
                raise RelayoutError(f"{name} must not be negative: {start}")
        # the first run may begin before the first block, if the tokens there are skipped
        if self.token_start + self.runs.skip_tokens < 0:
            raise RelayoutError(f"token_start must not be negative: {self.token_start}")
        check_block_ids(self.block_ids, self.table.device)

    @property
    def num_ids(self) -> int:
        """The number of block ids."""
        ids = self.block_ids
        return ids.count if isinstance(ids, BlockIdsAt) else int(ids.shape[0])

    @property
    def device(self) -> str:
        """The device on which the copy runs."""
        return self.table.device


@dataclass(frozen=True, slots=True)
class PackedSide:
    """One dense chunk, for example a staging slot: logical `[part, head, token, dim]` without gaps.

    HND stores part, head, token, dim; NHD part, token, head, dim; HDN part, head, dim, token. The counts are those of
    the copy. `nbytes` is the room at `address`; a copy may use less of it.

    Raises:
        RelayoutError: a negative size, no address, an unknown order or device.
    """

    address: int
    nbytes: int
    order: ElementOrder
    device: str

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.address < 0 or (self.address == 0 and self.nbytes > 0):
            raise RelayoutError(f"no chunk of {self.nbytes} bytes can be at address {self.address}")
        if self.order not in _ORDERS:
            raise RelayoutError(f"unknown order {self.order!r}; known are {', '.join(_ORDERS)}")
        check_device(self.device)

    def strides_bytes(self, geometry: CopyGeometry) -> tuple[int, int, int, int]:
        """Return the byte strides of the part, head, token and dim axes for a copy of this geometry."""
        heads, tokens, item = geometry.num_heads, geometry.num_tokens, geometry.item_size_bytes
        token_row = geometry.head_dim * item
        part = heads * tokens * token_row
        if self.order == "HND":
            return (part, tokens * token_row, token_row, item)
        if self.order == "NHD":
            return (part, token_row, heads * token_row, item)
        return (part, tokens * token_row, item, tokens * item)


Side: TypeAlias = PagedSide | PackedSide


class CopyCounts(TypedDict):
    """The size of a copy.

    Attributes:
        num_parts: rows of both tables, or parts of a chunk.
        num_heads: heads of each part.
        num_tokens: tokens of each head.
    """

    num_parts: int
    num_heads: int
    num_tokens: int


class CopyGeometry(NamedTuple):
    """The size of a copy that fits both sides. If it converts elements, `item_size_bytes` are those of its chunk, or
    of the destination where there is none.
    """

    num_parts: int
    num_heads: int
    num_tokens: int
    head_dim: int
    item_size_bytes: int

    @property
    def nbytes(self) -> int:
        """Payload bytes of the copy."""
        rows = self.num_parts * self.num_heads * self.num_tokens
        return rows * self.head_dim * self.item_size_bytes


def check_copy(
    src: Side,
    dst: Side,
    conversion: Conversion | None = None,
    *,
    num_parts: int,
    num_heads: int,
    num_tokens: int,
) -> CopyGeometry:
    """Check that both sides hold a copy, and block ids on the CPU against the pool. Returns the copy's geometry.
    `conversion` says how its elements change type, if they do.

    Raises:
        RelayoutError: two chunks, a negative count, parts or heads outside a table, a chunk that is too small.
        BlockIdsError: too few block ids for the tokens, or ids outside the pool.
        GeometryMismatchError: the sides differ in device or head dim, or in item size without a conversion; or the
            conversion is for other item sizes, or for fewer parts or heads.
    """
    counts = {"num_parts": num_parts, "num_heads": num_heads, "num_tokens": num_tokens}
    for name, count in counts.items():
        if count < 0:
            raise RelayoutError(f"{name} must not be negative: {count}")
    if src.device != dst.device:
        raise GeometryMismatchError(
            f"source is on {src.device}, destination on {dst.device}; name the device that reaches both"
        )
    tables = [side.table for side in (src, dst) if isinstance(side, PagedSide)]
    if not tables:
        raise RelayoutError("a copy has a paged side: it is not between two chunks")
    first = tables[0]
    _check_alike("head_dim", tables)
    if conversion is None:
        _check_alike("item_size_bytes", tables)
        item = first.item_size_bytes
    else:
        item = _check_conversion(src, dst, conversion, num_parts, num_heads)
    geometry = CopyGeometry(num_parts, num_heads, num_tokens, first.head_dim, item)
    for what, side in (("source", src), ("destination", dst)):
        if isinstance(side, PagedSide):
            _check_paged(what, side, geometry)
        elif side.nbytes < geometry.nbytes:
            raise RelayoutError(
                f"the {what} chunk has room for {side.nbytes} bytes, the copy has {geometry.nbytes}"
            )
    return geometry


def _check_alike(name: str, tables: list[PartTable]) -> None:
    found = [table.sizes[name] for table in tables]
    if found[0] != found[-1]:
        raise GeometryMismatchError(f"{name} differs: the sides have {found}")


def _check_conversion(
    src: Side, dst: Side, conversion: Conversion, num_parts: int, num_heads: int
) -> int:
    """Return the bytes of an element in the chunk, or in the destination where there is none."""
    items = (conversion.src_item_bytes, conversion.dst_item_bytes)
    for side, item in zip((src, dst), items, strict=True):
        if isinstance(side, PagedSide) and side.table.item_size_bytes != item:
            raise GeometryMismatchError(
                f"{conversion.src_element} is converted to {conversion.dst_element}, but a pool has items of"
                f" {side.table.item_size_bytes} bytes"
            )
    paged = dst if isinstance(dst, PagedSide) else src
    assert isinstance(paged, PagedSide)  # a copy has a paged side
    rows, heads, _ = conversion.scales.shape
    if heads != num_heads or paged.part_start + num_parts > rows:
        raise GeometryMismatchError(
            f"there are scales for {rows} rows of {heads} heads, the copy has {num_heads} heads and ends at row"
            f" {paged.part_start + num_parts}"
        )
    return items[0] if isinstance(src, PackedSide) else items[1]


def _check_paged(what: str, side: PagedSide, geometry: CopyGeometry) -> None:
    table, runs = side.table, side.runs
    for axis, start, count, limit in (
        ("parts", side.part_start, geometry.num_parts, table.num_parts),
        ("heads", side.head_start, geometry.num_heads, table.num_heads),
    ):
        if start + count > limit:
            wanted = f"{start} to {start + count}"
            raise RelayoutError(f"the {what} has {limit} {axis}, the copy wants {wanted}")
    if not geometry.num_tokens:
        return
    first, last = side.token_start, side.token_start + geometry.num_tokens - 1
    if runs is not ADJACENT:
        first, last = (side.token_start + runs.offset(t) for t in (0, geometry.num_tokens - 1))
    needed_blocks = last // table.block_size + 1
    if needed_blocks > side.num_ids:
        raise BlockIdsError(
            f"the {what} has {side.num_ids} block ids of {table.block_size} tokens, the copy of tokens "
            f"{first} to {last + 1} needs {needed_blocks}"
        )
    if isinstance(side.block_ids, np.ndarray):
        first_block = first // table.block_size
        check_ids_in_pool(
            f"the {what}'s", side.block_ids[first_block:needed_blocks], table.num_blocks
        )


def _checked_rows(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != ROW_COLUMNS or not len(rows):
        raise RelayoutError(
            f"a part table is int64 [num_parts, {ROW_COLUMNS}], not {rows.dtype} of shape {rows.shape}"
        )
    if (rows[:, 0] < 1).any() or (rows[:, 1:] < 0).any():
        raise RelayoutError("a part table holds an address below 1 or a negative stride")
    # Our own copy, so that what was checked cannot change under a running copy.
    owned = np.array(rows, dtype=np.int64, order="C")
    owned.flags.writeable = False
    return owned


def _address_bits(
    rows: npt.NDArray[np.int64], counts: tuple[int, int, int, int]
) -> tuple[int, int, int, int, int]:
    """Return each column's union of set bits, 0 for an axis of one element. Its lowest bit is the common alignment."""
    bits = np.bitwise_or.reduce(rows, axis=0)
    block, head, token, dim = (
        int(column) if count > 1 else 0 for column, count in zip(bits[1:], counts, strict=True)
    )
    return int(bits[0]), block, head, token, dim


def _upload_and_wait(rows: npt.NDArray[np.int64], device: str) -> torch.Tensor:
    """Return the rows on the GPU, complete on return: later copies may run on any stream."""
    import torch

    return torch.tensor(rows).to(device)
