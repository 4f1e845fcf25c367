"""The paged KV cache of one rank: real strided tensors in any layout, seen as logical [B, H, N, D].

Legend: B blocks, H heads, N tokens of a block, D head dim, C latent dim, T tokens of a step, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minillm.config import Layout
    from minillm.partition import RankShare


class PagedCache:
    """The caches of one rank's layers.

    Per layer one allocation: llama `[2, B, ...]` with K before V, MLA `[B, N, C]`. `parts[layer]` are the logical
    `[B, H, N, D]` views (K and V, or the one latent); they share memory with the allocation and are what the connector
    registers.

    Layouts: HND `[B, H, N, D]`, NHD `[B, N, H, D]`, HDN as HND but with K stored transposed, `[B, H, D, N]`.
    """

    def __init__(
        self, share: RankShare, *, layout: Layout, block_size: int, num_blocks: int, device: str
    ) -> None:
        self.block_size = block_size
        self.parts: dict[int, tuple[Tensor, ...]] = {}
        for layer in share.layers:
            if share.is_mla:
                self.parts[layer] = (
                    _allocate_latent(share, layout, num_blocks, block_size, device),
                )
            else:
                self.parts[layer] = _allocate_kv(share, layout, num_blocks, block_size, device)

    def write(self, layer: int, values_THD: Sequence[Tensor], slots: tuple[Tensor, Tensor]) -> None:
        """Store one `[T, H, D]` tensor per part at `slots`: block ids and offsets in the block, each int64 `[T]`."""
        block_ids, offsets = slots
        for part_BHND, value_THD in zip(self.parts[layer], values_THD, strict=True):
            part_BHND[block_ids, :, offsets] = value_THD

    def read(self, layer: int, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, ...]:
        """The first `num_tokens` tokens of a sequence's blocks, one `[H, L, D]` tensor per part. Copies."""
        return tuple(
            part_BHND[block_ids].permute(1, 0, 2, 3).flatten(1, 2)[:, :num_tokens]
            for part_BHND in self.parts[layer]
        )


def _allocate_kv(
    share: RankShare, layout: Layout, num_blocks: int, block_size: int, device: str
) -> tuple[Tensor, Tensor]:
    heads, dim = len(share.kv_heads), share.cache_dim
    if layout == "NHD":
        kv = torch.zeros(2, num_blocks, block_size, heads, dim, device=device)
        return kv[0].transpose(1, 2), kv[1].transpose(1, 2)
    kv = torch.zeros(2, num_blocks, heads, block_size * dim, device=device)
    k_BHF, v_BHF = kv
    v_BHND = v_BHF.unflatten(2, (block_size, dim))
    if layout == "HDN":
        return k_BHF.unflatten(2, (dim, block_size)).transpose(2, 3), v_BHND
    return k_BHF.unflatten(2, (block_size, dim)), v_BHND


def _allocate_latent(
    share: RankShare, layout: Layout, num_blocks: int, block_size: int, device: str
) -> Tensor:
    """One head, so HND and NHD are the same memory; HDN stores the latent transposed."""
    if layout == "HDN":
        latent = torch.zeros(num_blocks, share.cache_dim, block_size, device=device)
        return latent.transpose(1, 2).unsqueeze(1)
    return torch.zeros(num_blocks, block_size, share.cache_dim, device=device).unsqueeze(1)
