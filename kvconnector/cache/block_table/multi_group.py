"""The block tables of all cache groups of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvconnector.cache.block_table.ids import BlockIds, check_every_group
from kvconnector.cache.block_table.single import BlockTable
from kvconnector.cache.slot_mapping import NO_CONTEXT_PARALLEL, ContextParallel, group_geometries


class MultiGroupBlockTable:
    """One `BlockTable` per cache group, changed together, or none if one refuses: a request has one row in all.

    Arguments and errors are those of `DeviceBlockTables` and `BlockTable`.
    """

    def __init__(
        self,
        *,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        context_parallel: ContextParallel = NO_CONTEXT_PARALLEL,
        device: str,
    ) -> None:
        self.tables = tuple(
            BlockTable(
                geometry=geometry,
                max_num_reqs=max_num_reqs,
                max_num_blocks_per_req=geometry.max_blocks_per_request(
                    max_model_len, num_speculative_tokens
                ),
                max_num_batched_tokens=max_num_batched_tokens,
                device=device,
            )
            for geometry in group_geometries(block_sizes, kernel_block_sizes, context_parallel)
        )

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, group: int) -> BlockTable:
        return self.tables[group]

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self.tables)

    def append_row(self, block_ids: Sequence[BlockIds], row: int) -> None:
        """Add each group's allocation ids behind those of a row."""
        self._write(block_ids, row, overwrite=False)

    def add_row(self, block_ids: Sequence[BlockIds], row: int) -> None:
        """Put a new request's allocation ids into a row of every group, in place of what it held."""
        self._write(block_ids, row, overwrite=True)

    def move_row(self, source: int, target: int) -> None:
        """`BlockTable.move_row` in every group."""
        for table in self.tables:
            table.move_row(source, target)

    def swap_row(self, first: int, second: int) -> None:
        """`BlockTable.swap_row` in every group."""
        for table in self.tables:
            table.swap_row(first, second)

    def clear_row(self, row: int) -> None:
        """`BlockTable.clear_row` in every group."""
        for table in self.tables:
            table.clear_row(row)

    def clear(self) -> None:
        """`BlockTable.clear` in every group."""
        for table in self.tables:
            table.clear()

    def commit(self, num_reqs: int) -> None:
        """`BlockTable.commit` in every group."""
        for table in self.tables:
            table.commit(num_reqs)

    def compute_slot_mapping(
        self, req_indices: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.int64], ...]:
        """`BlockTable.compute_slot_mapping` of every group."""
        return tuple(table.compute_slot_mapping(req_indices, positions) for table in self.tables)

    def commit_slot_mapping(self) -> None:
        """`BlockTable.commit_slot_mapping` in every group."""
        for table in self.tables:
            table.commit_slot_mapping()

    def _write(self, block_ids: Sequence[BlockIds], row: int, *, overwrite: bool) -> None:
        check_every_group(block_ids, len(self.tables))
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.stage(ids, row, overwrite=overwrite)
        for table in self.tables:
            table.write_staged()
