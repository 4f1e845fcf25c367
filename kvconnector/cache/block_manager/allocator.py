"""Reference-counted block ids of one device, and a prefix cache of their contents."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kvconnector.errors import BlockIdError, LocalError, Retry

_Entry = tuple[float, int, int]
_STALE_ENTRIES_ALLOWED = 64


class OutOfBlocksError(LocalError):
    """The device has fewer free blocks than were requested. Nothing was allocated."""

    retry = Retry.NEVER


class LRUEvictor:
    """Blocks without an owner whose content can still be found, least recently accessed first.

    Of blocks with equal access times, the deepest in its chain is evicted first: a block cannot be found without those
    before it, so a chain must be evicted from its end.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        # removal leaves the heap as it is: an entry counts only while `_entries` has it too
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, block_id: int, last_access_s: float, depth: int) -> None:
        """Make a block evictable. `depth` is its index among its sequence's blocks."""
        entry = (last_access_s, -depth, block_id)
        self._entries[block_id] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _STALE_ENTRIES_ALLOWED:
            self._heap = sorted(self._entries.values())

    def remove(self, block_id: int) -> None:
        """Take a block back into use. Raises KeyError: it is not evictable."""
        del self._entries[block_id]

    def evict(self) -> int:
        """Remove and return the block to evict first. Raises IndexError: there is none."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry[2]) == entry:
                del self._entries[entry[2]]
                return entry[2]


NEVER_ACCESSED_S = float("-inf")


class Device(Enum):
    """The device that has a block."""

    GPU = "gpu"
    CPU = "cpu"


class CachedContent(NamedTuple):
    """The content of a published block: its chain hash, and its index among its sequence's blocks."""

    block_hash: bytes
    depth: int


class BlockAllocator:
    """Hands out the ids 0 .. num_blocks - 1 of one device and counts the owners of each.

    Published blocks can be found while they have an owner, and after that until they are evicted. A block is published
    only when its content is computed, so everything that `lookup` returns can be read at once. If two requests compute
    the same content at the same time, only the first block can be found. The two are not merged, because that would
    change block tables while kernels and transfers use their ids.
    """

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device = device
        self.num_total_blocks = num_blocks
        # first in, first out: blocks that were freed together are taken together, which keeps ids consecutive
        self._free_ids = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._evictor = LRUEvictor()
        self._block_of_hash: dict[bytes, int] = {}
        self._contents: list[CachedContent | None] = [None] * num_blocks
        self._last_access_s = [NEVER_ACCESSED_S] * num_blocks
        self._num_queried = 0
        self._num_found = 0

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without an owner, with cached content or not."""
        return len(self._free_ids) + len(self._evictor)

    @property
    def hit_rate(self) -> float:
        """The share of looked-up blocks that were found; 0.0 before the first lookup."""
        return self._num_found / self._num_queried if self._num_queried else 0.0

    def is_shared(self, block_id: int) -> bool:
        """Return True if more than one block table holds the block."""
        return self._ref_counts[block_id] > 1

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of these have no owner: sharing one of them uses up a free block."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def require_free(self, count: int) -> None:
        """Raise OutOfBlocksError if fewer than `count` blocks are free."""
        if count > self.num_free_blocks:
            raise OutOfBlocksError(
                "not enough free blocks",
                device=self.device.value,
                needed=count,
                free=self.num_free_blocks,
                total=self.num_total_blocks,
            )

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one owner each, cached ones last. Raises OutOfBlocksError: fewer are free."""
        self.require_free(count)
        block_ids = [
            self._free_ids.popleft() if self._free_ids else self._evict() for _ in range(count)
        ]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block. A block must have an owner already, or come from `lookup`."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._evictor.remove(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int], last_access_s: float = NEVER_ACCESSED_S) -> None:
        """Remove an owner from each block. Raises BlockIdError: a block has none."""
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
        """Return the blocks with these hashes up to the first that is missing. Owners stay as they are."""
        found: list[int] = []
        for block_hash in block_hashes:
            if (block_id := self._block_of_hash.get(block_hash)) is None:
                break
            found.append(block_id)
        return found

    def count_lookup(self, num_queried: int, num_found: int) -> None:
        """Count a lookup, whose result was used, in the hit rate."""
        self._num_queried += num_queried
        self._num_found += num_found

    def publish(self, block_id: int, content: CachedContent) -> None:
        """Declare an owned block computed, so that it can be found, unless another one with its content can be."""
        if content.block_hash not in self._block_of_hash:
            self._contents[block_id] = content
            self._block_of_hash[content.block_hash] = block_id

    def published(self, block_id: int) -> CachedContent | None:
        """Return the content of a block that can be found; None for any other."""
        return self._contents[block_id]

    def forget_contents(self) -> None:
        """Make all content unfindable. Blocks without an owner become free, least recently used first."""
        while len(self._evictor):
            self._free_ids.append(self._evict())
        for block_id in self._block_of_hash.values():
            self._contents[block_id] = None
            self._last_access_s[block_id] = NEVER_ACCESSED_S
        self._block_of_hash.clear()

    def _evict(self) -> int:
        block_id = self._evictor.evict()
        if (content := self._contents[block_id]) is not None:
            del self._block_of_hash[content.block_hash]
            self._contents[block_id] = None
            self._last_access_s[block_id] = NEVER_ACCESSED_S
        return block_id
