"""What the block manager knows of its sequences: which blocks they hold, how far these are computed."""

from __future__ import annotations

from kvconnector.cache.block_manager.admission import find_cached_tokens
from kvconnector.cache.block_manager.allocator import BlockAllocator, Device
from kvconnector.cache.block_manager.directory import TableDirectory
from kvconnector.cache.block_manager.errors import SequenceError
from kvconnector.cache.block_manager.sequence import Sequence, SequenceGroup
from kvconnector.cache.block_manager.sequence_blocks import Paging
from kvconnector.errors import ConfigError


class BlockBooks:
    """The part of `BlockSpaceManager` that hands out no blocks: its pools, and what is asked about them."""

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
            is_recurrent: a block holds one state instead of entries per token; see `Paging`.
            max_step_tokens: most tokens that one step computes. With a window or states, slots are
                taken for one step at a time. None: for all known tokens at once.
            enable_caching: find blocks again by their content.

        Raises:
            ConfigError: a value is out of range.
        """
        for name, value, minimum in (
            ("block_size", block_size, 1),
            ("num_gpu_blocks", num_gpu_blocks, 1),
            ("num_cpu_blocks", num_cpu_blocks, 0),
            ("sliding_window", sliding_window, 1),
            ("max_step_tokens", max_step_tokens, 1),
        ):
            if value is not None and value < minimum:
                raise ConfigError(f"{name} must be at least {minimum}", **{name: value})
        if not 0.0 <= watermark < 1.0:
            raise ConfigError("watermark must be a share in [0, 1)", watermark=watermark)
        self.block_size = block_size
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.enable_caching = enable_caching
        window = 2 if is_recurrent else sliding_window
        self._paging = Paging(block_size, window, is_recurrent, max_step_tokens)
        self._gpu = BlockAllocator(Device.GPU, num_gpu_blocks)
        self._cpu = BlockAllocator(Device.CPU, num_cpu_blocks)
        self._tables = TableDirectory()

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:
        """Records the time (seconds) of the sequence's latest use, for the order of eviction.

        It reaches the cache when the sequence gives its blocks up. Raises UnknownRequestError.
        """
        table = self._tables.of(seq)
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

        Those in front of `get_first_block` mean nothing: a window has left these blocks. Raises
        UnknownRequestError.
        """
        table = self._tables.of(seq)
        return table.dropped + table.block_ids

    def get_first_block(self, seq: Sequence) -> int:
        """Index of the first block that the sequence has. Raises UnknownRequestError."""
        return len(self._tables.of(seq).dropped)

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Leading tokens that `allocate` found cached; prefill starts behind them."""
        return self._tables.of(seq).num_cached_tokens

    def find_cached_tokens(self, seq: Sequence, max_tokens: int | None = None) -> int:
        """The most leading tokens, `max_tokens` at most, behind which `seq` could go on at once.

        Never the last one, which the engine computes for its logits. Changes nothing.
        """
        limit = seq.num_tokens - 1 if max_tokens is None else min(max_tokens, seq.num_tokens - 1)
        return find_cached_tokens(seq, self._gpu, self._paging, limit) if self.enable_caching else 0

    def get_num_computed_tokens(self, seq: Sequence) -> int:
        """Leading tokens found cached or marked as computed since."""
        return self._tables.of(seq).num_computed_tokens
