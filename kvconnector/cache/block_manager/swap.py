"""Moving block tables from one device to the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvconnector.cache.block_manager.allocator import BlockAllocator
from kvconnector.cache.block_manager.copy_on_write import BlockCopy
from kvconnector.cache.block_manager.sequence_blocks import SequenceBlocks


class SwapPlan(NamedTuple):
    """What moving some tables takes; computed without changing anything."""

    found: dict[int, int]
    """Source block -> block of the destination that already caches its content: no copy."""
    missing: list[int]
    """Source blocks to copy, each once however many tables share it."""
    num_queried: int
    """Source blocks looked up in the destination's cache."""
    num_blocks_needed: int
    """Free blocks of the destination that the move uses up."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the tables hold on the destination."""
        return len(self.found) + len(self.missing)


def plan_swap(
    tables: Iterable[SequenceBlocks], source: BlockAllocator, destination: BlockAllocator
) -> SwapPlan:
    """Plans the move of `tables`, which live on `source`."""
    found: dict[int, int] = {}
    missing: list[int] = []
    num_queried = 0
    for block_id in dict.fromkeys(block_id for table in tables for block_id in table.block_ids):
        content = source.published(block_id)
        hit = [] if content is None else destination.lookup((content.block_hash,))
        num_queried += content is not None
        if hit:
            found[block_id] = hit[0]
        else:
            missing.append(block_id)
    num_needed = len(missing) + destination.num_idle(found.values())
    return SwapPlan(found, missing, num_queried, num_needed)


def apply_swap(
    tables: Iterable[SequenceBlocks],
    plan: SwapPlan,
    source: BlockAllocator,
    destination: BlockAllocator,
) -> list[BlockCopy]:
    """Moves the tables as planned; returns the blocks to copy. Raises OutOfBlocksError; nothing changed then."""
    destination.require_free(plan.num_blocks_needed)
    # Cached blocks first: allocating the rest could evict them.
    destination.share(plan.found.values())
    copies = list(zip(plan.missing, destination.allocate(len(plan.missing)), strict=True))
    moved = plan.found | dict(copies)
    for source_id, destination_id in copies:
        content = source.published(source_id)
        if content is not None:
            destination.publish(destination_id, content)
    for table in tables:
        block_ids = [moved[block_id] for block_id in table.block_ids]
        destination.share(block_ids)
        source.release(table.block_ids, table.last_access_s)
        table.block_ids = block_ids
        table.allocator = destination
    # Each table holds its own share now; this gives back the one that protected the blocks.
    destination.release(moved.values())
    destination.count_lookup(plan.num_queried, len(plan.found))
    return copies
