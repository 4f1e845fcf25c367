"""Which cached block to give up first."""

from __future__ import annotations

import heapq

_Entry = tuple[float, int, int]
_STALE_ENTRIES_ALLOWED = 64


class LRUEvictor:
    """Blocks that nobody uses but whose content can still be hit, least recently accessed first.

    Among blocks of equal access time the one deepest in its chain goes first: without its
    predecessors a block cannot be found, so a chain must be given up from its end.
    """

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        # Removal leaves its heap entry behind; an entry counts only while `_entries` agrees.
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def add(self, block_id: int, last_access_s: float, depth: int) -> None:
        """Makes a block evictable. `depth` is its index among its sequence's blocks."""
        entry = (last_access_s, -depth, block_id)
        self._entries[block_id] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _STALE_ENTRIES_ALLOWED:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def remove(self, block_id: int) -> None:
        """Takes a block back into use. KeyError if it is not evictable."""
        del self._entries[block_id]

    def evict(self) -> int:
        """Removes and returns the first block to give up. IndexError if there is none."""
        while True:
            entry = heapq.heappop(self._heap)
            block_id = entry[2]
            if self._entries.get(block_id) == entry:
                del self._entries[block_id]
                return block_id
