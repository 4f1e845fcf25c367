"""A step as tensors: its tokens, and where the KV of each goes.

Legend: T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvconnector.cache.slot_mapping import PAD_SLOT_ID
from minillm.cache_groups import LayerGroup
from minillm.messages import SequenceInput
from minillm.paged_cache import Slots
from minillm.rank_tables import RankTables


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
    """A step as tensors. `slots` are by cache group; `sample_rows` the rows to sample `num_samples` tokens after."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots: tuple[Slots, ...]
    sequences: tuple[SequenceSlice, ...]
    sample_rows: Tensor
    num_samples: tuple[int, ...]

    @classmethod
    def build(
        cls, inputs: Sequence[SequenceInput], groups: Sequence[LayerGroup], tables: RankTables
    ) -> Batch:
        """Concatenate the sequences of a step, whose rows in all of `groups` are in `tables`."""
        device = tables.device
        positions = [torch.arange(item.start, item.start + len(item.token_ids)) for item in inputs]
        positions_T = torch.cat(positions).to(device)
        taken = tables.take(inputs, positions_T)
        sequences, sample_rows = [], []
        first = 0
        for item, block_ids in zip(inputs, taken.block_ids, strict=True):
            count = len(item.token_ids)
            sequences.append(SequenceSlice(first, count, item.start, block_ids))
            first += count
            if item.num_samples:
                sample_rows.append(first - 1)
        return cls(
            token_ids_T=torch.tensor([t for item in inputs for t in item.token_ids], device=device),
            positions_T=positions_T,
            slots=tuple(
                _slots_of(group, slots_T)
                for group, slots_T in zip(groups, taken.slots_T, strict=True)
            ),
            sequences=tuple(sequences),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
            num_samples=tuple(item.num_samples for item in inputs if item.num_samples),
        )


def _slots_of(group: LayerGroup, slots_T: Tensor) -> Slots:
    """Where the tokens go that this rank caches: all of them, unless others share them."""
    rows = None
    if group.dcp_size > 1:
        rows = (slots_T != PAD_SLOT_ID).nonzero().squeeze(1)
        slots_T = slots_T[rows]
    return Slots(slots_T // group.kernel_block_size, slots_T % group.kernel_block_size, rows)
