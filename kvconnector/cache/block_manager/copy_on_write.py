"""Growing a table: which blocks are new, and which shared ones must be replaced before a write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvconnector.cache.block_manager.sequence_blocks import SequenceBlocks
from kvconnector.errors import BlockIdError

BlockCopy = tuple[int, int]
"""(source block id, destination block id)."""


class AppendPlan(NamedTuple):
    """What appending slots to one table takes; computed without changing anything."""

    num_tokens: int
    """Tokens that have a slot afterwards."""
    num_new_blocks: int
    """Blocks added at the end."""
    copied: tuple[int, ...]
    """Indices into `block_ids` of shared blocks with tokens to keep: replaced by a copy."""
    replaced: tuple[int, ...]
    """Indices of shared blocks without such tokens: replaced by an empty block."""

    @property
    def num_blocks_needed(self) -> int:
        """Blocks taken from the allocator."""
        return self.num_new_blocks + len(self.copied) + len(self.replaced)


def plan_append(table: SequenceBlocks, num_tokens: int, num_lookahead_slots: int) -> AppendPlan:
    """Plans slots for tokens up to `num_tokens` and for `num_lookahead_slots` behind them.

    Written slots are those behind the table's tokens; only the blocks they touch are looked at. Raises BlockIdError
    for a negative lookahead.
    """
    if num_lookahead_slots < 0:
        raise BlockIdError(
            "lookahead slots must not be negative", num_lookahead_slots=num_lookahead_slots
        )
    block_size, block_ids = table.paging.block_size, table.block_ids
    num_tokens = max(num_tokens, table.num_tokens)
    num_slots = num_tokens + num_lookahead_slots
    end_touched = table.paging.num_blocks(num_slots)
    copied: list[int] = []
    replaced: list[int] = []
    if num_slots > table.num_tokens:
        for block in range(table.num_tokens // block_size, min(end_touched, table.num_blocks)):
            index = block - len(table.dropped)
            if table.allocator.is_shared(block_ids[index]):
                holds_tokens = block * block_size < table.num_tokens
                (copied if holds_tokens else replaced).append(index)
    return AppendPlan(
        num_tokens=num_tokens,
        num_new_blocks=max(0, end_touched - table.num_blocks),
        copied=tuple(copied),
        replaced=tuple(replaced),
    )


def apply_append(table: SequenceBlocks, plan: AppendPlan) -> list[BlockCopy]:
    """Changes the table as planned and returns the copies to make before the next write. Raises OutOfBlocksError;
    nothing changed then.
    """
    copies: list[BlockCopy] = []
    if plan.num_blocks_needed:
        fresh = table.allocator.allocate(plan.num_blocks_needed)
        table.block_ids.extend(fresh[: plan.num_new_blocks])
        indices = plan.copied + plan.replaced
        shared = [table.block_ids[index] for index in indices]
        renewals = list(zip(shared, fresh[plan.num_new_blocks :], strict=True))
        for index, (_, block_id) in zip(indices, renewals, strict=True):
            table.block_ids[index] = block_id
        table.allocator.release(shared, table.last_access_s)
        copies = renewals[: len(plan.copied)]
    table.num_tokens = plan.num_tokens
    return copies


def split_dependent_copies(copies: Iterable[BlockCopy]) -> list[list[BlockCopy]]:
    """Splits copies, given in order, into batches whose copies may run at the same time.

    A block freed between two appends may be the source of an earlier copy and the destination of a
    later one; run at once, the second would overwrite what the first still reads.
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
