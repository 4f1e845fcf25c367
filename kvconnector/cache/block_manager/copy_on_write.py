"""Growing a table: which blocks are new, and which shared ones must be replaced before a write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvconnector.cache.block_manager.block_table import BlockTable
from kvconnector.cache.block_manager.errors import SequenceError

BlockCopy = tuple[int, int]
"""(source block id, destination block id)."""


class AppendPlan(NamedTuple):
    """What appending slots to one table takes; computed without changing anything."""

    num_tokens: int
    """Tokens that have a slot afterwards."""
    num_logical_blocks: int
    """Logical length of the table afterwards."""
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


def plan_append(table: BlockTable, num_tokens: int, num_lookahead_slots: int) -> AppendPlan:
    """Plans slots for tokens up to `num_tokens` and for `num_lookahead_slots` behind them.

    Written slots are those behind the table's tokens; only the blocks they touch are looked at.

    Raises:
        SequenceError: the table has more tokens already.
        BlockIdError: a sliding window's ring is too short for so many new slots.
    """
    if num_tokens < table.num_tokens:
        raise SequenceError(
            "a sequence cannot shrink",
            num_tokens=num_tokens,
            num_tokens_with_slots=table.num_tokens,
        )
    geometry, allocator, block_ids = table.geometry, table.allocator, table.block_ids
    first_touched = table.num_tokens // geometry.block_size
    if num_tokens == table.num_tokens + 1 and num_lookahead_slots == 0:
        # Nearly every decode step: one more token in a block that this table alone holds.
        held_already = first_touched < table.num_logical_blocks
        if held_already and not allocator.is_shared(block_ids[first_touched % len(block_ids)]):
            return AppendPlan(num_tokens, table.num_logical_blocks, 0, (), ())
    geometry.check_lookahead(num_lookahead_slots)
    num_slots = num_tokens + num_lookahead_slots
    geometry.check_append(table.num_tokens, num_slots)
    num_logical_blocks = max(table.num_logical_blocks, geometry.num_logical_blocks(num_slots))
    num_held = geometry.num_physical_blocks(num_logical_blocks)
    copied: list[int] = []
    replaced: list[int] = []
    end_touched = geometry.num_logical_blocks(num_slots) if num_slots > table.num_tokens else 0
    for logical in range(first_touched, end_touched):
        index = logical % num_held
        if index >= len(block_ids) or not allocator.is_shared(block_ids[index]):
            continue
        holds_tokens = logical * geometry.block_size < table.num_tokens
        (copied if holds_tokens else replaced).append(index)
    return AppendPlan(
        num_tokens=num_tokens,
        num_logical_blocks=num_logical_blocks,
        num_new_blocks=num_held - len(block_ids),
        copied=tuple(copied),
        replaced=tuple(replaced),
    )


def apply_append(table: BlockTable, plan: AppendPlan) -> list[BlockCopy]:
    """Changes the table as planned and returns the copies to make before the next write.

    Raises:
        OutOfBlocksError: too few blocks are free; nothing changed.
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
    table.num_logical_blocks = plan.num_logical_blocks
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
