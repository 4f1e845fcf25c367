"""The block manager: admits, grows, forks, swaps and frees the blocks of requests."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvconnector.cache.block_manager.allocator import BlockAllocator, Device
from kvconnector.cache.block_manager.books import BlockBooks
from kvconnector.cache.block_manager.copy_on_write import (
    AppendPlan,
    BlockCopy,
    apply_append,
    apply_swap,
    plan_append,
    plan_swap,
    require_lookahead,
)
from kvconnector.cache.block_manager.sequence import (
    Sequence,
    SequenceError,
    SequenceGroup,
    SequenceStatus,
)
from kvconnector.cache.block_manager.sequence_blocks import NO_BLOCK, SequenceBlocks
from kvconnector.errors import ConfigError


class AllocStatus(Enum):
    """The answers of `can_allocate` and `can_swap_in`."""

    OK = "ok"
    LATER = "later"
    """Not enough blocks are free now."""
    NEVER = "never"
    """Not even an empty device has enough blocks."""


def _waiting_seqs(group: SequenceGroup) -> list[Sequence]:
    waiting = group.seqs(SequenceStatus.WAITING)
    if not waiting:
        raise SequenceError("no sequence of the group is waiting", request_id=group.request_id)
    for seq in waiting[1:]:
        num_tokens = max(seq.num_tokens, waiting[0].num_tokens)
        if not seq.shares_prefix(waiting[0], num_tokens):
            raise SequenceError(
                "waiting sequences of one group must have the same tokens and extra keys",
                request_id=group.request_id,
                seq_ids=(waiting[0].seq_id, seq.seq_id),
            )
    return waiting


class _StartPlan(NamedTuple):
    """The changes that admit a sequence."""

    resume_at: int
    """Number of leading tokens that need not be computed: they are cached here, or the caller provides them."""
    first: int
    """Index of the first block that the first step needs."""
    cached: list[int]
    """Ids of the cached blocks from `first` on."""
    num_queried: int
    """Number of blocks that were looked up."""
    num_tokens: int
    """Number of tokens that get slots."""
    num_held: int
    """Number of blocks from `first` on that these tokens and the lookahead need."""
    num_cross: int
    """Number of blocks that the encoder's output needs."""


