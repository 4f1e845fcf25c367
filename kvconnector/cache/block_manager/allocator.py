"""Reference-counted block ids of one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kvconnector.cache.block_manager.errors import OutOfBlocksError
from kvconnector.errors import BlockIdError

NEVER_ACCESSED_S = float("-inf")


class Device(Enum):
    """Where a block lives."""

    GPU = "gpu"
    CPU = "cpu"


class CachedContent(NamedTuple):
    """What a published block holds: its chain hash and its index among its sequence's blocks."""

    block_hash: bytes
    depth: int


class BlockAllocator:
    """Hands out ids 0 .. num_blocks - 1 of one device and counts the owners of each.

    This one caches no content: nothing is ever found again. `PrefixCachingAllocator` does.
    """

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device = device
        self.num_total_blocks = num_blocks
        # First in, first out: blocks freed together are handed out together, which keeps runs of
        # consecutive ids, and a block just freed is the last to be overwritten.
        self._free_ids = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return len(self._free_ids)

    @property
    def hit_rate(self) -> float:
        """Share of looked-up blocks that were found, 0.0 before the first."""
        return 0.0

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one block table holds the block."""
        return self._ref_counts[block_id] > 1

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these have no owner, so that sharing them uses up a free block."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def require_free(self, count: int) -> None:
        """Raises OutOfBlocksError if fewer than `count` blocks are free."""
        if count > self.num_free_blocks:
            raise OutOfBlocksError(
                "not enough free blocks",
                device=self.device.value,
                needed=count,
                free=self.num_free_blocks,
                total=self.num_total_blocks,
            )

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of undefined content, each with one owner.

        Raises:
            OutOfBlocksError: fewer are free; nothing was allocated.
        """
        self.require_free(count)
        pop, ref_counts = self._free_ids.popleft, self._ref_counts
        block_ids = [pop() for _ in range(count)]
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds one owner to each block, which somebody owns already."""
        for block_id in block_ids:
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int], last_access_s: float = NEVER_ACCESSED_S) -> None:
        """Takes one owner from each block; without an owner it is free.

        Raises:
            BlockIdError: a block has no owner.
        """
        ref_counts = self._ref_counts
        for block_id in block_ids:
            remaining = ref_counts[block_id] - 1
            if remaining < 0:
                raise BlockIdError("block has no owner", device=self.device, block_id=block_id)
            ref_counts[block_id] = remaining
            if remaining == 0:
                self._free_ids.append(block_id)

    def lookup(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold this content, up to the first that is missing; changes no owner."""
        return []

    def count_lookup(self, num_queried: int, num_found: int) -> None:
        """Enters a lookup whose result was used into the hit rate."""

    def publish(self, block_id: int, content: CachedContent) -> None:
        """Declares an owned block computed, so that `lookup` may find it."""

    def published(self, block_id: int) -> CachedContent | None:
        """The content under which the block can be found, if it can."""
        return None
