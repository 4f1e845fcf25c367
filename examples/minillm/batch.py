"""A step as tensors: the ranks' block tables, and where each token's KV goes.

Legend: T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvconnector.cache.block_table import MultiGroupBlockTable
from minillm.cache_groups import LayerGroup
from minillm.messages import SequenceInput
from minillm.paged_cache import Slots


class RankTables:
    """The block tables of one rank: a row per running request in every cache group."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        max_rows: int,
        max_model_len: int,
        max_batched_tokens: int,
        device: str,
    ) -> None:
        self.groups = tuple(groups)
        self.device = device
        self.tables = MultiGroupBlockTable(
            block_sizes=[group.block_size for group in groups],
            max_num_reqs=max_rows,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_batched_tokens,
            device=device,
        )

    def update(self, inputs: Sequence[SequenceInput]) -> None:
        """Bring the rows of a step's sequences up to date, on the host and on the device."""
        for item in inputs:
            change = self.tables.add_row if item.overwrite else self.tables.append_row
            change(item.block_ids, item.row)
        self.tables.commit(1 + max(item.row for item in inputs))

    def block_ids(self, row: int) -> tuple[Tensor, ...]:
        """A row's block ids by group, int64 on the device."""
        return tuple(
            table.device_tensor()[row, : table.num_blocks(row)].long() for table in self.tables
        )

    def slots(self, inputs: Sequence[SequenceInput]) -> tuple[Slots, ...]:
        """Where the tokens of a step go, by group."""
        counts = [len(item.token_ids) for item in inputs]
        rows = np.repeat([item.row for item in inputs], counts)
        starts = np.repeat([item.start for item in inputs], counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        positions = (starts + np.arange(len(rows)) - first).astype(np.int64)
        self.tables.compute_slot_mapping(rows, positions)
        self.tables.commit_slot_mapping()
        found = []
        for group, table in zip(self.groups, self.tables, strict=True):
            slots = table.device_slot_mapping(len(rows))
            found.append(Slots(slots // group.block_size, slots % group.block_size))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's rows `[first, first + count)` of a batch; its first row is at position `start`.

    `block_ids` are its tables by cache group.
    """

    first: int
    count: int
    start: int
    block_ids: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors. `slots` are by cache group; `sample_rows` the rows to sample after."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots: tuple[Slots, ...]
    sequences: tuple[SequenceSlice, ...]
    sample_rows: Tensor

    @classmethod
    def build(cls, inputs: Sequence[SequenceInput], tables: RankTables) -> Batch:
        """Concatenate the sequences of a step. Updates `tables`."""
        tables.update(inputs)
        sequences, positions, sample_rows = [], [], []
        first = 0
        for item in inputs:
            count = len(item.token_ids)
            sequences.append(SequenceSlice(first, count, item.start, tables.block_ids(item.row)))
            positions.append(torch.arange(item.start, item.start + count))
            first += count
            if item.sample:
                sample_rows.append(first - 1)
        device = tables.device
        return cls(
            token_ids_T=torch.tensor([t for item in inputs for t in item.token_ids], device=device),
            positions_T=torch.cat(positions).to(device),
            slots=tables.slots(inputs),
            sequences=tuple(sequences),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        )
