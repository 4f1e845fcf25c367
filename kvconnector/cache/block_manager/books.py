"""The block manager's tables: which blocks each sequence holds, and how far they are computed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from kvconnector.cache.block_manager.allocator import BlockAllocator, Device
from kvconnector.cache.block_manager.sequence import Sequence, SequenceError, SequenceGroup
from kvconnector.cache.block_manager.sequence_blocks import Paging, SequenceBlocks
from kvconnector.errors import (
    ConfigError,
    LocalProtocolError,
    Retry,
    UnknownRequestError,
    require_at_least,
)


class DoubleAllocationError(LocalProtocolError):
    """The sequence or the request already has a block table. Nothing changed."""

    retry = Retry.NEVER


class TableDirectory(dict[int | str, SequenceBlocks]):
    """Block tables by sequence id, and the tables of cross-attention by request id."""

    def require_absent(self, seq: Sequence) -> None:
        """Raise DoubleAllocationError if the sequence has a table."""
        if seq.seq_id in self:
            raise DoubleAllocationError("the sequence already has blocks", seq_id=seq.seq_id)

    def require_cross_absent(self, group: SequenceGroup) -> None:
        """Raise DoubleAllocationError if the request has a table for cross-attention."""
        if group.request_id in self:
            raise DoubleAllocationError(
                "the request already has cross-attention blocks", request_id=group.request_id
            )

    def of(self, seq: Sequence) -> SequenceBlocks:
        """Return the sequence's table. Raises UnknownRequestError: it has none."""
        if seq.seq_id not in self:
            raise UnknownRequestError("the sequence has no blocks", seq_id=seq.seq_id)
        return self[seq.seq_id]

    def cross_of(self, group: SequenceGroup) -> SequenceBlocks:
        """Return the request's table for cross-attention. Raises UnknownRequestError: it has none."""
        if group.request_id not in self:
            raise UnknownRequestError(
                "the request has no cross-attention blocks", request_id=group.request_id
            )
        return self[group.request_id]

    def on(self, device: Device, seq: Sequence) -> SequenceBlocks:
        """Return the sequence's table, as `of`. Raises LocalProtocolError: it is on the other device."""
        table = self.of(seq)
        if table.device is not device:
            raise LocalProtocolError(
                "the sequence's blocks are on the other device",
                seq_id=seq.seq_id,
                device=table.device.value,
                expected=device.value,
            )
        return table

    def unfinished(self, group: SequenceGroup) -> list[tuple[Sequence, SequenceBlocks]]:
        """Return the group's unfinished sequences with blocks. Raises UnknownRequestError: there are none."""
        unfinished = [seq for seq in group.seqs() if not seq.is_finished and seq.seq_id in self]
        if not unfinished:
            raise UnknownRequestError(
                "no unfinished sequence of the group has blocks", request_id=group.request_id
            )
        return [(seq, self[seq.seq_id]) for seq in unfinished]

    def on_device(self, group: SequenceGroup, device: Device) -> list[SequenceBlocks]:
        """Return the group's tables on one device, that of cross-attention last.

        Raises:
            UnknownRequestError: the group has no tables.
            LocalProtocolError: all of its tables are on the other device.
        """
        owners: list[int | str] = [seq.seq_id for seq in group.seqs()]
        owners.append(group.request_id)
        held = [self[owner] for owner in owners if owner in self]
        if not held:
            raise UnknownRequestError("the group has no blocks", request_id=group.request_id)
        there = [table for table in held if table.device is device]
        if not there:
            raise LocalProtocolError(
                "the group has no blocks on this device",
                request_id=group.request_id,
                device=device.value,
            )
        return there


