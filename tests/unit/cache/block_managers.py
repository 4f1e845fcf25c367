"""Requests in a block manager."""

from __future__ import annotations

from kvconnector.cache.block_manager import BlockSpaceManager, Sequence, SequenceGroup


def running(
    manager: BlockSpaceManager,
    num_tokens: int,
    *,
    seq_ids: tuple[int, ...] = (1,),
    num_encoder_tokens: int = 0,
) -> SequenceGroup:
    """A request of one prompt and these sequences, whose blocks are allocated."""
    encoder_seq = Sequence(1000, range(num_encoder_tokens)) if num_encoder_tokens else None
    seqs = [Sequence(seq_id, range(num_tokens)) for seq_id in seq_ids]
    group = SequenceGroup(f"request-{seq_ids[0]}", seqs, encoder_seq)
    manager.allocate(group)
    return group
