"""Which blocks hold which tokens of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvconnector.cache.block_manager.allocator import (
    NEVER_ACCESSED_S,
    BlockAllocator,
    CachedContent,
    Device,
)
from kvconnector.errors import BlockIdError


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """How tokens map to a table's blocks: one after the other, or around a ring.

    With a sliding window a table holds at most window // block_size + 2 blocks: the window rounded
    down, one for the remainder, one because the window may start inside a block. Further tokens
    overwrite the blocks whose tokens every later query has left behind.
    """

    block_size: int
    """Tokens per block."""
    sliding_window: int | None = None
    """Tokens that one query sees, itself included; None for all."""

    @property
    def ring_blocks(self) -> int | None:
        """Most blocks that one table holds, None for no limit."""
        if self.sliding_window is None:
            return None
        return self.sliding_window // self.block_size + 2

    def num_logical_blocks(self, num_slots: int) -> int:
        """Blocks that `num_slots` token slots span."""
        return -(-num_slots // self.block_size)

    def num_physical_blocks(self, num_logical_blocks: int) -> int:
        """Blocks that a table of this logical length really holds."""
        ring_blocks = self.ring_blocks
        return num_logical_blocks if ring_blocks is None else min(num_logical_blocks, ring_blocks)

    def prompt_blocks(self, num_tokens: int, num_lookahead_slots: int) -> tuple[int, int]:
        """(logical, held) blocks of a prompt and its lookahead slots. Raises as `check_lookahead`."""
        self.check_lookahead(num_lookahead_slots)
        num_logical = self.num_logical_blocks(num_tokens + num_lookahead_slots)
        return num_logical, self.num_physical_blocks(num_logical)

    def check_lookahead(self, num_lookahead_slots: int) -> None:
        """Raises BlockIdError for a negative count, or for one that a full ring cannot hold."""
        if num_lookahead_slots < 0:
            raise BlockIdError(
                "lookahead slots must not be negative", num_lookahead_slots=num_lookahead_slots
            )
        if self.sliding_window is not None:
            # Independent of the table's fill, so that a setting fails at once and not much later.
            self._check_new_slots(self.sliding_window, 1 + num_lookahead_slots)

    def check_append(self, num_tokens: int, num_slots: int) -> None:
        """Raises BlockIdError if growing from `num_tokens` to `num_slots` overwrites the window."""
        ring_blocks = self.ring_blocks
        if (
            self.sliding_window is not None
            and ring_blocks is not None
            and num_slots > ring_blocks * self.block_size
        ):
            self._check_new_slots(self.sliding_window, num_slots - num_tokens)

    def _check_new_slots(self, window: int, num_new_slots: int) -> None:
        # The first new query's window and all new slots, window - 1 + new slots in a row, must lie
        # in the ring at any alignment: ceil((window + new - 2) / block) + 1 <= ring blocks.
        limit = self.block_size - window % self.block_size + 2
        if num_new_slots > limit:
            raise BlockIdError(
                "new slots would overwrite tokens that the sliding window still needs",
                num_new_slots=num_new_slots,
                limit=limit,
                sliding_window=window,
                block_size=self.block_size,
                ring_blocks=self.ring_blocks,
            )


class BlockTable:
    """The blocks of one sequence, all on one device.

    `block_ids` are the blocks it owns, each once; the table as a kernel reads it is `logical_ids`.
    """

    __slots__ = (
        "allocator",
        "block_ids",
        "geometry",
        "last_access_s",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_logical_blocks",
        "num_tokens",
    )

    def __init__(
        self,
        allocator: BlockAllocator,
        geometry: BlockGeometry,
        block_ids: list[int],
        num_tokens: int,
        num_logical_blocks: int,
    ) -> None:
        """Takes over one owner's share of each of `block_ids`."""
        self.allocator = allocator
        self.geometry = geometry
        self.block_ids = block_ids
        self.num_tokens = num_tokens
        self.num_logical_blocks = num_logical_blocks
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.last_access_s = NEVER_ACCESSED_S

    @property
    def device(self) -> Device:
        """Where the blocks are."""
        return self.allocator.device

    def logical_ids(self) -> list[int]:
        """One id per `block_size` tokens; with a ring, ids repeat."""
        held = len(self.block_ids)
        if self.num_logical_blocks == held:
            return self.block_ids.copy()
        return [self.block_ids[index % held] for index in range(self.num_logical_blocks)]

    def first_kept_token(self) -> int:
        """Position of the oldest token whose slot no later one has taken."""
        overwritten_blocks = self.num_logical_blocks - len(self.block_ids)
        return overwritten_blocks * self.geometry.block_size

    def mark_computed(self, num_tokens: int) -> range:
        """Counts `num_tokens` more as computed; returns the indices of blocks this completed."""
        first_block = self.num_computed_tokens // self.geometry.block_size
        self.num_computed_tokens += num_tokens
        return range(first_block, self.num_computed_tokens // self.geometry.block_size)

    def publish(self, full_blocks: range, block_hashes: list[bytes]) -> None:
        """Offers computed blocks to others; `block_hashes` are those of all blocks from the first."""
        for depth in full_blocks:
            content = CachedContent(block_hashes[depth], depth)
            self.allocator.publish(self.block_ids[depth], content)

    def fork(self) -> BlockTable:
        """A second table that shares every block."""
        self.allocator.share(self.block_ids)
        child = BlockTable(
            self.allocator,
            self.geometry,
            self.block_ids.copy(),
            self.num_tokens,
            self.num_logical_blocks,
        )
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_tokens = self.num_cached_tokens
        return child

    def release(self) -> None:
        """Gives up every block; the table must not be used afterwards."""
        self.allocator.release(self.block_ids, self.last_access_s)
        self.block_ids = []
        self.num_logical_blocks = 0


def common_computed_blocks(tables: Sequence[BlockTable]) -> list[int]:
    """The leading blocks that all tables share and whose tokens are all computed."""
    if len({table.device for table in tables}) != 1:
        return []
    computed = [
        table.block_ids[: table.num_computed_tokens // table.geometry.block_size]
        for table in tables
    ]
    common: list[int] = []
    for block_ids in zip(*computed, strict=False):
        if len(set(block_ids)) != 1:
            break
        common.append(block_ids[0])
    return common
