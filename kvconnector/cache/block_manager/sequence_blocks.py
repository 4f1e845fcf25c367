"""The blocks of one sequence, and the tokens that they hold."""

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
"""A placeholder in a table for a block that the sequence never held. Nothing reads it."""


@dataclass(frozen=True, slots=True)
class Paging:
    """How tokens map to blocks, and which blocks a sequence needs.

    A block of a recurrent layer holds one state, the one after its last token, or after the last computed token if the
    block is not full. The next token needs only the block of the token before it, as with a window of two tokens.
    """

    block_size: int
    """Tokens per block."""
    sliding_window: int | None = None
    """Number of tokens that a query sees, its own included; None for all."""
    is_recurrent: bool = False
    """True if a block holds a state. `sliding_window` is 2 then."""
    max_step_tokens: int | None = None
    """The most tokens that a step computes; None for no limit. With a window or chunks each step takes its slots."""
    attention_chunk_size: int | None = None
    """The length in tokens of the chunks to which attention is limited; None for no chunks."""
    row_tokens: int = 1
    """Number of tokens that share a row, which needs room once it has the last of them."""
    is_ring: bool = False
    """True if a sequence has one block, whose slots its tokens take in turns."""

    @property
    def keeps_all(self) -> bool:
        """True if a sequence needs all of its blocks until it ends."""
        return self.sliding_window is None and self.attention_chunk_size is None

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens span, without those after the last whole row."""
        if self.is_ring:
            return min(1, num_tokens)
        return -(-(num_tokens // self.row_tokens * self.row_tokens) // self.block_size)

    def block_of(self, token: int) -> int:
        """Return the index of the block that a token is in."""
        return 0 if self.is_ring else token // self.block_size

    def oldest_needed(self, num_computed: int) -> int:
        """Return the first token that the token after `num_computed` tokens sees."""
        if self.attention_chunk_size is not None:
            return num_computed // self.attention_chunk_size * self.attention_chunk_size
        if self.sliding_window is not None:
            return max(0, num_computed - self.sliding_window + 1)
        return 0

    def first_needed(self, num_computed: int) -> int:
        """Return the index of the block of that token."""
        return self.oldest_needed(num_computed) // self.block_size

    def step_end(self, num_tokens: int, num_computed: int) -> int:
        """Return how many of `num_tokens` known tokens need slots for the step after `num_computed` tokens."""
        if self.keeps_all or self.max_step_tokens is None:
            return num_tokens
        return min(num_tokens, num_computed + self.max_step_tokens)

    def max_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at a time.

        With a window or chunks these are the blocks of the step's tokens, and of the tokens that its first one sees. A
        window may start anywhere inside a block, which takes one block more; a chunk only at multiples of its size.
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

    The sequence has a share of each of `block_ids`, and none of the `dropped` ones before them, which its window left.
    `num_tokens` tokens have slots. Slots of tokens before `valid_from` hold no data. If it `is_outdated`, the cache was
    reset after some of them were computed, so no block that depends on these is ever published.
    """

    allocator: BlockAllocator
    paging: Paging
    block_ids: list[int]
    num_tokens: int
    dropped: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    valid_from: int = 0
    is_outdated: bool = False
    last_access_s: float = NEVER_ACCESSED_S

    @property
    def device(self) -> Device:
        return self.allocator.device

    @property
    def num_blocks(self) -> int:
        """Number of blocks from the first token on, dropped ones included."""
        return len(self.dropped) + len(self.block_ids)

    def mark_computed(self, num_tokens: int) -> range:
        """Count `num_tokens` more tokens as computed, and return the indices of the blocks that this completes."""
        first_block = self.num_computed_tokens // self.paging.block_size
        self.num_computed_tokens += num_tokens
        return range(first_block, self.num_computed_tokens // self.paging.block_size)

    def publish(self, full_blocks: range, block_hashes: list[bytes]) -> None:
        """Publish computed blocks, by their indices. `block_hashes` are those of all blocks from the first one on."""
        if self.is_outdated:
            return
        for depth in full_blocks:
            if depth >= len(self.dropped) and depth * self.paging.block_size >= self.valid_from:
                content = CachedContent(block_hashes[depth], depth)
                self.allocator.publish(self.block_ids[depth - len(self.dropped)], content)

    def drop_left_behind(self) -> None:
        """Free the blocks that no token after the computed ones sees."""
        count = self.paging.first_needed(self.num_computed_tokens) - len(self.dropped)
        if count > 0:
            old, self.block_ids = self.block_ids[:count], self.block_ids[count:]
            self.allocator.release(old, self.last_access_s)
            self.dropped += old

    def fork(self) -> SequenceBlocks:
        """Return a copy that shares every block."""
        self.allocator.share(self.block_ids)
        return replace(self, block_ids=self.block_ids.copy(), dropped=self.dropped.copy())

    def release(self) -> None:
        """Free every block. The table must not be used after this."""
        self.allocator.release(self.block_ids, self.last_access_s)
        self.block_ids = []
