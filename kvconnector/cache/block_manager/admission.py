"""What the block manager decides about a group."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvconnector.cache.block_manager.allocator import BlockAllocator
from kvconnector.cache.block_manager.errors import SequenceError
from kvconnector.cache.block_manager.sequence import Sequence, SequenceGroup, SequenceStatus
from kvconnector.cache.block_manager.sequence_blocks import Paging


class AllocStatus(Enum):
    """Whether a group may take its blocks."""

    OK = "ok"
    LATER = "later"
    """Not enough blocks are free now."""
    NEVER = "never"
    """Not even an empty device would do."""


def waiting_seqs(group: SequenceGroup) -> list[Sequence]:
    """The waiting sequences of a group. Raises SequenceError: none waits, or two have different prompts."""
    waiting = group.seqs(SequenceStatus.WAITING)
    if not waiting:
        raise SequenceError("no sequence of the group waits", request_id=group.request_id)
    for seq in waiting[1:]:
        num_tokens = max(seq.num_tokens, waiting[0].num_tokens)
        if not seq.shares_prefix(waiting[0], num_tokens):
            raise SequenceError(
                "waiting sequences of one group must have the same tokens and extra keys",
                request_id=group.request_id,
                seq_ids=(waiting[0].seq_id, seq.seq_id),
            )
    return waiting


class StartPlan(NamedTuple):
    """What admitting a sequence takes; computed without changing anything."""

    resume_at: int
    """Tokens in front of the first step: cached here, or brought by somebody else."""
    first: int
    """The first block that the first step needs."""
    cached: list[int]
    """The blocks from there on that are cached."""
    num_queried: int
    num_tokens: int
    """Tokens that get slots."""
    num_held: int
    """Blocks from `first` on."""


def plan_start(
    prompt: Sequence,
    allocator: BlockAllocator,
    paging: Paging,
    *,
    resume_at: int,
    num_tokens: int,
) -> StartPlan:
    """Plans slots for a sequence's first step, the tokens from `resume_at` to `num_tokens`."""
    first = paging.first_needed(resume_at)
    # Never the block of the last token: the engine computes that token and writes its slot.
    num_full = (prompt.num_tokens - 1) // paging.block_size
    num_cached = min(num_full, resume_at // paging.block_size)
    hashes = prompt.block_hashes(paging.block_size, num_cached)[first:]
    return StartPlan(
        resume_at=resume_at,
        first=first,
        cached=allocator.lookup(hashes),
        num_queried=max(0, num_full - first),
        num_tokens=num_tokens,
        num_held=paging.num_blocks(num_tokens) - first,
    )


def find_cached_tokens(seq: Sequence, allocator: BlockAllocator, paging: Paging, limit: int) -> int:
    """The most leading tokens, at most `limit`, behind which the cache has what the next one sees."""
    size = paging.block_size
    found = first_of_run = 0
    for index, block_hash in enumerate(seq.block_hashes(size, limit // size)):
        if not allocator.lookup((block_hash,)):
            if paging.sliding_window is None:
                break
            first_of_run = index + 1
        elif paging.first_needed((index + 1) * size) >= first_of_run:
            found = index + 1
    return found * size
