"""The block tables of one rank, in two forms: on the host with copies on the device, or on the device alone.

Legend: T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvconnector.cache.block_table import BlockTable, MultiGroupBlockTable
from kvconnector.cache.engine_step import yield_req_data
from kvconnector.layout import NO_CONTEXT_PARALLEL, ContextParallel
from minillm.cache_groups import LayerGroup
from minillm.config import BlockTables
from minillm.messages import SequenceInput, TableChanges

if TYPE_CHECKING:
    from kvconnector.cache.device_block_table import DeviceBlockTables


class StepTables(NamedTuple):
    """Tables of a step on the device: each sequence's block ids by group, int64, and each group's slots of all tokens,
    int64 `[T]`, `PAD_SLOT_ID` where another rank caches the token. A group of cross-attention has the slots of the
    tokens that the step encodes.
    """

    block_ids: tuple[tuple[Tensor, ...], ...]
    slots_T: tuple[Tensor, ...]


class HostTables:
    """`MultiGroupBlockTable`: rows and slots are computed on the host and copied to the device in each step.

    A step's requests have the first rows, in the step's order, so that one copy covers only them. A step's tokens have
    slots in the tables whose blocks hold a sequence's tokens; cross-attention's blocks hold an encoder's.
    """

    def __init__(
        self, tables: MultiGroupBlockTable, groups: Sequence[LayerGroup], device: str
    ) -> None:
        self.device = device
        self.tables = tables
        self._rows: list[str] = []
        self._is_cross = [group.kind == "cross" for group in groups]

    def warm_up(self) -> None:
        """Run an empty request's step."""
        self.tables.add_row([[0]] * len(self.tables), 0)
        self.tables.compute_slot_mapping(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self.tables.commit_slot_mapping()
        self.tables.clear()

    def update(self, changes: TableChanges) -> None:
        """Apply a step's changes, even if it computes nothing. The last row moves into the place of a removed one."""
        for name in changes.finished_req_ids:
            row, last = self._rows.index(name), len(self._rows) - 1
            if row == last:
                self.tables.clear_row(row)
            else:
                self.tables.move_row(last, row)
            self._rows[row] = self._rows[last]
            del self._rows[last]
        for name, block_ids, is_table_whole in yield_req_data(changes, release=(0, 33)):
            if name not in self._rows:
                self._rows.append(name)
            if block_ids is not None:
                self._write(block_ids, self._rows.index(name), is_table_whole=is_table_whole)

    def _write(self, block_ids: Sequence[Sequence[int]], row: int, *, is_table_whole: bool) -> None:
        if len(self.tables) > 1:
            write = self.tables.add_row if is_table_whole else self.tables.append_row
            write(block_ids, row)
        else:
            table = self.tables[0]
            write_one = table.add_row if is_table_whole else table.append_row
            write_one(block_ids[0], row)

    def take(self, inputs: Sequence[SequenceInput], positions_T: Tensor) -> StepTables:
        """Return rows and slots of a step's sequences. Slots come from the inputs: the host has the positions."""
        rows = self._rows
        for row, item in enumerate(inputs):
            held = rows.index(item.request_id)
            self.tables.swap_row(row, held)
            rows[row], rows[held] = rows[held], rows[row]
        self.tables.commit(len(inputs))
        token_rows = np.repeat(np.arange(len(inputs)), [len(item.token_ids) for item in inputs])
        positions = np.concatenate(
            [np.arange(item.start, item.start + len(item.token_ids)) for item in inputs]
        )
        slots = []
        for table, is_cross in zip(self.tables, self._is_cross, strict=True):
            if is_cross:
                slots.append(self._encoder_slots(table, inputs))
                continue
            table.compute_slot_mapping(token_rows, positions.astype(np.int64))
            table.commit_slot_mapping(len(token_rows))
            slots.append(table.device_slot_mapping(len(token_rows)))
        rows_of = BlockTable.host_tensor if self.device == "cpu" else BlockTable.device_tensor
        tables = [rows_of(table, len(inputs)) for table in self.tables]
        return StepTables(
            block_ids=tuple(
                tuple(
                    rows[index, : table.num_kernel_blocks(index)].long()
                    for rows, table in zip(tables, self.tables, strict=True)
                )
                for index in range(len(inputs))
            ),
            slots_T=tuple(slots),
        )

    def _encoder_slots(self, table: BlockTable, inputs: Sequence[SequenceInput]) -> Tensor:
        """Return the slots of the tokens that the step encodes."""
        size, rows = table.geometry.kernel_block_size, table.numpy(len(inputs))
        slots = [np.empty(0, dtype=np.int64)]
        for row, item in zip(rows, inputs, strict=True):
            places = np.arange(len(item.encoder_token_ids))
            slots.append(row[places // size].astype(np.int64) * size + places % size)
        return torch.from_numpy(np.concatenate(slots)).to(self.device)


class DeviceTables:
    """`DeviceBlockTables`: only what changes is sent to the device, which gathers rows and computes slots itself."""

    def __init__(
        self, tables: DeviceBlockTables, groups: Sequence[LayerGroup], device: str
    ) -> None:
        self.device = device
        self.tables = tables
        self._groups = tuple(groups)
        self._free = list(range(tables.max_num_reqs))[::-1]
        self._rows: dict[str, int] = {}

    def warm_up(self) -> None:
        """Run a step over empty rows, as a CUDA graph capture would."""
        tables = self.tables
        tables.append_block_ids(0, [[]] * tables.num_groups, overwrite=True)
        tables.apply_staged_writes()
        tables.gather_block_tables(torch.zeros(1, dtype=torch.int32, device=self.device))
        tables.dummy_block_tables(1)
        tables.compute_slot_mappings(
            torch.tensor([0, 1], dtype=torch.int32, device=self.device),
            torch.zeros(1, dtype=torch.int64, device=self.device),
        )
        tables.dummy_slot_mappings()

    def update(self, changes: TableChanges) -> None:
        """Apply a step's changes, even if it computes nothing: stage them, then apply all in one launch."""
        for name in changes.finished_req_ids:
            self._free.append(self._rows.pop(name))
        for name, block_ids, is_table_whole in yield_req_data(changes, release=(0, 33)):
            if name not in self._rows:
                self._rows[name] = self._free.pop()
            if block_ids is not None:
                row = self._rows[name]
                self.tables.append_block_ids(row, block_ids, overwrite=is_table_whole)
        self.tables.apply_staged_writes()

    def take(self, inputs: Sequence[SequenceInput], positions_T: Tensor) -> StepTables:
        """Return rows and slots of a step's sequences, one launch each. The tokens' positions are on the device."""
        tables, device = self.tables, self.device
        held = [self._rows[item.request_id] for item in inputs]
        rows = torch.tensor(held, dtype=torch.int32, device=device)
        ends = np.cumsum([0, *(len(item.token_ids) for item in inputs)])
        starts = torch.tensor(ends, dtype=torch.int32, device=device)
        by_group = tables.gather_block_tables(rows)
        slots = tables.compute_slot_mappings(starts, positions_T)
        return StepTables(
            block_ids=tuple(
                tuple(
                    table[index, : tables.num_kernel_blocks(group, row)].long()
                    for group, table in enumerate(by_group)
                )
                for index, row in enumerate(held)
            ),
            slots_T=tuple(
                self._encoder_slots(group, table, inputs)
                if group.kind == "cross"
                else own[: len(positions_T)]
                for group, table, own in zip(self._groups, by_group, slots, strict=True)
            ),
        )

    def _encoder_slots(
        self, group: LayerGroup, table: Tensor, inputs: Sequence[SequenceInput]
    ) -> Tensor:
        """Return the slots of the tokens that the step encodes."""
        size, slots = group.kernel_block_size, []
        for row, item in zip(table, inputs, strict=False):
            places = torch.arange(len(item.encoder_token_ids), device=self.device)
            slots.append(row[places // size].long() * size + places % size)
        return torch.cat(slots)


RankTables: TypeAlias = HostTables | DeviceTables
"""A row per running request in every cache group."""


def create_rank_tables(
    kind: BlockTables,
    groups: Sequence[LayerGroup],
    *,
    max_rows: int,
    max_model_len: int,
    max_batched_tokens: int,
    device: str,
    context_parallel: ContextParallel = NO_CONTEXT_PARALLEL,
) -> RankTables:
    """Tables for `max_rows` requests of up to `max_model_len` tokens."""
    sizes: dict[str, Any] = {
        "block_sizes": [group.rank_block_size for group in groups],
        "kernel_block_sizes": [group.kernel_block_size for group in groups],
        "max_num_reqs": max_rows,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_batched_tokens,
        "device": device,
        "context_parallel": context_parallel,
        "row_tokens": [group.row_tokens for group in groups],
    }
    if kind == "host":
        return HostTables(MultiGroupBlockTable(**sizes), groups, device)
    # imported here so that a rank without them starts without their kernels
    from kvconnector.cache.device_block_table import DeviceBlockTables

    return DeviceTables(DeviceBlockTables(**sizes), groups, device)
