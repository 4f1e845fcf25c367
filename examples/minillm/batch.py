"""A step as tensors: its tokens, and where the KV of each goes.

Legend: T tokens of a step, M tokens that its encoder encodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

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

    `block_ids` are its tables by cache group. Its encoder's input has `num_encoder_tokens`.
    """

    first: int
    count: int
    start: int
    block_ids: tuple[Tensor, ...]
    num_encoder_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors. `slots` are by cache group. `num_samples` tokens are sampled after each of `sample_rows`.

    Beside its T tokens it may encode M tokens, which are the encoder's input of the sequences `encoded`.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    common_tokens: tuple[int, ...]
    """Number of leading tokens whose blocks are the same for all sequences, by cache group."""
    encoder_token_ids_M: Tensor
    encoded: tuple[SequenceSlice, ...]
    slots: tuple[Slots, ...]
    sequences: tuple[SequenceSlice, ...]
    sample_rows: Tensor
    num_samples: tuple[int, ...]

    @classmethod
    def build(
        cls,
        inputs: Sequence[SequenceInput],
        groups: Sequence[LayerGroup],
        tables: RankTables,
        common_blocks: Sequence[int] = (),
    ) -> Batch:
        """Concatenate the sequences of a step, whose rows in all of `groups` are in `tables`. `common_blocks` is the
        number of leading blocks, by group, that all of them share.
        """
        device = tables.device
        positions = [torch.arange(item.start, item.start + len(item.token_ids)) for item in inputs]
        positions_T = torch.cat(positions).to(device)
        taken = tables.take(inputs, positions_T)
        sequences, sample_rows, encoded = [], [], []
        first = 0
        for item, block_ids in zip(inputs, taken.block_ids, strict=True):
            count = len(item.token_ids)
            own = SequenceSlice(first, count, item.start, block_ids, item.num_encoder_tokens)
            sequences.append(own)
            if item.encoder_token_ids:
                encoded.append(own)
            first += count
            if item.num_samples:
                sample_rows.append(first - 1)
        return cls(
            token_ids_T=torch.tensor([t for item in inputs for t in item.token_ids], device=device),
            positions_T=positions_T,
            common_tokens=tuple(
                count * group.rank_block_size
                for group, count in zip(groups, common_blocks or [0] * len(groups), strict=True)
            ),
            encoder_token_ids_M=torch.tensor(
                [t for item in inputs for t in item.encoder_token_ids],
                dtype=torch.int64,
                device=device,
            ),
            encoded=tuple(encoded),
            slots=tuple(
                _slots_of(group, slots_T)
                for group, slots_T in zip(groups, taken.slots_T, strict=True)
            ),
            sequences=tuple(sequences),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
            num_samples=tuple(item.num_samples for item in inputs if item.num_samples),
        )

    @property
    def encoder_rows(self) -> Iterator[slice]:
        """Return each sequence's rows among the M."""
        stops = accumulate(each.num_encoder_tokens for each in self.encoded)
        return (
            slice(stop - each.num_encoder_tokens, stop)
            for each, stop in zip(self.encoded, stops, strict=True)
        )

    @property
    def encoder_positions_M(self) -> Tensor:
        """Return each token's position in its input."""
        device = self.positions_T.device
        places = [torch.arange(each.num_encoder_tokens, device=device) for each in self.encoded]
        return torch.cat(places)


def _slots_of(group: LayerGroup, slots_T: Tensor) -> Slots:
    """Slots of the tokens that this rank caches: all tokens, unless ranks share them or several share a row."""
    rows = None
    if group.dcp_size > 1 or group.row_tokens > 1:
        rows = (slots_T != PAD_SLOT_ID).nonzero().squeeze(1)
        slots_T = slots_T[rows]
    return Slots(slots_T // group.kernel_block_rows, slots_T % group.kernel_block_rows, rows)
