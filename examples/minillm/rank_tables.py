"""The block tables of one rank, in two forms: on the host with copies on the device, or on the device alone.

Legend: T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvconnector.cache.block_table import MultiGroupBlockTable
from kvconnector.cache.slot_mapping import NO_CONTEXT_PARALLEL, ContextParallel
from minillm.cache_groups import LayerGroup
from minillm.config import BlockTables
from minillm.messages import SequenceInput

if TYPE_CHECKING:
    from kvconnector.cache.device_block_table import DeviceBlockTables


class StepTables(NamedTuple):
    """What a step needs of the tables, on the device: of each sequence the block ids by group, int64, and of each group
    the slots of all tokens, int64 `[T]`, `PAD_SLOT_ID` where another rank caches the token.
    """

    block_ids: tuple[tuple[Tensor, ...], ...]
    slots_T: tuple[Tensor, ...]


class RankTables(Protocol):
    """A row per running request in every cache group."""

    device: str

    def take(self, inputs: Sequence[SequenceInput], positions_T: Tensor) -> StepTables:
        """Bring the rows of a step's sequences up to date. `positions_T` are the tokens' positions, on the device."""
        ...


class HostTables:
    """`MultiGroupBlockTable`: rows and slots are computed on the host and copied to the device in each step."""

    def __init__(self, tables: MultiGroupBlockTable, device: str) -> None:
        self.device = device
        self.tables = tables

    def take(self, inputs: Sequence[SequenceInput], positions_T: Tensor) -> StepTables:
        """Slots are computed from the inputs: the host has the positions too."""
        for item in inputs:
            change = self.tables.add_row if item.overwrite else self.tables.append_row
            change(item.block_ids, item.row)
        self.tables.commit(1 + max(item.row for item in inputs))
        rows = np.repeat([item.row for item in inputs], [len(item.token_ids) for item in inputs])
        positions = np.concatenate(
            [np.arange(item.start, item.start + len(item.token_ids)) for item in inputs]
        )
        self.tables.compute_slot_mapping(rows, positions.astype(np.int64))
        self.tables.commit_slot_mapping()
        return StepTables(
            block_ids=tuple(
                tuple(
                    table.device_tensor()[item.row, : table.num_blocks(item.row)].long()
                    for table in self.tables
                )
                for item in inputs
            ),
            slots_T=tuple(table.device_slot_mapping(len(rows)) for table in self.tables),
        )


class DeviceTables:
    """`DeviceBlockTables`: only what changes is sent to the device, which gathers rows and computes slots itself."""

    def __init__(self, tables: DeviceBlockTables, device: str) -> None:
        self.device = device
        self.tables = tables

    def take(self, inputs: Sequence[SequenceInput], positions_T: Tensor) -> StepTables:
        """One launch for all changes, one for the rows, one for the slots."""
        tables, device = self.tables, self.device
        for item in inputs:
            tables.append_block_ids(item.row, item.block_ids, overwrite=item.overwrite)
        tables.apply_staged_writes()
        rows = torch.tensor([item.row for item in inputs], dtype=torch.int32, device=device)
        ends = np.cumsum([0, *(len(item.token_ids) for item in inputs)])
        starts = torch.tensor(ends, dtype=torch.int32, device=device)
        by_group = tables.gather_block_tables(rows)
        slots = tables.compute_slot_mappings(starts, positions_T)
        return StepTables(
            block_ids=tuple(
                tuple(
                    table[index, : tables.num_blocks(group, item.row)].long()
                    for group, table in enumerate(by_group)
                )
                for index, item in enumerate(inputs)
            ),
            slots_T=tuple(slots),
        )


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
        "max_num_reqs": max_rows,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_batched_tokens,
        "device": device,
        "context_parallel": context_parallel,
    }
    if kind == "host":
        return HostTables(MultiGroupBlockTable(**sizes), device)
    # imported here so that a rank without them starts without their kernels
    from kvconnector.cache.device_block_table import DeviceBlockTables

    return DeviceTables(DeviceBlockTables(**sizes), device)
