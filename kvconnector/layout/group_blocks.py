"""`GroupBlocks`: the ids of a request's blocks in one cache group, in the form in which they travel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError
from kvconnector.layout.views import check_block_ids

_FEW_BLOCKS = 64  # up to this number, Python finds the highest id faster than numpy


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True, kw_only=True, dict=True):
    """A request's blocks in one cache group: `block_ids[i]` holds the tokens from `(first_block + i) * block_size` on.

    `block_size` here means `GroupGeometry.virtual_block_tokens`: under context parallelism one id stands for a block on
    each rank of the group. `first_block` is above zero if leading blocks are gone, as outside a sliding window.
    `wire_ids` are the ids as little-endian int32, as they travel between processes and engines. Raises BlockIdError:
    `wire_ids` ends inside an id, or `first_block` is negative or exceeds int32.
    """

    first_block: int
    wire_ids: bytes

    def __post_init__(self) -> None:
        if len(self.wire_ids) % 4 or not 0 <= self.first_block < 1 << 31:
            raise BlockIdError(
                "blocks must be 4-byte ids with a non-negative first_block",
                nbytes=len(self.wire_ids),
                first_block=self.first_block,
            )

    @classmethod
    def of(cls, block_ids: Sequence[int], first_block: int = 0) -> GroupBlocks:
        """Make blocks from a sequence of integers. Raises BlockIdError: an id is not an integer from 0 to 2^31 - 1."""
        ids = check_block_ids(block_ids, None, what="block ids")
        return cls(first_block=first_block, wire_ids=ids.astype("<i4", copy=False).tobytes())

    def extended(self, block_ids: Sequence[int]) -> GroupBlocks:
        """Return these blocks followed by others. Raises BlockIdError: as `of`."""
        if not block_ids:
            return self
        more = GroupBlocks.of(block_ids).wire_ids
        return GroupBlocks(first_block=self.first_block, wire_ids=self.wire_ids + more)

    @cached_property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The ids, int32 `[num_blocks]`, a copy of `wire_ids`."""
        return np.frombuffer(self.wire_ids, "<i4").astype(np.int32)

    def highest_id(self) -> int:
        """Return the highest id, or -1 without ids. Read as unsigned, so a negative id from a peer exceeds any pool."""
        if len(self.wire_ids) > 4 * _FEW_BLOCKS:
            return int(self.block_ids.view(np.uint32).max())
        return max(memoryview(self.wire_ids).cast("I"), default=-1)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.wire_ids) // 4

    def token_range(self, block_size: int) -> range:
        """Return the tokens that these blocks have room for."""
        start = self.first_block * block_size
        return range(start, start + len(self.wire_ids) // 4 * block_size)

    def check_hold(self, tokens: range, block_size: int, *, what: str) -> slice:
        """Return the slice of `block_ids` that holds `tokens`. `what` names the blocks in errors. Raises BlockIdError:
        the blocks do not hold all of the tokens, or the slice names a block twice.
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
            raise BlockIdError(f"{what} name a block twice", blocks=len(ids), distinct=num_distinct)
        return holding

    def covering(self, tokens: range, block_size: int, *, what: str) -> GroupBlocks:
        """Return only the blocks that hold `tokens`. Raises BlockIdError: as `check_hold`."""
        holding = self.check_hold(tokens, block_size, what=what)
        ids = self.wire_ids[4 * holding.start : 4 * holding.stop]
        return GroupBlocks(first_block=self.first_block + holding.start, wire_ids=ids)
