"""The parts that make up the copies of a read: windows of pools, lanes between two windows, and spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvconnector.planning import GroupBlocks, SegmentWindow
from kvconnector_kernels.relayout import (
    BlockIdsAt,
    BlockIdsError,
    Conversion,
    PackedSide,
    PagedSide,
    PartTable,
    RelayoutError,
    TokenRuns,
)
from kvconnector_kernels.relayout.block_ids import ALIGN_BYTES
from kvconnector_kernels.relayout.runs import ADJACENT


class Tokens(NamedTuple):
    """A span's tokens in a pool: the address of the block ids, their number, and the rest as in `PagedSide`."""

    ids: int
    num_ids: int
    token_start: int
    skip_tokens: int


IN_SLOT = Tokens(0, 0, 0, 0)


class Window(msgspec.Struct, frozen=True, eq=False):
    """A segment in a pool, for all reads on a route."""

    table: PartTable
    segment: SegmentWindow

    def tokens(
        self, first: int, num_tokens: int, part_stop: int, blocks: GroupBlocks, ids: int
    ) -> Tokens:
        """Return the place of a copy's tokens.

        Args:
            first: The first member of the segment's stripe that is copied.
            num_tokens: Number of members that are copied.
            part_stop: The index after the last part of the segment that is copied.
            blocks: The request's blocks in the segment's group.
            ids: The address at which the device reads their ids.

        Raises:
            RelayoutError: the pool has no such parts.
            BlockIdsError: the tokens are not in the blocks.
        """
        segment, stripe, block_size = self.segment, self.segment.stripe, self.table.block_size
        if segment.first_row + part_stop > self.table.num_parts:
            last = segment.first_row + part_stop
            raise RelayoutError(f"a copy ends at row {last} of {self.table.num_parts}")
        num_ids, before = len(blocks.wire_ids) // 4, blocks.first_block * block_size
        last = first + num_tokens - 1
        if stripe.run == stripe.period:
            start, skip, last = first - before, 0, last - before
        else:
            turn, skip = divmod(first, stripe.run)
            start, last = stripe.first + turn * stripe.period - before, stripe.token(last) - before
        if start + skip < 0 or last // block_size >= num_ids:
            raise BlockIdsError(
                f"a copy of tokens {start + skip} to {last + 1} of {num_ids} blocks of {block_size} tokens"
            )
        return Tokens(ids, num_ids, start, skip)

    def side(self, tokens: Tokens | None = None) -> PagedSide:
        """Return the window for kernels, at these tokens, or without any."""
        ids, num_ids, start, skip = tokens or (ALIGN_BYTES, 0, 0, 0)
        stripe, is_dense = self.segment.stripe, self.segment.stripe.is_dense
        runs = ADJACENT if is_dense else TokenRuns(stripe.run, stripe.period, skip)
        place = BlockIdsAt(ids, num_ids, self.table.device)
        where = (self.segment.first_row, self.segment.head_start, start, runs)
        return PagedSide(self.table, place, *where)


class Lane(msgspec.Struct, frozen=True, eq=False):
    """The data shared by all copies of a segment from `src` to `dst`. `token_bytes` are the bytes of one token of one
    part. In host memory a job of one part without tokens has `words`; each further token adds to those whose indices
    `words_of_a_token` has, with what it adds. A job with a `conversion` needs the lane until it ends.
    """

    src: Window | PackedSide
    dst: Window | PackedSide
    num_heads: int
    token_bytes: int
    words: Sequence[int] = ()
    words_of_a_token: Sequence[tuple[int, int]] = ()
    conversion: Conversion | None = None


class Span(NamedTuple):
    """Copies of a lane that differ only in their parts. The span's `i`-th chunk of the read's `chunks` has the
    segment's parts from `rows[i]` to `rows[i + 1]`. A direct read has one chunk for each segment.
    """

    lane: Lane
    src: Tokens
    dst: Tokens
    num_tokens: int
    chunks: slice
    rows: list[int]
