"""Which blocks of the paged cache each request holds."""

from __future__ import annotations

import enum
import random

from kvconnector.errors import LocalError, UnknownRequestError


class AllocStatus(enum.Enum):
    """Whether a request's blocks can be had: now, later, or never in this pool."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class BlockManager:
    """Allocation of fixed-size blocks to requests. Every block has one owner or is free.

    Args:
        watermark: share of the pool that admission leaves free for the growth of running requests.
        scatter_seed: hand blocks out in a shuffled order, as after hours of traffic; None: ascending.
    """

    def __init__(
        self, *, block_size: int, num_blocks: int, watermark: float, scatter_seed: int | None
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._watermark_blocks = int(watermark * num_blocks)
        self._free = list(range(num_blocks))[::-1]
        if scatter_seed is not None:
            random.Random(scatter_seed).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int) -> AllocStatus:
        """Whether a new request of `num_tokens` tokens can be admitted."""
        needed = self.blocks_for(num_tokens)
        if needed > self.num_blocks:
            return AllocStatus.NEVER
        # an empty pool has nobody whose growth the watermark would protect
        reserve = self._watermark_blocks if self._tables else 0
        return AllocStatus.OK if needed + reserve <= len(self._free) else AllocStatus.LATER

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a new request the blocks for its first `num_tokens` tokens.

        Raises:
            LocalError: the request already has blocks, or there are too few; nothing changed.
        """
        if request_id in self._tables:
            raise LocalError("the request already has blocks", request_id=request_id)
        if self.blocks_for(num_tokens) > len(self._free):
            raise LocalError("too few free blocks", request_id=request_id, num_tokens=num_tokens)
        self._tables[request_id] = [self._free.pop() for _ in range(self.blocks_for(num_tokens))]

    def append_slots(self, request_id: str, num_tokens: int) -> bool:
        """Grow a request's table to hold `num_tokens` tokens; False, and no change, if too few blocks are free."""
        table = self._table(request_id)
        missing = max(0, self.blocks_for(num_tokens) - len(table))
        if missing > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(missing))
        return True

    def free(self, request_id: str) -> None:
        """Return a request's blocks; a request without blocks is ignored."""
        self._free.extend(reversed(self._tables.pop(request_id, [])))

    def get_block_table(self, request_id: str) -> list[int]:
        """A copy of the request's block ids, in token order."""
        return list(self._table(request_id))

    def get_num_free_gpu_blocks(self) -> int:
        """Free blocks of the device's pool."""
        return len(self._free)

    def _table(self, request_id: str) -> list[int]:
        try:
            return self._tables[request_id]
        except KeyError:
            raise UnknownRequestError("the request has no blocks", request_id=request_id) from None
