"""The blocks of a cache group that keeps every token: a `BlockSpaceManager`, asked about token sequences."""

from __future__ import annotations

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockCopy,
    BlockSpaceManager,
    Device,
    SequenceGroup,
)
from kvconnector.cache.block_manager import Sequence as TokenSequence
from minillm.cache_groups import LayerGroup, PoolSizes


class FullBlocks:
    """One group's pools; its methods mean what those of `RecentBlocks` do."""

    def __init__(
        self, group: LayerGroup, size: PoolSizes, *, watermark: float, prefix_caching: bool
    ) -> None:
        self._size = size
        self._manager = BlockSpaceManager(
            group.block_size,
            size.num_blocks,
            size.num_host_blocks,
            watermark,
            enable_caching=prefix_caching,
        )

    @property
    def num_free(self) -> int:
        """Blocks of the device's pool without an owner."""
        return self._manager.get_num_free_gpu_blocks()

    @property
    def num_free_host(self) -> int:
        """Blocks of the host's pool without an owner."""
        return self._manager.get_num_free_cpu_blocks()

    @property
    def hit_rate(self) -> float:
        """Share of full prompt blocks that were found, 0.0 to 1.0."""
        return self._manager.get_prefix_cache_hit_rate(Device.GPU)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a request of that many tokens fits into an empty pool."""
        needed = -(-num_tokens // self._manager.block_size)
        return needed + self._manager.watermark_blocks <= self._size.num_blocks

    def find_hit(self, tokens: TokenSequence, limit: int) -> int:
        """The most leading tokens in whole blocks, at most `limit`, that are cached."""
        found = min(self._manager.find_cached_tokens(tokens), limit)
        return found // self._manager.block_size * self._manager.block_size

    def can_allocate(self, tokens: TokenSequence, resume_at: int) -> AllocStatus:
        """Whether the request's known tokens fit above the watermark."""
        return self._manager.can_allocate(_alone(tokens), max_cached_tokens=resume_at)

    def allocate(self, tokens: TokenSequence, resume_at: int) -> int:
        """Give a request blocks for its known tokens. Returns how many of those in front of `resume_at` are cached."""
        self._manager.allocate(_alone(tokens), max_cached_tokens=resume_at)
        return self._manager.get_num_cached_tokens(tokens)

    def forget_old(self, tokens: TokenSequence, num_computed: int) -> None:
        """Every query sees everything."""

    def can_grow(self, tokens: TokenSequence, stop: int, *, keep: bool) -> bool:
        """Whether there are slots for all known tokens."""
        return self._manager.can_append_slots(_alone(tokens))

    def grow(
        self, tokens: TokenSequence, num_computed: int, stop: int, *, keep: bool
    ) -> list[BlockCopy]:
        """Slots for all known tokens. Nothing is shared that is written, so nothing is copied."""
        return self._manager.append_slots(tokens)

    def mark_computed(self, tokens: TokenSequence, num_computed: int) -> None:
        """So many leading tokens are computed."""
        news = num_computed - self._manager.get_num_computed_tokens(tokens)
        self._manager.mark_blocks_as_computed(_alone(tokens), news)

    def touch(self, tokens: TokenSequence, now: float) -> None:
        """The request's blocks are used at `now`."""
        self._manager.access_all_blocks_in_seq(tokens, now)

    def release(self, tokens: TokenSequence) -> None:
        """Give a request's blocks up, wherever they are; nothing if it has none."""
        self._manager.free(tokens)

    def can_swap_out(self, tokens: TokenSequence) -> bool:
        """Whether host memory can take the request."""
        return self._manager.can_swap_out(_alone(tokens))

    def swap_out(self, tokens: TokenSequence) -> list[BlockCopy]:
        """Move a request to host memory; returns what to copy."""
        return self._manager.swap_out(_alone(tokens))

    def can_swap_in(self, tokens: TokenSequence) -> AllocStatus:
        """Whether a request can return, with slots for its known tokens."""
        return self._manager.can_swap_in(_alone(tokens))

    def swap_in(self, tokens: TokenSequence) -> list[BlockCopy]:
        """Move a request back; returns what to copy."""
        return self._manager.swap_in(_alone(tokens))

    def block_ids(self, tokens: TokenSequence) -> list[int]:
        """One id per block of the sequence."""
        return self._manager.get_block_table(tokens)

    def first_block(self, tokens: TokenSequence) -> int:
        """All blocks are there."""
        return 0

    def kept_block(self, tokens: TokenSequence) -> int | None:
        """No state is kept apart."""
        return None


def _alone(tokens: TokenSequence) -> SequenceGroup:
    """A request with one candidate answer."""
    return SequenceGroup(f"sequence {tokens.seq_id}", [tokens])
