"""The operands of the block table kernels: the tables of all cache groups, reachable from one launch.

Legend: G groups, R rows, T tokens. A table holds *kernel* block ids: each of the allocator's ids is
`ratio` consecutive ones. Write records speak of the allocator's ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

PAD_SLOT_ID = -1
"""The slot of a token on another rank, within a row, without a block, or after the last token."""

PLACE_COLUMNS = ("world_size", "rank", "interleave_tokens", "row_tokens", "is_ring")
"""Which tokens of a group write a slot, and which: those of one rank among several, and the last one of each row; in a
ring the tokens take the slots of one block in turns."""

WRITE_COLUMNS = ("group", "row", "start", "count", "offset", "length")
"""`ids[offset : offset + count]` go to `start` of a row; `length` is its new length, or -1 to keep."""


@dataclass(frozen=True)
class TableSet:
    """The tables of all groups with the pointer table that a kernel finds them by.

    Attributes:
        tables: Per group, int32 `[R, width]`, contiguous.
        lengths: int32 `[G, R]`, number of kernel ids that are set in each row.
        pointers: int64 `[G]`, the address of each table, on the device.
        widths: int64 `[G]`, the width of each table, on the device.
    """

    tables: tuple[torch.Tensor, ...]
    lengths: torch.Tensor
    pointers: torch.Tensor
    widths: torch.Tensor

    @classmethod
    def zeros(cls, num_rows: int, widths: Sequence[int], device: torch.device) -> TableSet:
        """Empty tables."""
        tables = tuple(
            torch.zeros((num_rows, width), dtype=torch.int32, device=device) for width in widths
        )
        return cls(
            tables=tables,
            lengths=torch.zeros((len(tables), num_rows), dtype=torch.int32, device=device),
            pointers=torch.tensor(
                [table.data_ptr() for table in tables], dtype=torch.int64, device=device
            ),
            widths=torch.tensor(list(widths), dtype=torch.int64, device=device),
        )

    @property
    def num_groups(self) -> int:
        """Number of tables in the set."""
        return len(self.tables)

    @property
    def num_rows(self) -> int:
        """Number of rows of every table."""
        return self.lengths.shape[1]


@dataclass(frozen=True)
class TableGeometry:
    """Block sizes of all groups, and the tokens that have a slot on this rank.

    Attributes:
        block_sizes: int64 `[G]`, tokens per allocation block, on the device.
        kernel_block_sizes: int64 `[G]`, tokens per kernel block, a divisor, on the device.
        places: int64 `[G, 5]`, columns `PLACE_COLUMNS`, on the device. `rank` is this rank's index among the
            `world_size` ones that take a request's tokens in turns of `interleave_tokens`, a divisor of the block size
            if there are several. `row_tokens` tokens share a slot: a divisor of the kernel block, and of the interleave
            if there are several ranks. A ring is neither compressed nor shared.
        is_plain: True if every token has a slot of its own on this rank, in all groups.
    """

    block_sizes: torch.Tensor
    kernel_block_sizes: torch.Tensor
    places: torch.Tensor
    is_plain: bool

    @classmethod
    def of(
        cls,
        *,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int],
        places: Sequence[tuple[int, int, int, int, int]],
        device: torch.device,
    ) -> TableGeometry:
        """Return the geometry of groups whose values are given on the host."""
        sizes, kernel_sizes, rows = (
            torch.tensor(list(values), dtype=torch.int64, device=device)
            for values in (block_sizes, kernel_block_sizes, places)
        )
        return cls(
            block_sizes=sizes,
            kernel_block_sizes=kernel_sizes,
            places=rows,
            is_plain=all(place[0] == place[3] == 1 and not place[4] for place in places),
        )


class BlockTableKernels(Protocol):
    """The three operations; `naive`, `triton` and `cpu` of this package implement them."""

    def apply_writes(
        self, tables: TableSet, geometry: TableGeometry, records: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Write staged ids into the tables, expanded to kernel ids, and set the rows' lengths.

        Args:
            tables: Changed in place.
            geometry: Block sizes of the groups.
            records: int32 `[num_writes, 6]`, at least one, columns `WRITE_COLUMNS`; writes do not overlap. In memory
                that the device can read, its own or the host's.
            ids: int32, the allocator's ids to which the records refer, in the same kind of memory.
        """

    def gather_rows(self, source: TableSet, target: TableSet, rows: torch.Tensor) -> None:
        """Copy rows of the requests' tables to the batch's: row `rows[i]` to row `i`.

        After a row's ids the target is zero. A row that does not exist, such as -1, is empty.

        Args:
            source: Read only.
            target: Changed in its first `num_reqs` rows.
            rows: int32 `[num_reqs]`.
        """

    def map_slots(
        self,
        batch: TableSet,
        geometry: TableGeometry,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Compute the slots of a batch's tokens in every group.

        A token gets `PAD_SLOT_ID` if another rank stores it, a later token writes the row that it
        belongs to, or the request holds no block for it; so does every entry of `slots` after the
        last token.

        Args:
            batch: The tables of the batch's requests.
            geometry: of the groups.
            query_start_loc: int32 `[num_reqs + 1]`, ascending from 0: request `i` has tokens
                `[loc[i], loc[i + 1])`.
            positions: int64 `[T]`, the index of each token in its request.
            slots: int64 `[G, max_num_tokens]`, at least as wide as `positions`, changed in full.
        """