class BlockSpaceManager(BlockBooks):
    """Paged KV cache blocks of a GPU pool and a CPU pool; ids count from 0 in each.

    The caller moves the data: it executes the copies and swaps that calls return, in the order of the calls and before
    the next forward pass, because the next call may hand out a block that this one has freed. `split_dependent_copies`
    finds those that may run at the same time.

    With a sliding window a sequence holds the blocks that its next token sees and those that its step writes. Blocks
    that the window has left can be found again until they are overwritten. Not thread safe.

    A call that raises has changed nothing. Every method may raise UnknownRequestError: the sequence, or each unfinished
    one of the group, has no blocks; and LocalProtocolError: its blocks are on the other device.
    """

    def fits_alone(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """Return True if the GPU, with no other sequence, has enough blocks for each step of one with these tokens."""
        # a recurrent sequence may be forked to keep a state, which copies its block
        needed = self._paging.max_blocks(num_tokens) + self._paging.is_recurrent
        needed += self._paging.num_blocks(num_encoder_tokens)
        return needed + self.watermark_blocks <= self._gpu.num_total_blocks

    def can_allocate(
        self,
        group: SequenceGroup,
        num_lookahead_slots: int = 0,
        *,
        resume_at: int | None = None,
        num_tokens: int | None = None,
    ) -> AllocStatus:
        """Return OK if `allocate` will succeed with the same arguments and leave the watermark's blocks free.

        For OK, cached blocks that others hold anyway need no space; for NEVER, they do.

        Raises:
            ConfigError: as `allocate`.
            SequenceError: as `allocate`.
            BlockIdError: as `allocate`.
        """
        start = self._plan_start(group, num_lookahead_slots, resume_at, num_tokens)
        num_held = start.num_held + start.num_cross
        if self._gpu.num_total_blocks - num_held < self.watermark_blocks:
            return AllocStatus.NEVER
        num_needed = num_held - len(start.cached) + self._gpu.num_idle(start.cached)
        if self._gpu.num_free_blocks - num_needed >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def allocate(
        self,
        group: SequenceGroup,
        num_lookahead_slots: int = 0,
        *,
        resume_at: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Give the first waiting sequence its blocks and share them with the other waiting ones.

        A group with an encoder also gets blocks for cross-attention. With prefix caching, blocks whose content is
        cached are shared and count as computed.

        Args:
            group: A request with at least one waiting sequence.
            num_lookahead_slots: Slots after the tokens.
            resume_at: Leading tokens that need not be computed: the cached ones are shared, the caller provides the
                others. None for as many as are cached.
            num_tokens: As in `append_slots`.

        Raises:
            ConfigError: the group has an encoder, and the manager has prefix caching, a sliding window, a ring or rows
                of several tokens.
            SequenceError: no sequence is waiting, or the waiting ones have different prompts.
            DoubleAllocationError: a sequence, or the encoder, has blocks already.
            OutOfBlocksError: too few blocks are free, even with the watermark's.
            BlockIdError: the lookahead is negative.
        """
        start = self._plan_start(group, num_lookahead_slots, resume_at, num_tokens)
        waiting = group.seqs(SequenceStatus.WAITING)
        for seq in waiting:
            self._tables.require_absent(seq)
        self._tables.require_cross_absent(group)
        num_fresh = start.num_held - len(start.cached)
        num_idle = self._gpu.num_idle(start.cached)
        self._gpu.require_free(num_fresh + num_idle + start.num_cross)

        # Cached blocks first: allocating the rest could evict them.
        self._gpu.share(start.cached)
        self._gpu.count_lookup(start.num_queried, len(start.cached))
        block_ids = start.cached + self._gpu.allocate(num_fresh)
        table = SequenceBlocks(self._gpu, self._paging, block_ids, start.num_tokens)
        table.dropped = [NO_BLOCK] * start.first
        oldest = self._paging.oldest_needed(start.resume_at)
        # a window of one token, or the first token of a chunk, needs nothing before it
        if start.cached or (oldest == start.resume_at and not self._paging.keeps_all):
            num_cached = (start.first + len(start.cached)) * self.block_size
            table.num_cached_tokens = table.num_computed_tokens = num_cached
        if not (start.cached or self._paging.is_recurrent):
            table.valid_from = oldest
        self._tables[waiting[0].seq_id] = table
        for sibling in waiting[1:]:
            self._tables[sibling.seq_id] = table.fork()
        if group.encoder_seq is not None:
            cross_ids = self._gpu.allocate(start.num_cross)
            num_tokens = group.encoder_seq.num_tokens
            cross = SequenceBlocks(self._gpu, self._paging, cross_ids, num_tokens)
            self._tables[group.request_id] = cross

    def can_append_slots(
        self,
        group: SequenceGroup,
        num_lookahead_slots: int = 0,
        *,
        num_tokens: int | None = None,
    ) -> bool:
        """Return True if `append_slots` will succeed for all unfinished sequences of the group.

        A shared block that all owners write counts as copied by each of them.

        Raises:
            SequenceError: as `append_slots`.
            BlockIdError: as `append_slots`.
        """
        num_needed = self._num_append_blocks(group, Device.GPU, num_lookahead_slots, num_tokens)
        return num_needed <= self._gpu.num_free_blocks

    def append_slots(
        self, seq: Sequence, num_lookahead_slots: int = 0, *, num_tokens: int | None = None
    ) -> list[BlockCopy]:
        """Give slots to the tokens of `seq` that have none.

        Args:
            seq: A sequence with blocks on the GPU.
            num_lookahead_slots: Slots after the tokens.
            num_tokens: How many leading tokens need slots. None for all, or with a window for those of the next step.

        Returns:
            The shared blocks to copy before the new slots are written.

        Raises:
            SequenceError: the sequence has fewer tokens than before.
            OutOfBlocksError: too few blocks are free.
            BlockIdError: the lookahead is negative.
        """
        plan = self._plan_append(seq, Device.GPU, num_lookahead_slots, num_tokens)
        return apply_append(self._tables.of(seq), plan)

    def drop_left_behind(self, seq: Sequence) -> None:
        """Free the blocks that the sliding window has left: no token that is yet to be computed sees them."""
        self._tables.of(seq).drop_left_behind()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`. The one that first writes a shared block gets a copy.

        Raises:
            DoubleAllocationError: the child has blocks already.
            SequenceError: the child's tokens are not those in the blocks.
        """
        table = self._tables.of(parent)
        self._tables.require_absent(child)
        if not child.shares_prefix(parent, table.num_tokens):
            raise SequenceError(
                "a fork must start with the tokens and extra keys that the parent's blocks hold",
                parent_seq_id=parent.seq_id,
                child_seq_id=child.seq_id,
                num_tokens=table.num_tokens,
            )
        self._tables[child.seq_id] = table.fork()

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks, if it has any, on either device."""
        if seq.seq_id in self._tables:
            self._tables.pop(seq.seq_id).release()

    def free_cross(self, group: SequenceGroup) -> None:
        """Free the request's cross-attention blocks, if it has any, on either device."""
        if group.request_id in self._tables:
            self._tables.pop(group.request_id).release()

    def can_swap_in(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Return OK if the group fits into the GPU's free blocks together with its new slots and the lookahead.

        Raises:
            BlockIdError: the lookahead is negative.
        """
        plan = plan_swap(self._tables.on_device(group, Device.CPU), self._cpu, self._gpu)
        num_append_blocks = self._num_append_blocks(group, Device.CPU, num_lookahead_slots, None)
        headroom = self._gpu.num_total_blocks - plan.num_blocks - num_append_blocks
        if headroom < 0:
            return AllocStatus.NEVER
        # without this a group that has grown into the watermark would wait forever
        watermark_blocks = min(self.watermark_blocks, headroom)
        num_needed = plan.num_blocks_needed + num_append_blocks
        if self._gpu.num_free_blocks - num_needed >= watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def swap_in(self, group: SequenceGroup) -> list[BlockCopy]:
        """Move the group's tables to the GPU, that of cross-attention included.

        Returns:
            (CPU id, GPU id) of every block to copy, once for each block, shared or not. A block that the GPU still
            caches needs no copy.

        Raises:
            OutOfBlocksError: too few GPU blocks are free.
        """
        return self._swap(group, self._cpu, self._gpu)

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Return True if the CPU pool can take the group now."""
        plan = plan_swap(self._tables.on_device(group, Device.GPU), self._gpu, self._cpu)
        return plan.num_blocks_needed <= self._cpu.num_free_blocks

    def swap_out(self, group: SequenceGroup) -> list[BlockCopy]:
        """Move the group's tables to the CPU, as `swap_in` does to the GPU. Other groups keep shared blocks there."""
        return self._swap(group, self._gpu, self._cpu)

    def _plan_start(
        self,
        group: SequenceGroup,
        num_lookahead_slots: int,
        resume_at: int | None,
        num_tokens: int | None,
    ) -> _StartPlan:
        self._refuse_encoder(group)
        require_lookahead(num_lookahead_slots)
        prompt = _waiting_seqs(group)[0]
        paging, size = self._paging, self.block_size
        if resume_at is None:
            resume_at = self.find_cached_tokens(prompt)
        end = paging.step_end(prompt.num_tokens, resume_at)
        if num_tokens is not None and not paging.keeps_all:
            end = min(end, num_tokens)
        first = paging.first_needed(resume_at)
        # never the block of the last token, which the engine computes and writes to its slot
        num_full = (prompt.num_tokens - 1) // size
        hashes = prompt.block_hashes(size, min(num_full, resume_at // size))[first:]
        return _StartPlan(
            resume_at=resume_at,
            first=first,
            cached=self._gpu.lookup(hashes),
            num_queried=max(0, num_full - first),
            num_tokens=end,
            num_held=paging.num_blocks(end + num_lookahead_slots) - first,
            num_cross=paging.num_blocks(group.encoder_seq.num_tokens) if group.encoder_seq else 0,
        )

    def _refuse_encoder(self, group: SequenceGroup) -> None:
        """Raise ConfigError if the group has an encoder and this manager has a feature that does not allow one."""
        refused = {
            # the decoder's cache depends on the encoder's input too, not on the decoder's tokens alone
            "prefix caching": self.enable_caching,
            # the window is the decoder's alone: cross-attention sees the encoder's whole output
            "a sliding window": self._paging.sliding_window is not None,
            # the encoder's output has a row for each token, and all of them
            "a ring": self._paging.is_ring,
            "rows of several tokens": self._paging.row_tokens > 1,
        }
        for feature, is_enabled in refused.items():
            if group.encoder_seq is not None and is_enabled:
                raise ConfigError(
                    f"encoder-decoder requests are not supported with {feature}",
                    request_id=group.request_id,
                )

    def _plan_append(
        self,
        seq: Sequence,
        device: Device,
        num_lookahead_slots: int,
        num_tokens: int | None,
    ) -> AppendPlan:
        table = self._tables.on(device, seq)
        if seq.num_tokens < table.num_tokens:
            raise SequenceError(
                "a sequence cannot shrink",
                num_tokens=seq.num_tokens,
                num_tokens_with_slots=table.num_tokens,
            )
        if num_tokens is None:
            num_tokens = self._paging.step_end(seq.num_tokens, table.num_computed_tokens)
        return plan_append(table, min(num_tokens, seq.num_tokens), num_lookahead_slots)

    def _num_append_blocks(
        self,
        group: SequenceGroup,
        device: Device,
        num_lookahead_slots: int,
        num_tokens: int | None,
    ) -> int:
        return sum(
            self._plan_append(seq, device, num_lookahead_slots, num_tokens).num_blocks_needed
            for seq, _ in self._tables.unfinished(group)
        )

    def _swap(
        self, group: SequenceGroup, source: BlockAllocator, destination: BlockAllocator
    ) -> list[BlockCopy]:
        tables = self._tables.on_device(group, source.device)
        return apply_swap(tables, plan_swap(tables, source, destination), source, destination)
