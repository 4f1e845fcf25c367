"""A request's blocks, as the engine names them and as they travel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError
from kvconnector.layout.views import check_block_ids

_FEW_BLOCKS = 64  # numpy takes longer than Python to find the highest of no more


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True, kw_only=True, dict=True):
    """A request's blocks in one group of one engine: `block_ids[i]` holds tokens from `(first_block + i) * block_size`.
    They travel as they are, between an engine's processes and between engines: `wire_ids` are little-endian int32.

    The `block_size` here is `GroupGeometry.virtual_block_tokens`: under context parallelism an id stands for a block on
    each rank of the group. `first_block` is above zero where leading blocks are gone, as outside a sliding window.
    Raises BlockIdError: bytes that are no whole ids, or a `first_block` that is negative or does not fit 32 bits.
    """

    first_block: int
    wire_ids: bytes

    def __post_init__(self) -> None:
        if len(self.wire_ids) % 4 or not 0 <= self.first_block < 1 << 31:
            raise BlockIdError(
                "blocks are ids of 4 bytes and a non-negative first_block",
                nbytes=len(self.wire_ids),
                first_block=self.first_block,
            )

    @classmethod
    def of(cls, block_ids: Sequence[int], first_block: int = 0) -> GroupBlocks:
        """From any sequence of integers. Raises BlockIdError: an id is no integer, negative or above int32."""
        ids = check_block_ids(block_ids, 1 << 31, what="block ids")
        return cls(first_block=first_block, wire_ids=ids.astype("<i4", copy=False).tobytes())

    def extended(self, block_ids: Sequence[int]) -> GroupBlocks:
        """With more blocks after these. Raises BlockIdError: as `of`."""
        if not block_ids:
            return self
        more = GroupBlocks.of(block_ids).wire_ids
        return GroupBlocks(first_block=self.first_block, wire_ids=self.wire_ids + more)

    @cached_property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The ids, in an array of its own."""
        return np.frombuffer(self.wire_ids, "<i4").astype(np.int32)

    def highest_id(self) -> int:
        """Returns the highest id as an unsigned number, so that of a negative id, or -1 if there are no ids."""
        if len(self.wire_ids) > 4 * _FEW_BLOCKS:
            return int(self.block_ids.view(np.uint32).max())
        return max(memoryview(self.wire_ids).cast("I"), default=-1)

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.wire_ids) // 4

    def token_range(self, block_size: int) -> range:
        """Tokens that these blocks have room for."""
        start = self.first_block * block_size
        return range(start, start + len(self.wire_ids) // 4 * block_size)

    def check_hold(self, tokens: range, block_size: int, *, what: str) -> slice:
        """Return where in `block_ids` those are that hold `tokens`. Raises BlockIdError: some of these are in none, or
        two parts of them in the same block.
        """
        if not tokens:
            return slice(0, 0)
        held = self.token_range(block_size)
        if not held.start <= tokens.start < tokens.stop <= held.stop:
            raise BlockIdError(
                f"{what} do not hold these tokens",
                tokens=(tokens.start, tokens.stop),
                blocks_hold=(held.start, held.stop),
                block_size=block_size,
            )
        stop = -(-tokens.stop // block_size)
        holding = slice(tokens.start // block_size - self.first_block, stop - self.first_block)
        ids = memoryview(self.wire_ids).cast("I")[holding].tolist()
        if (num_distinct := len(set(ids))) < len(ids):
            raise BlockIdError(f"{what} name one twice", blocks=len(ids), distinct=num_distinct)
        return holding

    def covering(self, tokens: range, block_size: int, *, what: str) -> GroupBlocks:
        """Only the blocks that hold `tokens`. Raises BlockIdError: see `check_hold`."""
        holding = self.check_hold(tokens, block_size, what=what)
        ids = self.wire_ids[4 * holding.start : 4 * holding.stop]
        return GroupBlocks(first_block=self.first_block + holding.start, wire_ids=ids)