class BlockBooks:
    """The part of `BlockSpaceManager` that hands out no blocks: its pools, and queries about them."""

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        *,
        sliding_window: int | None = None,
        is_recurrent: bool = False,
        max_step_tokens: int | None = None,
        attention_chunk_size: int | None = None,
        row_tokens: int = 1,
        is_ring: bool = False,
        enable_caching: bool = False,
    ) -> None:
        """Make two empty pools: GPU blocks to run in, CPU blocks to swap to.

        Args:
            block_size: Tokens per block.
            num_gpu_blocks: Number of blocks in which sequences run.
            num_cpu_blocks: Number of blocks to which sequences can be swapped out.
            watermark: Share of the GPU blocks, from 0 to below 1, that admission leaves free so that running sequences
                can grow without a swap.
            sliding_window: Number of tokens that a query sees, its own included; None for all.
            is_recurrent: True if a block holds one state; see `Paging`.
            max_step_tokens: The most tokens that a step computes. With a window, states or chunks, slots are taken step
                by step. If None, all slots are taken at once, or with a window in steps that need no more than
                `sliding_window // block_size + 2` blocks.
            attention_chunk_size: Length in tokens of the chunks to which attention is limited; None for no chunks.
            row_tokens: Number of tokens that share a row of a compressed cache. A block has whole rows.
            is_ring: True if a sequence has one block, whose slots its tokens take in turns. Nobody shares it.
            enable_caching: True to reuse blocks by their content.

        Raises:
            ConfigError: a value is out of range, or two do not go together.
        """
        sizes = {"block_size": block_size, "num_gpu_blocks": num_gpu_blocks}
        limits = {"sliding_window": sliding_window, "attention_chunk_size": attention_chunk_size}
        limits["row_tokens"] = row_tokens
        require_at_least(1, ConfigError, **sizes, **limits, max_step_tokens=max_step_tokens)
        require_at_least(0, ConfigError, num_cpu_blocks=num_cpu_blocks)
        if not 0.0 <= watermark < 1.0:
            raise ConfigError("watermark must be a share in [0, 1)", watermark=watermark)
        self.block_size = block_size
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.enable_caching = enable_caching
        ways = (sliding_window, is_recurrent, attention_chunk_size, is_ring, row_tokens > 1)
        if sum(map(bool, ways)) > 1:
            raise ConfigError(
                "a layer can have only one of: a window, chunks, a recurrent state, a ring, rows of several tokens",
                is_recurrent=is_recurrent,
                is_ring=is_ring,
                **limits,
            )
        if block_size % row_tokens:
            raise ConfigError(
                "block_size must be a multiple of row_tokens",
                block_size=block_size,
                row_tokens=row_tokens,
            )
        if is_ring and enable_caching:
            raise ConfigError(
                "a ring holds no prefix that other requests could share, so caching must be off",
                is_ring=is_ring,
            )
        window = 2 if is_recurrent else sliding_window
        if window is not None and max_step_tokens is None:
            max_step_tokens = block_size - window % block_size + 1
        self._paging = Paging(
            block_size,
            window,
            is_recurrent,
            max_step_tokens,
            attention_chunk_size,
            row_tokens,
            is_ring,
        )
        self._gpu = BlockAllocator(Device.GPU, num_gpu_blocks)
        self._cpu = BlockAllocator(Device.CPU, num_cpu_blocks)
        self._tables = TableDirectory()

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:
        """Record the time of a sequence's latest use, in seconds. It orders evictions once the blocks are free."""
        table = self._tables.of(seq)
        table.last_access_s = max(table.last_access_s, now)

    def mark_blocks_as_computed(self, group: SequenceGroup, token_chunk_size: int) -> None:
        """Declare the next `token_chunk_size` tokens of every unfinished sequence computed.

        Counting starts after the tokens that `allocate` found cached. Other requests can find blocks that become full.

        Raises:
            SequenceError: a sequence has fewer tokens left that have slots.
        """
        marked = self._tables.unfinished(group)
        for seq, table in marked:
            if not 0 <= token_chunk_size <= table.num_tokens - table.num_computed_tokens:
                raise SequenceError(
                    "cannot mark more tokens as computed than have slots",
                    seq_id=seq.seq_id,
                    token_chunk_size=token_chunk_size,
                    room=table.num_tokens - table.num_computed_tokens,
                )
        for seq, table in marked:
            full_blocks = table.mark_computed(token_chunk_size)
            if self.enable_caching and full_blocks:
                table.publish(full_blocks, seq.block_hashes(self.block_size, full_blocks.stop))

    def reset_prefix_cache(self) -> None:
        """Forget the content of all blocks on both devices, for example because the model's weights have changed.

        Requests keep their blocks. Nothing that they hold, or compute on top of it, can be found by others; a request
        that is freed and allocated again is computed anew, and its blocks can.
        """
        self._gpu.forget_contents()
        self._cpu.forget_contents()
        for table in self._tables.values():
            table.is_outdated = True

    def get_common_computed_block_ids(self, seqs: Iterable[Sequence]) -> list[int]:
        """Return the leading computed blocks that all these sequences share, for example to read them only once for a
        batch. There are none if a window has left the first block.
        """
        tables = [self._tables.on(Device.GPU, seq) for seq in seqs]
        if self._paging.is_ring:  # its block changes with every token
            return []
        computed = [
            [] if table.dropped else table.block_ids[: table.num_computed_tokens // self.block_size]
            for table in tables
        ]
        shared = takewhile(lambda block_ids: len(set(block_ids)) == 1, zip(*computed, strict=False))
        return [block_ids[0] for block_ids in shared]

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Return the share of full blocks that allocation (GPU) or swapping (both) found cached; 0.0 before these."""
        return (self._gpu if device is Device.GPU else self._cpu).hit_rate

    def get_num_free_gpu_blocks(self) -> int:
        """Return the number of GPU blocks without an owner, including those with cached content."""
        return self._gpu.num_free_blocks

    def get_num_free_cpu_blocks(self) -> int:
        """Return the number of CPU blocks without an owner, including those with cached content."""
        return self._cpu.num_free_blocks

    def get_block_table(self, seq: Sequence) -> list[int]:
        """Return the sequence's block ids, with those for the lookahead. Ids before `get_first_block` mean nothing."""
        table = self._tables.of(seq)
        return table.dropped + table.block_ids

    def get_cross_block_table(self, group: SequenceGroup) -> list[int]:
        """Return the ids of the request's cross-attention blocks, on the device where they are."""
        return self._tables.cross_of(group).block_ids.copy()

    def get_first_block(self, seq: Sequence) -> int:
        """Return the index of the first block that the sequence holds. A window has left the ones before it."""
        return len(self._tables.of(seq).dropped)

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Return how many leading tokens `allocate` found cached. Prefill starts after them."""
        return self._tables.of(seq).num_cached_tokens

    def find_cached_tokens(self, seq: Sequence, max_tokens: int | None = None) -> int:
        """Return how many leading tokens, at most `max_tokens` and never all, the cache has so that `seq` can go on."""
        if not self.enable_caching:
            return 0
        limit = seq.num_tokens - 1 if max_tokens is None else min(max_tokens, seq.num_tokens - 1)
        size, paging = self.block_size, self._paging
        found = first_of_run = 0
        for index, block_hash in enumerate(seq.block_hashes(size, limit // size)):
            if not self._gpu.lookup((block_hash,)):
                if paging.keeps_all:
                    break
                first_of_run = index + 1
            elif paging.first_needed((index + 1) * size) >= first_of_run:
                found = index + 1
        return found * size

    def get_num_computed_tokens(self, seq: Sequence) -> int:
        """Return how many leading tokens were found cached or have been marked as computed."""
        return self._tables.of(seq).num_computed_tokens
