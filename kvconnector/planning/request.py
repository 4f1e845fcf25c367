"""What a consumer rank is asked to load: token ranges and the blocks that hold them, per cache group."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.cache.views import check_block_ids
from kvconnector.errors import BlockIdError


class GroupBlocks(msgspec.Struct, frozen=True, eq=False):
    """A request's blocks in one group of one engine: `block_ids[i]` holds tokens from `(first_block + i) * block_size`.

    The `block_size` here is `GroupGeometry.virtual_block_tokens`: under context parallelism an id stands for a block on
    each rank of the group. `first_block` is above zero where leading blocks are gone, as outside a sliding window.
    """

    block_ids: npt.NDArray[np.int32]
    first_block: int = 0

    def __post_init__(self) -> None:
        if self.block_ids.ndim != 1 or self.block_ids.dtype != np.int32 or self.first_block < 0:
            raise BlockIdError(
                "blocks are an int32 vector of ids and a non-negative first_block",
                shape=self.block_ids.shape,
                dtype=str(self.block_ids.dtype),
                first_block=self.first_block,
            )

    @classmethod
    def of(cls, block_ids: Sequence[int], first_block: int = 0) -> GroupBlocks:
        """From any sequence of integers. Raises BlockIdError: an id is no integer, negative or above int32."""
        return cls(check_block_ids(block_ids, 1 << 31, what="block ids"), first_block)

    @property
    def wire_ids(self) -> bytes:
        """The ids as they travel: little-endian int32."""
        return self.block_ids.astype("<i4", copy=False).tobytes()

    def token_range(self, block_size: int) -> range:
        """Tokens that these blocks have room for."""
        start = self.first_block * block_size
        return range(start, start + len(self.block_ids) * block_size)

    def check_covers(self, start: int, stop: int, block_size: int, *, what: str) -> None:
        """Raise BlockIdError unless the blocks hold all tokens from `start` to `stop`."""
        held = self.token_range(block_size)
        if start < stop and (start < held.start or stop > held.stop):
            raise BlockIdError(
                f"{what} do not hold these tokens",
                tokens=(start, stop),
                blocks_hold=(held.start, held.stop),
                block_size=block_size,
            )

    def covering(self, tokens: range, block_size: int, *, what: str) -> GroupBlocks:
        """Only the blocks that hold `tokens`. Raises BlockIdError: the blocks do not hold all of them."""
        if not tokens:
            return GroupBlocks(self.block_ids[:0], self.first_block)
        self.check_covers(tokens.start, tokens.stop, block_size, what=what)
        first, offset = tokens.start // block_size, self.first_block
        stop = -(-tokens.stop // block_size)
        return GroupBlocks(self.block_ids[first - offset : stop - offset], first)
