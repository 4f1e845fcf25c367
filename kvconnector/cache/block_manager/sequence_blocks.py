"""Which blocks hold which tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd

from kvconnector.cache.block_manager.allocator import (
    NEVER_ACCESSED_S,
    BlockAllocator,
    CachedContent,
    Device,
)

NO_BLOCK = 0
"""Stands in a table for a block that the sequence never held; nothing reads it."""


@dataclass(frozen=True, slots=True)
class Paging:
    """How tokens map to blocks, and which of them a sequence needs.

    A recurrent layer's block holds one state: that after its last token, or after the last one computed if that is
    inside it. It is needed as a window of two tokens is: the next token needs the block of the one before it.
    """

    block_size: int
    """Tokens per block."""
    sliding_window: int | None = None
    """Tokens that one query sees, itself included; None for all."""
    is_recurrent: bool = False
    max_step_tokens: int | None = None
    """Most tokens that one step computes; None for no limit. With a window or chunks, slots are taken step by step."""
    attention_chunk_size: int | None = None
    """Tokens of the chunks that queries stay inside of; None for no chunks."""

    @property
    def keeps_all(self) -> bool:
        """True if every block stays needed."""
        return self.sliding_window is None and self.attention_chunk_size is None

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens span."""
        return -(-num_tokens // self.block_size)

    def oldest_needed(self, num_computed: int) -> int:
        """The first token that the one after `num_computed` tokens sees."""
        if self.attention_chunk_size is not None:
            return num_computed // self.attention_chunk_size * self.attention_chunk_size
        if self.sliding_window is not None:
            return max(0, num_computed - self.sliding_window + 1)
        return 0

    def first_needed(self, num_computed: int) -> int:
        """The block of that token."""
        return self.oldest_needed(num_computed) // self.block_size

    def step_end(self, num_tokens: int, num_computed: int) -> int:
        """Tokens that have slots for the step after `num_computed`, out of `num_tokens` known ones."""
        if self.keeps_all or self.max_step_tokens is None:
            return num_tokens
        return min(num_tokens, num_computed + self.max_step_tokens)

    def max_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens holds at a time.

        With a window or chunks, those of what the step's first token sees and of the step's tokens. A window may start
        anywhere inside a block, which takes one more; a chunk only at multiples of its size.
        """
        num_blocks, step = self.num_blocks(num_tokens), self.max_step_tokens
        chunk, window = self.attention_chunk_size, self.sliding_window
        if step is not None and chunk is not None:
            inside = self.block_size - gcd(self.block_size, chunk)
            return min(num_blocks, self.num_blocks(inside + chunk - 1 + step))
        if step is not None and window is not None:
            return min(num_blocks, self.num_blocks(window - 1 + step) + 1)
        return num_blocks


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The blocks of one sequence, all on one device.

    It owns one share of each of `block_ids`, which follow `dropped`: blocks that its window has left. `num_tokens`
    tokens have slots. Tokens before `valid_from` are not in the blocks, although those may reach there.
    """

    allocator: BlockAllocator
    paging: Paging
    block_ids: list[int]
    num_tokens: int
    dropped: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    valid_from: int = 0
    last_access_s: float = NEVER_ACCESSED_S

    @property
    def device(self) -> Device:
        return self.allocator.device

    @property
    def num_blocks(self) -> int:
        """Blocks from the first token on, dropped ones included."""
        return len(self.dropped) + len(self.block_ids)

    def mark_computed(self, num_tokens: int) -> range:
        """Count `num_tokens` more as computed; return the indices of the blocks that this completed."""
        first_block = self.num_computed_tokens // self.paging.block_size
        self.num_computed_tokens += num_tokens
        return range(first_block, self.num_computed_tokens // self.paging.block_size)

    def publish(self, full_blocks: range, block_hashes: list[bytes]) -> None:
        """Offer computed blocks to others; `block_hashes` are those of all blocks from the first."""
        for depth in full_blocks:
            if depth >= len(self.dropped) and depth * self.paging.block_size >= self.valid_from:
                content = CachedContent(block_hashes[depth], depth)
                self.allocator.publish(self.block_ids[depth - len(self.dropped)], content)

    def drop_left_behind(self) -> None:
        """Give up the blocks that no token after the computed ones sees."""
        count = self.paging.first_needed(self.num_computed_tokens) - len(self.dropped)
        if count > 0:
            old, self.block_ids = self.block_ids[:count], self.block_ids[count:]
            self.allocator.release(old, self.last_access_s)
            self.dropped += old

    def fork(self) -> SequenceBlocks:
        """Return a second table that shares every block."""
        self.allocator.share(self.block_ids)
        return replace(self, block_ids=self.block_ids.copy(), dropped=self.dropped.copy())

    def release(self) -> None:
        """Give up every block; the table must not be used afterwards."""
        self.allocator.release(self.block_ids, self.last_access_s)
        self.block_ids = []
