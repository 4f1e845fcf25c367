"""Grows a table, replaces shared blocks before they are written, and moves tables between devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvconnector.cache.block_manager.allocator import BlockAllocator
from kvconnector.cache.block_manager.sequence_blocks import SequenceBlocks
from kvconnector.errors import BlockIdError

BlockCopy = tuple[int, int]
"""(source block id, destination block id)."""


class AppendPlan(NamedTuple):
    """The changes that append slots to one table."""

    num_tokens: int
    """Number of tokens that have slots afterwards."""
    num_new_blocks: int
    """Number of blocks that are added at the end."""
    copied: list[int]
    """Indices into `block_ids` of shared blocks that the slots touch, each replaced by a copy. Blocks after the last
    token are copied like others: the engine may have written drafts to their lookahead slots, and accepted some."""

    @property
    def num_blocks_needed(self) -> int:
        """Number of blocks that the allocator must provide."""
        return self.num_new_blocks + len(self.copied)


def require_lookahead(num_lookahead_slots: int) -> None:
    """Raise BlockIdError if the lookahead is negative."""
    if num_lookahead_slots < 0:
        raise BlockIdError(
            "lookahead slots must not be negative", num_lookahead_slots=num_lookahead_slots
        )


def plan_append(table: SequenceBlocks, num_tokens: int, num_lookahead_slots: int) -> AppendPlan:
    """Plan slots up to `num_tokens` and for the lookahead. Raises BlockIdError: the lookahead is negative."""
    require_lookahead(num_lookahead_slots)
    num_tokens = max(num_tokens, table.num_tokens)
    num_slots = num_tokens + num_lookahead_slots
    end_touched = table.paging.num_blocks(num_slots)
    copied: list[int] = []
    if num_slots > table.num_tokens:
        first_touched = table.paging.block_of(table.num_tokens)
        touched = range(first_touched, min(end_touched, table.num_blocks))
        indices = (block - len(table.dropped) for block in touched)
        copied = [index for index in indices if table.allocator.is_shared(table.block_ids[index])]
    return AppendPlan(num_tokens, max(0, end_touched - table.num_blocks), copied)


def apply_append(table: SequenceBlocks, plan: AppendPlan) -> list[BlockCopy]:
    """Change the table as planned, and return the blocks to copy before the next write. Raises OutOfBlocksError."""
    fresh = table.allocator.allocate(plan.num_blocks_needed)
    table.block_ids.extend(fresh[: plan.num_new_blocks])
    shared = [table.block_ids[index] for index in plan.copied]
    copies = list(zip(shared, fresh[plan.num_new_blocks :], strict=True))
    for index, (_, block_id) in zip(plan.copied, copies, strict=True):
        table.block_ids[index] = block_id
    table.allocator.release(shared, table.last_access_s)
    table.num_tokens = plan.num_tokens
    return copies


def split_dependent_copies(copies: Iterable[BlockCopy]) -> list[list[BlockCopy]]:
    """Split copies, given in order, into batches whose copies may run at the same time.

    A block that was freed between two appends may be the source of one copy and the destination of a later one, which
    must not overwrite what the first one still reads.
    """
    batches: list[list[BlockCopy]] = []
    sources: set[int] = set()
    destinations: set[int] = set()
    for source, destination in copies:
        conflicts = destination in sources or destination in destinations or source in destinations
        if conflicts or not batches:
            batches.append([])
            sources, destinations = set(), set()
        batches[-1].append((source, destination))
        sources.add(source)
        destinations.add(destination)
    return batches


class SwapPlan(NamedTuple):
    """The changes that move some tables to the other device."""

    found: dict[int, int]
    """Source block -> block of the destination that already caches its content, so that it need not be copied."""
    missing: list[int]
    """Source blocks to copy, each once, shared or not."""
    num_queried: int
    """Number of source blocks that were looked up in the destination's cache."""
    num_blocks_needed: int
    """Number of free blocks of the destination that the move uses up."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the tables hold on the destination."""
        return len(self.found) + len(self.missing)


def plan_swap(
    tables: Iterable[SequenceBlocks], source: BlockAllocator, destination: BlockAllocator
) -> SwapPlan:
    """Plan the move of `tables`, which live on `source`."""
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
    """Move the tables as planned, and return the blocks to copy. Raises OutOfBlocksError: nothing has changed."""
    destination.require_free(plan.num_blocks_needed)
    # cached blocks first, because taking the rest could evict them
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
    # each table has a share of its own now; return the one that protected the blocks
    destination.release(moved.values())
    destination.count_lookup(plan.num_queried, len(plan.found))
    return copies
