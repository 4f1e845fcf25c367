"""The blocks of a cache group that forgets: a sliding window, or states of which only the last one is needed.

A request holds the blocks that its next query sees and those that its next step writes. What it leaves behind is freed
but can be found again until it is overwritten, so a prefix is hit wherever the blocks in front of it are still there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvconnector.cache.block_manager import AllocStatus, BlockCopy
from kvconnector.cache.block_manager import Sequence as TokenSequence
from kvconnector.cache.block_manager.allocator import BlockAllocator, CachedContent, Device
from kvconnector.cache.block_manager.block_table import BlockGeometry, BlockTable
from kvconnector.cache.block_manager.prefix_cache import PrefixCachingAllocator
from kvconnector.cache.block_manager.swap import apply_swap, plan_swap
from minillm.cache_groups import LayerGroup, PoolSizes

FILLER = 0
"""Stands in a table for a block in front of those that a request ever held; nothing reads it."""


@dataclass(slots=True, eq=False)
class _Held:
    """One request's blocks: `table` owns those from index `len(gone)` on; `gone` are the ids that were there before.

    Tokens in front of `valid_from` are not in the blocks, although those reach there. `kept` owns a state for a
    consumer.
    """

    table: BlockTable
    gone: list[int]
    valid_from: int = 0
    num_computed: int = 0
    kept: BlockTable | None = None

    @property
    def ids(self) -> list[int]:
        """One id per block of the sequence."""
        return self.gone + self.table.block_ids

    @property
    def tables(self) -> list[BlockTable]:
        """All that owns blocks."""
        return [self.table] if self.kept is None else [self.table, self.kept]


@dataclass(slots=True)
class _Start:
    """What taking a request in means: its first block, those from there on that are cached, how many more it needs."""

    first: int
    cached: list[int] = field(default_factory=list)
    num_fresh: int = 0

    @property
    def num_held(self) -> int:
        """Blocks in all."""
        return len(self.cached) + self.num_fresh


class RecentBlocks:
    """One group's pools. A state is a window of two tokens: the next token needs the block of the one before it, and a
    block whose last token is computed holds the state behind that token for ever.
    """

    def __init__(
        self,
        group: LayerGroup,
        size: PoolSizes,
        *,
        watermark: float,
        prefix_caching: bool,
        step_tokens: int,
    ) -> None:
        kind = PrefixCachingAllocator if prefix_caching else BlockAllocator
        self._device = kind(Device.GPU, size.num_blocks)
        self._host = kind(Device.CPU, size.num_host_blocks)
        self._is_state = group.kind == "state"
        self._window = group.window or 2
        self._geometry = BlockGeometry(group.block_size)
        self._step_tokens = step_tokens
        self._watermark_blocks = int(watermark * size.num_blocks)
        self._held: dict[int, _Held] = {}

    @property
    def num_free(self) -> int:
        """Blocks of the device's pool without an owner."""
        return self._device.num_free_blocks

    @property
    def num_free_host(self) -> int:
        """Blocks of the host's pool without an owner."""
        return self._host.num_free_blocks

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a request of that many tokens can take each of its steps with the pool to itself."""
        most = self._window - 1 + self._step_tokens
        needed = min(self._num_blocks(num_tokens), self._num_blocks(most) + 1)
        # a state that is kept for a consumer
        needed += self._is_state
        return needed + self._watermark_blocks <= self._device.num_total_blocks

    def find_hit(self, tokens: TokenSequence, limit: int) -> int:
        """The most leading tokens, at most `limit`, behind which the request could go on with what is cached."""
        block_size = self._geometry.block_size
        num_blocks = limit // block_size
        found = [
            bool(self._device.lookup((each,)))
            for each in tokens.block_hashes(block_size, num_blocks)
        ]
        for count in range(num_blocks, 0, -1):
            if all(found[self._first_needed(count * block_size) : count]):
                return count * block_size
        return 0

    def can_allocate(self, tokens: TokenSequence, resume_at: int) -> AllocStatus:
        """Whether `allocate` would leave the watermark alone."""
        start = self._plan(tokens, resume_at)
        if start.num_held + self._watermark_blocks > self._device.num_total_blocks:
            return AllocStatus.NEVER
        needed = start.num_fresh + self._device.num_idle(start.cached)
        is_room = self._device.num_free_blocks - needed >= self._watermark_blocks
        return AllocStatus.OK if is_room else AllocStatus.LATER

    def allocate(self, tokens: TokenSequence, resume_at: int) -> int:
        """Give a request the blocks that token `resume_at` needs and the step behind it writes.

        Returns how many of the tokens in front of `resume_at` need not be brought here.
        """
        start = self._plan(tokens, resume_at)
        self._device.require_free(start.num_fresh + self._device.num_idle(start.cached))
        self._device.share(start.cached)
        self._device.count_lookup(self._num_blocks(resume_at) - start.first, len(start.cached))
        block_ids = start.cached + self._device.allocate(start.num_fresh)
        num_found = (start.first + len(start.cached)) * self._geometry.block_size
        held = _Held(self._table(block_ids), [FILLER] * start.first)
        held.num_computed = num_found = num_found if start.cached else 0
        if not (self._is_state or start.cached):
            held.valid_from = max(0, resume_at - self._window + 1)
        self._held[tokens.seq_id] = held
        return num_found

    def forget_old(self, tokens: TokenSequence, num_computed: int) -> None:
        """Give up the blocks that no query behind `num_computed` tokens sees."""
        held = self._held[tokens.seq_id]
        count = self._first_needed(num_computed) - len(held.gone)
        if count > 0:
            old = held.table.block_ids[:count]
            self._device.release(old, held.table.last_access_s)
            held.gone += old
            held.table.block_ids = held.table.block_ids[count:]

    def can_grow(self, tokens: TokenSequence, stop: int, *, keep: bool) -> bool:
        """Whether `grow` has enough free blocks."""
        held = self._held[tokens.seq_id]
        return self._num_new(held, stop) + (keep and self._is_state) <= self._device.num_free_blocks

    def grow(
        self, tokens: TokenSequence, num_computed: int, stop: int, *, keep: bool
    ) -> list[BlockCopy]:
        """Slots for the tokens up to `stop`; with `keep`, the state behind `num_computed` stays as it is.

        Returns what must be copied before the step.
        """
        held = self._held[tokens.seq_id]
        copies: list[BlockCopy] = []
        if keep and self._is_state:
            copies = self._keep(held, num_computed)
        held.table.block_ids += self._device.allocate(self._num_new(held, stop))
        return copies

    def mark_computed(self, tokens: TokenSequence, num_computed: int) -> None:
        """So many leading tokens are computed: the blocks that this completes can be found from now on."""
        held = self._held[tokens.seq_id]
        size = self._geometry.block_size
        full = range(held.num_computed // size, num_computed // size)
        held.num_computed = num_computed
        hashes = tokens.block_hashes(size, full.stop)
        for index in full:
            position = index - len(held.gone)
            if position >= 0 and index * size >= held.valid_from:
                content = CachedContent(hashes[index], index)
                self._device.publish(held.table.block_ids[position], content)

    def touch(self, tokens: TokenSequence, now: float) -> None:
        """The request's blocks are used at `now`."""
        for table in self._held[tokens.seq_id].tables:
            table.last_access_s = now

    def release(self, tokens: TokenSequence) -> None:
        """Give a request's blocks up, wherever they are; nothing if it has none."""
        held = self._held.pop(tokens.seq_id, None)
        for table in held.tables if held is not None else ():
            table.release()

    def can_swap_out(self, tokens: TokenSequence) -> bool:
        """Whether host memory can take the request."""
        plan = plan_swap(self._held[tokens.seq_id].tables, self._device, self._host)
        return plan.num_blocks_needed <= self._host.num_free_blocks

    def swap_out(self, tokens: TokenSequence) -> list[BlockCopy]:
        """Move a request to host memory; returns what to copy."""
        return self._swap(tokens, self._device, self._host)

    def can_swap_in(self, tokens: TokenSequence) -> AllocStatus:
        """Whether a request can return, with a block to grow into."""
        plan = plan_swap(self._held[tokens.seq_id].tables, self._host, self._device)
        # a request that has grown into the watermark would otherwise wait for ever
        headroom = max(0, self._device.num_total_blocks - plan.num_blocks)
        spare = min(1 + self._watermark_blocks, headroom)
        is_room = self._device.num_free_blocks - plan.num_blocks_needed >= spare
        return AllocStatus.OK if is_room else AllocStatus.LATER

    def swap_in(self, tokens: TokenSequence) -> list[BlockCopy]:
        """Move a request back; returns what to copy."""
        return self._swap(tokens, self._host, self._device)

    def block_ids(self, tokens: TokenSequence) -> list[int]:
        """One id per block of the sequence; those in front of `first_block` mean nothing."""
        return self._held[tokens.seq_id].ids

    def first_block(self, tokens: TokenSequence) -> int:
        """Index of the first block that the request still has."""
        return len(self._held[tokens.seq_id].gone)

    def kept_block(self, tokens: TokenSequence) -> int | None:
        """The block of the state that was kept for a consumer."""
        kept = self._held[tokens.seq_id].kept
        return None if kept is None else kept.block_ids[0]

    def _keep(self, held: _Held, num_computed: int) -> list[BlockCopy]:
        """Let somebody else own the state behind `num_computed` tokens; in the middle of a block the request goes on
        with a copy.
        """
        index = (num_computed - 1) // self._geometry.block_size - len(held.gone)
        block_id = held.table.block_ids[index]
        held.kept = self._table([block_id])
        if num_computed % self._geometry.block_size == 0:
            self._device.share([block_id])
            return []
        (copy,) = self._device.allocate(1)
        held.table.block_ids[index] = copy
        return [(block_id, copy)]

    def _plan(self, tokens: TokenSequence, resume_at: int) -> _Start:
        size = self._geometry.block_size
        start = _Start(self._first_needed(resume_at))
        stop = self._num_blocks(min(tokens.num_tokens, resume_at + self._step_tokens))
        hashes = tokens.block_hashes(size, resume_at // size)
        start.cached = self._device.lookup(hashes[start.first :])
        start.num_fresh = stop - start.first - len(start.cached)
        return start

    def _first_needed(self, num_computed: int) -> int:
        """The first block that the token behind `num_computed` tokens sees."""
        return max(0, num_computed - self._window + 1) // self._geometry.block_size

    def _num_blocks(self, num_tokens: int) -> int:
        return self._geometry.num_logical_blocks(num_tokens)

    def _num_new(self, held: _Held, stop: int) -> int:
        return max(0, self._num_blocks(stop) - len(held.gone) - len(held.table.block_ids))

    def _table(self, block_ids: Iterable[int]) -> BlockTable:
        return BlockTable(self._device, self._geometry, list(block_ids), 0, 0)

    def _swap(
        self, tokens: TokenSequence, source: BlockAllocator, destination: BlockAllocator
    ) -> list[BlockCopy]:
        tables = self._held[tokens.seq_id].tables
        return apply_swap(tables, plan_swap(tables, source, destination), source, destination)
