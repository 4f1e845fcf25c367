"""Requests in a block manager."""

from __future__ import annotations

from kvconnector.cache.block_manager import BlockSpaceManager, Sequence, SequenceGroup


def group_of(num_tokens: int, *, seq_ids: tuple[int, ...] = (1,)) -> SequenceGroup:
    """A request of one prompt and these sequences, which wait."""
    seqs = [Sequence(seq_id, range(num_tokens)) for seq_id in seq_ids]
    return SequenceGroup(f"request-{seq_ids[0]}", seqs)


def running(
    manager: BlockSpaceManager, num_tokens: int, *, seq_ids: tuple[int, ...] = (1,)
) -> SequenceGroup:
    """The same, with blocks."""
    group = group_of(num_tokens, seq_ids=seq_ids)
    manager.allocate(group)
    return group
