"""The block manager: admits, grows, forks, swaps and frees the blocks of requests."""

from __future__ import annotations

from collections.abc import Iterable

from kvconnector.cache.block_manager.admission import (
    AllocStatus,
    check_encoder_decoder,
    check_settings,
    waiting_seqs,
)
from kvconnector.cache.block_manager.allocator import BlockAllocator, Device
from kvconnector.cache.block_manager.block_table import (
    BlockGeometry,
    BlockTable,
    common_computed_blocks,
)
from kvconnector.cache.block_manager.copy_on_write import (
    AppendPlan,
    BlockCopy,
    apply_append,
    plan_append,
)
from kvconnector.cache.block_manager.directory import TableDirectory
from kvconnector.cache.block_manager.errors import SequenceError
from kvconnector.cache.block_manager.prefix_cache import PrefixCachingAllocator
from kvconnector.cache.block_manager.sequence import Sequence, SequenceGroup
from kvconnector.cache.block_manager.swap import apply_swap, plan_swap
from kvconnector.errors import LocalProtocolError


class BlockSpaceManager:
    """Paged KV-cache blocks of a GPU and of a CPU pool; ids count from 0 on each device.

    It only keeps the books: the caller moves the data. Copies and swaps that calls return must be
    executed in the order of the calls and before the next forward pass, because a block freed by
    one call may be handed out by the next (`split_dependent_copies` tells which may run at once).

    A `Sequence` is known by its `seq_id`, a `SequenceGroup` by its `request_id`. Not thread safe.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        *,
        sliding_window: int | None = None,
        enable_caching: bool = False,
    ) -> None:
        """Lays out two empty pools.

        Args:
            block_size: tokens per block.
            num_gpu_blocks: blocks that sequences can run in.
            num_cpu_blocks: blocks that sequences can be swapped out to.
            watermark: share of the GPU blocks that admission leaves free, so that running
                sequences can grow without a swap at once.
            sliding_window: tokens that one query sees, itself included; None for all.
            enable_caching: find blocks again by their content.

        Raises:
            ConfigError: a value is out of range, or caching is combined with a sliding window.
        """
        check_settings(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            watermark=watermark,
            sliding_window=sliding_window,
            enable_caching=enable_caching,
        )
        self.block_size = block_size
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.enable_caching = enable_caching
        allocator_type = PrefixCachingAllocator if enable_caching else BlockAllocator
        self._geometry = BlockGeometry(block_size, sliding_window)
        self._gpu = allocator_type(Device.GPU, num_gpu_blocks)
        self._cpu = allocator_type(Device.CPU, num_cpu_blocks)
        self._tables = TableDirectory()

    def can_allocate(
        self,
        group: SequenceGroup,
        num_lookahead_slots: int = 0,
        *,
        max_cached_tokens: int | None = None,
    ) -> AllocStatus:
        """Whether the waiting sequences' prompt and the encoder's input fit above the watermark.

        Cached blocks that others hold anyway count as free of charge for OK, not for NEVER.
        `max_cached_tokens` as for `allocate`.

        Raises:
            ConfigError: encoder-decoder together with prefix caching or a sliding window.
            SequenceError: no sequence waits.
            BlockIdError: a sliding window cannot take that many lookahead slots.
        """
        prompt = self._waiting(group)[0]
        _, num_held = self._geometry.prompt_blocks(prompt.num_tokens, num_lookahead_slots)
        num_blocks = num_held + self._num_cross_blocks(group)
        if self._gpu.num_total_blocks - num_blocks < self.watermark_blocks:
            return AllocStatus.NEVER
        cached = self._gpu.find_prefix(prompt, self.block_size, max_cached_tokens).block_ids
        num_needed = num_blocks - len(cached) + self._gpu.num_idle(cached)
        if self._gpu.num_free_blocks - num_needed >= self.watermark_blocks:
            return AllocStatus.OK
        return AllocStatus.LATER

    def allocate(
        self,
        group: SequenceGroup,
        num_lookahead_slots: int = 0,
        *,
        max_cached_tokens: int | None = None,
    ) -> None:
        """Gives the first waiting sequence its blocks and shares them with the other waiting ones.

        An encoder-decoder request also gets its cross-attention blocks. With prefix caching, the
        leading blocks whose content is cached are shared and count as computed: as many as there
        are, or those among the first `max_cached_tokens` tokens, where another cache lacks more.

        Raises:
            ConfigError: encoder-decoder together with prefix caching or a sliding window.
            SequenceError: no sequence waits, or their prompts differ.
            DoubleAllocationError: one of them, or the request's encoder, has blocks already.
            OutOfBlocksError: too few blocks are free, watermark aside; nothing was allocated.
            BlockIdError: a sliding window cannot take that many lookahead slots.
        """
        waiting = self._waiting(group)
        prompt = waiting[0]
        for seq in waiting:
            self._tables.require_absent(seq)
        if group.encoder_seq is not None:
            self._tables.require_cross_absent(group)
        num_logical, num_held = self._geometry.prompt_blocks(prompt.num_tokens, num_lookahead_slots)
        num_cross = self._num_cross_blocks(group)
        cached, num_queried = self._gpu.find_prefix(prompt, self.block_size, max_cached_tokens)
        num_fresh = num_held - len(cached)
        self._gpu.require_free(num_fresh + self._gpu.num_idle(cached) + num_cross)

        # Cached blocks first: allocating the rest could evict them.
        self._gpu.share(cached)
        self._gpu.count_lookup(num_queried, len(cached))
        block_ids = cached + self._gpu.allocate(num_fresh)
        table = BlockTable(self._gpu, self._geometry, block_ids, prompt.num_tokens, num_logical)
        table.num_cached_tokens = table.num_computed_tokens = len(cached) * self.block_size
        self._tables.add(prompt, table)
        for sibling in waiting[1:]:
            self._tables.add(sibling, table.fork())
        if group.encoder_seq is not None:
            block_ids = self._gpu.allocate(num_cross)
            num_encoder_tokens = group.encoder_seq.num_tokens
            table = BlockTable(self._gpu, self._geometry, block_ids, num_encoder_tokens, num_cross)
            self._tables.add_cross(group, table)

    def can_append_slots(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> bool:
        """Whether `append_slots` will succeed for every unfinished sequence of the group.

        Worst case per touched block: one that several sequences share counts as copied by each.

        Raises:
            UnknownRequestError: no unfinished sequence of the group has blocks.
            LocalProtocolError: one is swapped out.
            BlockIdError: a sliding window cannot take that many slots.
        """
        num_needed = self._num_append_blocks(group, Device.GPU, num_lookahead_slots)
        return num_needed <= self._gpu.num_free_blocks

    def append_slots(self, seq: Sequence, num_lookahead_slots: int = 0) -> list[BlockCopy]:
        """Gives slots to the tokens appended to `seq` since the last call, and to some more.

        Returns:
            (source id, destination id) of shared blocks that must be copied before the new slots
            are written.

        Raises:
            UnknownRequestError: the sequence has no blocks.
            LocalProtocolError: it is swapped out.
            SequenceError: it has fewer tokens than it had.
            OutOfBlocksError: too few blocks are free; nothing changed.
            BlockIdError: a sliding window cannot take that many slots.
        """
        table = self._tables.get(seq)
        return apply_append(table, self._plan_append(seq, table, Device.GPU, num_lookahead_slots))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` share all blocks of `parent`; whoever writes a shared block first copies it.

        Raises:
            UnknownRequestError: the parent has no blocks.
            DoubleAllocationError: the child has blocks already.
            SequenceError: the child's tokens are not those that the parent's blocks hold.
        """
        table = self._tables.get(parent)
        self._tables.require_absent(child)
        if not child.shares_prefix(parent, table.num_tokens):
            raise SequenceError(
                "a fork must start with the tokens and extra keys that the parent's blocks hold",
                parent_seq_id=parent.seq_id,
                child_seq_id=child.seq_id,
                num_tokens=table.num_tokens,
            )
        self._tables.add(child, table.fork())

    def free(self, seq: Sequence) -> None:
        """Gives up the sequence's blocks, on whichever device; nothing if it has none."""
        table = self._tables.pop(seq)
        if table is not None:
            table.release()

    def free_cross(self, group: SequenceGroup) -> None:
        """Gives up the request's cross-attention blocks; nothing if it has none."""
        table = self._tables.pop_cross(group)
        if table is not None:
            table.release()

    def can_swap_in(self, group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Whether the group can return to the GPU and then append its new slots.

        Raises:
            UnknownRequestError: no unfinished sequence of the group has blocks.
            LocalProtocolError: one is on the GPU.
            BlockIdError: a sliding window cannot take that many slots.
        """
        plan = plan_swap(self._tables.on_device(group, Device.CPU), self._cpu, self._gpu)
        num_append_blocks = self._num_append_blocks(group, Device.CPU, num_lookahead_slots)
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
        """Moves the group's swapped-out tables to the GPU.

        Returns:
            (CPU id, GPU id) of every block to copy, each once however many sequences share it; a
            block that the GPU still caches needs no copy.

        Raises:
            UnknownRequestError: the group has no blocks.
            LocalProtocolError: none of them is on the device to leave.
            OutOfBlocksError: too few GPU blocks are free; nothing changed.
        """
        return self._swap(group, self._cpu, self._gpu)

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether the CPU pool can take the group now. Raises as `swap_out` for a misplaced group."""
        plan = plan_swap(self._tables.on_device(group, Device.GPU), self._gpu, self._cpu)
        return plan.num_blocks_needed <= self._cpu.num_free_blocks

    def swap_out(self, group: SequenceGroup) -> list[BlockCopy]:
        """Moves the group's tables to the CPU pool; blocks that others share stay with them.

        Returns:
            (GPU id, CPU id) of every block to copy, each once however many sequences share it; a
            block that the CPU pool still caches needs no copy.

        Raises:
            UnknownRequestError: the group has no blocks.
            LocalProtocolError: none of them is on the device to leave.
            OutOfBlocksError: too few CPU blocks are free; nothing changed.
        """
        return self._swap(group, self._gpu, self._cpu)

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:
        """Records the time (seconds) of the sequence's latest use, for the order of eviction.

        It reaches the cache when the sequence gives its blocks up. Raises UnknownRequestError.
        """
        table = self._tables.get(seq)
        table.last_access_s = max(table.last_access_s, now)

    def mark_blocks_as_computed(self, group: SequenceGroup, token_chunk_size: int) -> None:
        """States that the next `token_chunk_size` tokens of every unfinished sequence are computed.

        Counting starts behind the tokens that `allocate` found cached. Blocks that become full are
        offered to other requests from now on.

        Raises:
            UnknownRequestError: no unfinished sequence of the group has blocks.
            SequenceError: a sequence has fewer tokens with slots left; nothing was marked.
        """
        marked = self._tables.unfinished(group)
        for seq, table in marked:
            if not 0 <= token_chunk_size <= table.num_tokens - table.num_computed_tokens:
                raise SequenceError(
                    "cannot mark more tokens as computed than have slots",
                    seq_id=seq.seq_id,
                    token_chunk_size=token_chunk_size,
                    num_computed_tokens=table.num_computed_tokens,
                    num_tokens=table.num_tokens,
                )
        for seq, table in marked:
            full_blocks = table.mark_computed(token_chunk_size)
            if self.enable_caching and full_blocks:
                table.publish(full_blocks, seq.block_hashes(self.block_size, full_blocks.stop))

    def get_common_computed_block_ids(self, seqs: Iterable[Sequence]) -> list[int]:
        """The leading blocks that all sequences share and whose content is computed.

        Their prefill can be skipped. Empty without prefix caching. Raises UnknownRequestError.
        """
        tables = [self._tables.get(seq) for seq in seqs]
        return common_computed_blocks(tables) if self.enable_caching else []

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Share of full blocks that allocation (GPU) or swapping (both) found cached, 0.0 to 1.0.

        0.0 before the first look-up and without prefix caching.
        """
        return (self._gpu if device is Device.GPU else self._cpu).hit_rate

    def get_num_free_gpu_blocks(self) -> int:
        """GPU blocks without an owner, those with cached content included."""
        return self._gpu.num_free_blocks

    def get_num_free_cpu_blocks(self) -> int:
        """CPU blocks without an owner, those with cached content included."""
        return self._cpu.num_free_blocks

    def get_block_table(self, seq: Sequence) -> list[int]:
        """The sequence's block ids on its device, one per `block_size` slots, lookahead included.

        With a sliding window ids repeat; `get_first_kept_token` says from where they are valid.
        Raises UnknownRequestError.
        """
        return self._tables.get(seq).logical_ids()

    def get_cross_block_table(self, group: SequenceGroup) -> list[int]:
        """Ids of the request's cross-attention blocks. Raises UnknownRequestError without any."""
        return self._tables.get_cross(group).logical_ids()

    def get_device(self, seq: Sequence) -> Device:
        """Where the sequence's blocks are. Raises UnknownRequestError."""
        return self._tables.get(seq).device

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Leading tokens that `allocate` found cached; prefill starts behind them."""
        return self._tables.get(seq).num_cached_tokens

    def find_cached_tokens(self, seq: Sequence) -> int:
        """Leading tokens that `allocate` would find cached now. Changes nothing."""
        return len(self._gpu.find_prefix(seq, self.block_size).block_ids) * self.block_size

    def get_num_computed_tokens(self, seq: Sequence) -> int:
        """Leading tokens found cached or marked as computed since."""
        return self._tables.get(seq).num_computed_tokens

    def get_first_kept_token(self, seq: Sequence) -> int:
        """Oldest position whose slot is still its own: 0 unless a sliding window has wrapped.

        A prefill must not write the slots of tokens before it.
        """
        return self._tables.get(seq).first_kept_token()

    def _waiting(self, group: SequenceGroup) -> list[Sequence]:
        if group.is_encoder_decoder:
            check_encoder_decoder(
                group.request_id, self._geometry.sliding_window, self.enable_caching
            )
        return waiting_seqs(group)

    def _num_cross_blocks(self, group: SequenceGroup) -> int:
        if group.encoder_seq is None:
            return 0
        return self._geometry.num_logical_blocks(group.encoder_seq.num_tokens)

    def _plan_append(
        self, seq: Sequence, table: BlockTable, device: Device, num_lookahead_slots: int
    ) -> AppendPlan:
        if table.device is not device:
            raise LocalProtocolError(
                "the sequence's blocks are on the other device",
                seq_id=seq.seq_id,
                device=table.device.value,
                expected=device.value,
            )
        return plan_append(table, seq.num_tokens, num_lookahead_slots)

    def _num_append_blocks(
        self, group: SequenceGroup, device: Device, num_lookahead_slots: int
    ) -> int:
        return sum(
            self._plan_append(seq, table, device, num_lookahead_slots).num_blocks_needed
            for seq, table in self._tables.unfinished(group)
        )

    def _swap(
        self, group: SequenceGroup, source: BlockAllocator, destination: BlockAllocator
    ) -> list[BlockCopy]:
        tables = self._tables.on_device(group, source.device)
        return apply_swap(tables, plan_swap(tables, source, destination), source, destination)
