"""The paged KV cache of one rank: real strided tensors in any layout, seen as logical [B, H, N, D].

Legend: B blocks, H heads, N tokens of a block, D head dim, C latent dim, T tokens of a step, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minillm.cache_groups import LayerGroup
    from minillm.config import Layout
    from minillm.partition import RankShare

Zeros = Callable[..., Tensor]
"""`torch.zeros` on the cache's device."""


class PagedCache:
    """The caches of one rank's layers.

    Per layer one allocation: `[2, B, ...]` with K before V, MLA `[B, N, C]`; of a state one per part. `parts[layer]`
    are the logical `[B, H, N, D]` views (K and V, the one latent, or the parts of a state as one token each); they
    share memory with the allocation and are what the connector registers.

    Where ranks share tokens, the blocks hold this rank's alone, and `tokens_below` says which those are.

    Layouts: HND `[B, H, N, D]`, NHD `[B, N, H, D]`, HDN as HND but with K stored transposed, `[B, H, D, N]`.

    Args:
        num_blocks: by cache group.
        pinned: in host memory that a GPU can read.
    """

    def __init__(
        self,
        share: RankShare,
        groups: Sequence[LayerGroup],
        *,
        num_blocks: Sequence[int],
        layout: Layout,
        device: str,
        pinned: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.device = device
        self.context_parallel = share.context_parallel
        self.group_of: dict[int, int] = {}
        self.parts: dict[int, tuple[Tensor, ...]] = {}
        zeros = partial(torch.zeros, device=device, pin_memory=pinned)
        for index, (group, count) in enumerate(zip(groups, num_blocks, strict=True)):
            for layer in sorted(set(group.layers) & set(share.layers)):
                self.group_of[layer] = index
                if group.kind == "state":
                    self.parts[layer] = _allocate_state(share, count, zeros)
                elif share.is_mla:
                    latent = _allocate_latent(share, layout, count, group.rank_block_size, zeros)
                    self.parts[layer] = (latent,)
                else:
                    self.parts[layer] = _allocate_kv(
                        share, layout, count, group.rank_block_size, zeros
                    )

    def group_layers(self, group: int) -> tuple[int, ...]:
        """This rank's layers of a cache group, ascending."""
        return tuple(layer for layer, own in self.group_of.items() if own == group)

    def write(self, layer: int, values_THD: Sequence[Tensor], slots: Slots) -> None:
        """Store one `[T, H, D]` tensor per part at `slots`."""
        for part_BHND, value_THD in zip(self.parts[layer], values_THD, strict=True):
            kept_THD = value_THD if slots.rows is None else value_THD[slots.rows]
            part_BHND[slots.block_ids, :, slots.offsets] = kept_THD

    def tokens_below(self, stop: int) -> Tensor:
        """Positions below `stop` of the tokens that this rank caches, in the order in which its blocks hold them."""
        group = self.context_parallel
        turns = torch.arange(stop, device=self.device) // group.interleave_tokens
        return (turns % group.world_size == group.rank).nonzero().squeeze(1)

    def read(self, layer: int, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, ...]:
        """The first `num_tokens` tokens in a sequence's blocks, one `[H, L, D]` tensor per part. Copies."""
        used = block_ids[: -(-num_tokens // self.groups[self.group_of[layer]].rank_block_size)]
        return tuple(
            part_BHND[used].permute(1, 0, 2, 3).flatten(1, 2)[:, :num_tokens]
            for part_BHND in self.parts[layer]
        )

    def read_range(self, layer: int, block_ids: Tensor, tokens: range) -> tuple[Tensor, ...]:
        """Some tokens of a sequence's blocks, one `[L, H, D]` tensor per part. Copies."""
        positions = torch.arange(tokens.start, tokens.stop, device=block_ids.device)
        block_size = self.groups[self.group_of[layer]].block_size
        places = (block_ids[positions // block_size], positions % block_size)
        return tuple(part_BHND[places[0], :, places[1]] for part_BHND in self.parts[layer])


@dataclass(frozen=True, slots=True)
class Slots:
    """Where tokens of a step go in one group: block and offset per cached row, int64; `rows` are those, None all."""

    block_ids: Tensor
    offsets: Tensor
    rows: Tensor | None = None


def _allocate_kv(
    share: RankShare, layout: Layout, num_blocks: int, block_size: int, zeros: Zeros
) -> tuple[Tensor, Tensor]:
    heads, dim = len(share.kv_heads), share.cache_dim
    if layout == "NHD":
        kv = zeros(2, num_blocks, block_size, heads, dim)
        return kv[0].transpose(1, 2), kv[1].transpose(1, 2)
    kv = zeros(2, num_blocks, heads, block_size * dim)
    k_BHF, v_BHF = kv
    v_BHND = v_BHF.unflatten(2, (block_size, dim))
    if layout == "HDN":
        return k_BHF.unflatten(2, (dim, block_size)).transpose(2, 3), v_BHND
    return k_BHF.unflatten(2, (block_size, dim)), v_BHND


def _allocate_latent(
    share: RankShare, layout: Layout, num_blocks: int, block_size: int, zeros: Zeros
) -> Tensor:
    """One head, so HND and NHD are the same memory; HDN stores the latent transposed."""
    if layout == "HDN":
        latent = zeros(num_blocks, share.cache_dim, block_size)
        return latent.transpose(1, 2).unsqueeze(1)
    return zeros(num_blocks, block_size, share.cache_dim).unsqueeze(1)


def _allocate_state(share: RankShare, num_blocks: int, zeros: Zeros) -> tuple[Tensor, ...]:
    """A state has no tokens to order: its layout is always `[B, H, 1, D]`."""
    heads = len(share.state_heads)
    return tuple(zeros(num_blocks, heads, 1, width) for width in share.state_widths)
