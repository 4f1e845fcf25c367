"""The allocator that finds computed blocks again by their content."""

from __future__ import annotations

from collections.abc import Iterable

from kvconnector.cache.block_manager.allocator import (
    NEVER_ACCESSED_S,
    BlockAllocator,
    CachedContent,
    Device,
)
from kvconnector.cache.block_manager.evictor import LRUEvictor
from kvconnector.errors import BlockIdError


class PrefixCachingAllocator(BlockAllocator):
    """Keeps published blocks findable while they are owned and, after that, until evicted.

    A block is published only when its content has been computed, so whatever `lookup` returns can
    be read at once. Two blocks may come to hold the same content when two requests compute it side
    by side; the first stays the one to be found. They are not merged: block tables would change
    under kernels and transfers that already hold their ids.
    """

    def __init__(self, device: Device, num_blocks: int) -> None:
        super().__init__(device, num_blocks)
        self._evictor = LRUEvictor()
        self._block_of_hash: dict[bytes, int] = {}
        self._contents: list[CachedContent | None] = [None] * num_blocks
        self._last_access_s = [NEVER_ACCESSED_S] * num_blocks
        self._num_queried = 0
        self._num_found = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner, cached content or not."""
        return len(self._free_ids) + len(self._evictor)

    @property
    def hit_rate(self) -> float:
        """Share of looked-up blocks that were found, 0.0 before the first."""
        return self._num_found / self._num_queried if self._num_queried else 0.0

    def allocate(self, count: int) -> list[int]:
        """As the base class; gives up cached content only when no other block is free."""
        self.require_free(count)
        block_ids = super().allocate(min(count, len(self._free_ids)))
        while len(block_ids) < count:
            block_id = self._evictor.evict()
            self._forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds one owner to each block, which is owned already or was returned by `lookup`."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._evictor.remove(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int], last_access_s: float = NEVER_ACCESSED_S) -> None:
        """As the base class; a published block becomes evictable, by its owners' latest access."""
        for block_id in block_ids:
            remaining = self._ref_counts[block_id] - 1
            if remaining < 0:
                raise BlockIdError("block has no owner", device=self.device, block_id=block_id)
            self._ref_counts[block_id] = remaining
            content = self._contents[block_id]
            if content is not None:
                accessed_s = max(self._last_access_s[block_id], last_access_s)
                self._last_access_s[block_id] = accessed_s
                if remaining == 0:
                    self._evictor.add(block_id, accessed_s, content.depth)
            elif remaining == 0:
                self._free_ids.append(block_id)

    def lookup(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold this content, up to the first that is missing; changes no owner."""
        found: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_of_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_lookup(self, num_queried: int, num_found: int) -> None:
        """Enters a lookup whose result was used into the hit rate."""
        self._num_queried += num_queried
        self._num_found += num_found

    def publish(self, block_id: int, content: CachedContent) -> None:
        """Declares an owned block computed; nothing happens if this content is already findable."""
        if content.block_hash not in self._block_of_hash:
            self._contents[block_id] = content
            self._block_of_hash[content.block_hash] = block_id

    def published(self, block_id: int) -> CachedContent | None:
        """The content under which the block can be found, if it can."""
        return self._contents[block_id]

    def _forget(self, block_id: int) -> None:
        content = self._contents[block_id]
        if content is not None:
            del self._block_of_hash[content.block_hash]
            self._contents[block_id] = None
            self._last_access_s[block_id] = NEVER_ACCESSED_S
