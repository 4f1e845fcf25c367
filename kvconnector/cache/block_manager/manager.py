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
)
from kvconnector.cache.block_manager.sequence import (
    Sequence,
    SequenceError,
    SequenceGroup,
    SequenceStatus,
)
from kvconnector.cache.block_manager.sequence_blocks import NO_BLOCK, SequenceBlocks
from kvconnector.errors import LocalProtocolError


class AllocStatus(Enum):
    """Whether a group may take its blocks."""

    OK = "ok"
    LATER = "later"
    """Not enough blocks are free now."""
    NEVER = "never"
    """Not even an empty device would do."""


def _waiting_seqs(group: SequenceGroup) -> list[Sequence]:
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


class _StartPlan(NamedTuple):
    """What admitting a sequence takes."""

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


class BlockSpaceManager(BlockBooks):
    """Paged KV-cache blocks of a GPU and of a CPU pool; ids count from 0 on each device.

    The caller moves the data: it executes the copies and swaps that calls return in the order of the calls and before
    the next forward pass, because a block freed by one call may be handed out by the next (`split_dependent_copies`
    tells which may run at once).

    With a sliding window a sequence holds the blocks that its next token sees and those that its step writes. The ones
    it leaves behind can be found again until they are overwritten. Not thread safe.

    What fails changes nothing. Every method may raise UnknownRequestError: the sequence, or each unfinished one of the
    group, has no blocks; and LocalProtocolError: its blocks are on the other device.
    """

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of that many tokens can take each of its steps with the GPU to itself."""
        # A recurrent sequence may be forked to keep a state, and its block copied.
        needed = self._paging.max_blocks(num_tokens) + self._paging.is_recurrent
        return needed + self.watermark_blocks <= self._gpu.num_total_blocks

    def can_allocate(
        self, group: SequenceGroup, *, resume_at: int | None = None, num_tokens: int | None = None
    ) -> AllocStatus:
        """Whether the waiting sequences' tokens fit above the watermark. Arguments and SequenceError as for `allocate`.

        Cached blocks that others hold anyway take no space for OK, but do for NEVER.
        """
        start = self._plan_start(_waiting_seqs(group)[0], resume_at, num_tokens)
        if self._gpu.num_total_blocks - start.num_held < self.watermark_blocks:
            return AllocStatus.NEVER
        num_needed = start.num_held - len(start.cached) + self._gpu.num_idle(start.cached)
        if self._gpu.num_free_blocks - num_needed >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def allocate(
        self, group: SequenceGroup, *, resume_at: int | None = None, num_tokens: int | None = None
    ) -> None:
        """Gives the first waiting sequence its blocks and shares them with the other waiting ones.

        With prefix caching, the blocks whose content is cached are shared and count as computed: as many leading tokens
        as there are, or those among the first `resume_at` tokens, where somebody else brings the others. `num_tokens`
        as for `append_slots`. Raises SequenceError: no sequence waits, or their prompts differ; DoubleAllocationError:
        one has blocks already; OutOfBlocksError: too few are free, watermark aside.
        """
        waiting = _waiting_seqs(group)
        prompt = waiting[0]
        for seq in waiting:
            self._tables.require_absent(seq)
        start = self._plan_start(prompt, resume_at, num_tokens)
        num_fresh = start.num_held - len(start.cached)
        self._gpu.require_free(num_fresh + self._gpu.num_idle(start.cached))

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
        self._tables[prompt.seq_id] = table
        for sibling in waiting[1:]:
            self._tables[sibling.seq_id] = table.fork()

    def can_append_slots(
        self,
        group: SequenceGroup,
        num_lookahead_slots: int = 0,
        *,
        num_tokens: int | None = None,
    ) -> bool:
        """Whether `append_slots` will succeed for all unfinished sequences of the group. BlockIdError as there."""
        num_needed = self._num_append_blocks(group, Device.GPU, num_lookahead_slots, num_tokens)
        return num_needed <= self._gpu.num_free_blocks

    def append_slots(
        self, seq: Sequence, num_lookahead_slots: int = 0, *, num_tokens: int | None = None
    ) -> list[BlockCopy]:
        """Gives slots to the tokens of `seq` that have none, and `num_lookahead_slots` more.

        Up to `num_tokens` tokens, or all; with a window, those of the next step. Returns the shared blocks that must
        be copied before the new slots are written. Raises SequenceError: the sequence has fewer tokens than it had;
        OutOfBlocksError: too few blocks are free; BlockIdError: the lookahead is negative.
        """
        table = self._tables.of(seq)
        plan = self._plan_append(seq, table, Device.GPU, num_lookahead_slots, num_tokens)
        return apply_append(table, plan)

    def drop_left_behind(self, seq: Sequence) -> None:
        """Gives up the blocks that the sliding window has left: no token not yet computed sees them."""
        self._tables.of(seq).drop_left_behind()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` share all blocks of `parent`; whoever writes a shared block first copies it. Raises
        DoubleAllocationError: the child has blocks already; SequenceError: its tokens are not those in the blocks.
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
        """Gives up the sequence's blocks, on whichever device; nothing if it has none."""
        if seq.seq_id in self._tables:
            self._tables.pop(seq.seq_id).release()

    def can_swap_in(self, group: SequenceGroup) -> AllocStatus:
        """Whether the group can return to the GPU and then append its new slots."""
        plan = plan_swap(self._tables.on_device(group, Device.CPU), self._cpu, self._gpu)
        num_append_blocks = self._num_append_blocks(group, Device.CPU, 0, None)
        headroom = self._gpu.num_total_blocks - plan.num_blocks - num_append_blocks
        if headroom < 0:
            return AllocStatus.NEVER
        # A group that has grown into the watermark would otherwise wait for ever.
        watermark_blocks = min(self.watermark_blocks, headroom)
        num_needed = plan.num_blocks_needed + num_append_blocks
        if self._gpu.num_free_blocks - num_needed >= watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def swap_in(self, group: SequenceGroup) -> list[BlockCopy]:
        """Moves the group's tables to the GPU. Returns (CPU id, GPU id) of every block to copy, each once however many
        sequences share it; a block that the GPU still caches needs no copy. Raises OutOfBlocksError.
        """
        return self._swap(group, self._cpu, self._gpu)

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether the CPU pool can take the group now."""
        plan = plan_swap(self._tables.on_device(group, Device.GPU), self._gpu, self._cpu)
        return plan.num_blocks_needed <= self._cpu.num_free_blocks

    def swap_out(self, group: SequenceGroup) -> list[BlockCopy]:
        """Moves the group's tables to the CPU, as `swap_in` does to the GPU; others keep the blocks that they share."""
        return self._swap(group, self._gpu, self._cpu)

    def _plan_start(
        self, prompt: Sequence, resume_at: int | None, num_tokens: int | None
    ) -> _StartPlan:
        paging, size = self._paging, self.block_size
        if resume_at is None:
            resume_at = self.find_cached_tokens(prompt)
        end = paging.step_end(prompt.num_tokens, resume_at)
        if num_tokens is not None and not paging.keeps_all:
            end = min(end, num_tokens)
        first = paging.first_needed(resume_at)
        # Never the block of the last token: the engine computes that token and writes its slot.
        num_full = (prompt.num_tokens - 1) // size
        hashes = prompt.block_hashes(size, min(num_full, resume_at // size))[first:]
        return _StartPlan(
            resume_at=resume_at,
            first=first,
            cached=self._gpu.lookup(hashes),
            num_queried=max(0, num_full - first),
            num_tokens=end,
            num_held=paging.num_blocks(end) - first,
        )

    def _plan_append(
        self,
        seq: Sequence,
        table: SequenceBlocks,
        device: Device,
        num_lookahead_slots: int,
        num_tokens: int | None,
    ) -> AppendPlan:
        if table.device is not device:
            raise LocalProtocolError(
                "the sequence's blocks are on the other device",
                seq_id=seq.seq_id,
                device=table.device.value,
                expected=device.value,
            )
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
            self._plan_append(seq, table, device, num_lookahead_slots, num_tokens).num_blocks_needed
            for seq, table in self._tables.unfinished(group)
        )

    def _swap(
        self, group: SequenceGroup, source: BlockAllocator, destination: BlockAllocator
    ) -> list[BlockCopy]:
        tables = self._tables.on_device(group, source.device)
        return apply_swap(tables, plan_swap(tables, source, destination), source, destination)
