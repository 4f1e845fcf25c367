"""Maps a row of a block table and a token's position to the pool slot that holds the token's KV.

An allocation block holds `block_size` tokens. Under decode context parallelism over `n` ranks one block id stands for a
block on every rank, so a *virtual block* is `n x block_size` consecutive tokens, which the ranks take in turns of
`interleave_tokens`. If the attention kernel's blocks are smaller, a table holds the kernel's ids: allocation block `b`
is the kernel blocks `b x ratio .. b x ratio + ratio - 1`. The slot is the same in both: `b x block_size + offset`.

In a compressed group `row_tokens` tokens share a slot, their *row*, and a block has `block_size / row_tokens` of them.
The last token of a row writes it, so the other ones have no slot. In a ring a request has one block, whose slots its
tokens take in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError, GeometryError, require_at_least
from kvconnector.layout import NO_CONTEXT_PARALLEL, ContextParallel

PAD_SLOT_ID = -1
"""The slot of a token that another rank stores, or that is not the last one of its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGeometry:
    """The mapping of positions to slots in one cache group on one rank. Sizes are in tokens. Raises GeometryError: a
    size is below 1, the kernel's block or the interleave does not divide the allocation's block, `row_tokens` does not
    divide the kernel's block or the interleave, or a ring is compressed or shared.
    """

    block_size: int
    kernel_block_size: int
    context_parallel: ContextParallel = NO_CONTEXT_PARALLEL
    row_tokens: int = 1
    is_ring: bool = False

    def __post_init__(self) -> None:
        sizes = {"block_size": self.block_size, "kernel_block_size": self.kernel_block_size}
        require_at_least(1, GeometryError, **sizes, row_tokens=self.row_tokens)
        if self.block_size % self.kernel_block_size:
            raise GeometryError("the kernel's block does not divide the allocation's", **sizes)
        place = self.context_parallel
        runs = [self.kernel_block_size]
        runs += [place.interleave_tokens] if place.world_size > 1 else []
        if any(run % self.row_tokens for run in runs):
            raise GeometryError("a row crosses the end of a block or an interleave", geometry=self)
        if self.is_ring and (self.row_tokens > 1 or place.world_size > 1):
            raise GeometryError("a ring has a slot for each token, on one rank", geometry=self)
        if place.world_size > 1 and self.block_size % place.interleave_tokens:
            raise GeometryError("the interleave does not divide the block", geometry=self)

    @property
    def kernel_blocks_per_block(self) -> int:
        """Number of kernel ids that stand for one allocation id."""
        return self.block_size // self.kernel_block_size

    @property
    def virtual_block_tokens(self) -> int:
        """Number of consecutive tokens of a request that one block id stands for, over all ranks."""
        return self.block_size * self.context_parallel.world_size

    def max_blocks_per_request(self, max_model_len: int, num_speculative_tokens: int) -> int:
        """Return how many allocation ids a row of a table needs. A recurrent layer has one block for its state and one
        per speculative token, however large its blocks are. Only whole rows need room, and a ring has one block. Raises
        GeometryError: a count is out of range.
        """
        require_at_least(1, GeometryError, max_model_len=max_model_len)
        require_at_least(0, GeometryError, num_speculative_tokens=num_speculative_tokens)
        if self.is_ring:
            return 1
        row_tokens = max_model_len // self.row_tokens * self.row_tokens
        return max(-(-row_tokens // self.virtual_block_tokens), 1 + num_speculative_tokens)


def group_geometries(
    block_sizes: Sequence[int],
    kernel_block_sizes: Sequence[int] | None,
    context_parallel: ContextParallel | Sequence[ContextParallel],
    row_tokens: Sequence[int] | None = None,
    rings: Sequence[bool] | None = None,
) -> tuple[BlockGeometry, ...]:
    """Return the geometry of each cache group. One place in context parallelism is that of all groups. Raises
    GeometryError: there is no group, one lacks a value, or the sizes do not fit.
    """
    kernels = block_sizes if kernel_block_sizes is None else kernel_block_sizes
    places = (
        [context_parallel] * len(block_sizes)
        if isinstance(context_parallel, ContextParallel)
        else context_parallel
    )
    rows = [1] * len(block_sizes) if row_tokens is None else row_tokens
    is_ring = [False] * len(block_sizes) if rings is None else rings
    values = (kernels, places, rows, is_ring)
    if not block_sizes or {*map(len, values)} != {len(block_sizes)}:
        raise GeometryError(
            "every cache group needs a value of each kind, and there must be a group",
            block_sizes=tuple(block_sizes),
            kernel_block_sizes=tuple(kernels),
            context_parallel=tuple(places),
            row_tokens=tuple(rows),
            rings=tuple(is_ring),
        )
    return tuple(
        BlockGeometry(
            block_size=size,
            kernel_block_size=kernel,
            context_parallel=place,
            row_tokens=m,
            is_ring=wraps,
        )
        for size, kernel, place, m, wraps in zip(block_sizes, *values, strict=True)
    )


def naive_slot(block_ids: Sequence[int], position: int, geometry: BlockGeometry) -> int:
    """Return the slot of one token of a request with these allocation ids. This is the oracle for `slot_mapping`."""
    cp = geometry.context_parallel
    if geometry.is_ring:
        position %= geometry.block_size
    block, offset = divmod(position, geometry.virtual_block_tokens)
    turn, place = divmod(offset, cp.interleave_tokens)
    round_of_turns, owner = divmod(turn, cp.world_size)
    if owner != cp.rank or (position + 1) % geometry.row_tokens:
        return PAD_SLOT_ID
    local_offset = round_of_turns * cp.interleave_tokens + place
    rows_per_block = geometry.block_size // geometry.row_tokens
    return block_ids[block] * rows_per_block + local_offset // geometry.row_tokens


def slot_mapping(
    kernel_ids: npt.NDArray[np.int32],
    num_kernel_ids: npt.NDArray[np.int32],
    rows: npt.NDArray[np.integer],
    positions: npt.NDArray[np.integer],
    *,
    geometry: BlockGeometry,
    out: npt.NDArray[np.int64],
) -> None:
    """Write the slots of tokens to `out`, or `PAD_SLOT_ID` for tokens without one.

    Args:
        kernel_ids: Kernel block ids, a request per row, int32 `[num_rows, width]`.
        num_kernel_ids: The number of ids in each row, int32 `[num_rows]`.
        rows: The row of each token, `[num_tokens]`, which must exist.
        positions: The index of each token in its request, `[num_tokens]`.
        geometry: The sizes of blocks, and this rank's place.
        out: The slots, int64 `[num_tokens]`.

    Raises:
        BlockIdError: a position is negative, or writes a slot beyond its request's blocks, on any rank.
    """
    cp, m = geometry.context_parallel, geometry.row_tokens
    negative = positions < 0
    if geometry.is_ring:
        positions = positions % geometry.block_size
    blocks, offsets = np.divmod(positions, geometry.virtual_block_tokens)
    if cp.world_size > 1:
        turns, places = np.divmod(offsets, cp.interleave_tokens)
        rounds, owners = np.divmod(turns, cp.world_size)
        offsets = rounds * cp.interleave_tokens + places
    columns = blocks * geometry.kernel_blocks_per_block
    missing = columns >= num_kernel_ids[rows]
    if m > 1:
        writes_row = (positions + 1) % m == 0
        missing &= writes_row
    missing |= negative
    if missing.any():
        token = int(missing.argmax())
        row = int(rows[token])
        raise BlockIdError(
            "a token has no block in its request's row",
            token=token,
            row=row,
            position=int(positions[token]),
            num_kernel_blocks=int(num_kernel_ids[row]),
        )
    if geometry.kernel_blocks_per_block > 1:
        kernel_blocks, offsets = np.divmod(offsets, geometry.kernel_block_size)
        columns = columns + kernel_blocks
    if m > 1:
        offsets, columns = offsets // m, np.where(writes_row, columns, 0)
    rows_per_block = geometry.kernel_block_size // m
    np.multiply(kernel_ids[rows, columns], rows_per_block, out=out, dtype=np.int64)
    out += offsets
    if m > 1:
        out[~writes_row] = PAD_SLOT_ID
    if cp.world_size > 1:
        out[owners != cp.rank] = PAD_SLOT_ID
