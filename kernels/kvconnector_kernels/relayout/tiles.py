"""Planning a GPU copy: its tiles `[heads, tokens, words]`, and the width of its accesses. Pure Python.

Where dim is contiguous on both sides, a word is as wide as both sides' alignment allows and a tile moves whole rows.
Otherwise a word is one item, and the tile is transposed during the copy, which Triton does through shared memory.

One program moves one tile. Tiles are laid over the tokens so that, if block sizes and runs allow it, no tile crosses a
block or leaves a run on either side: then the block id and its divisions are needed once per tile, not per token.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from kvconnector_kernels.relayout.checks import RelayoutError
from kvconnector_kernels.relayout.convert import Conversion
from kvconnector_kernels.relayout.runs import ADJACENT
from kvconnector_kernels.relayout.sides import CopyGeometry, PackedSide, Side

_MAX_ACCESS_BYTES = 16
_MAX_WORD_BYTES = 8
_ROW_TILE_BYTES = 16384
_ITEM_TILE_BYTES = 8192
_WARPS = 4
# A conversion computes between its loads and its stores. On the multiprocessors of a capped launch, only other
# warps of the same program hide that: so tiles are larger, and each warp has no more elements than a plain copy's.
_CONVERTED_TILE_BYTES = 32768
_CONVERTED_WARPS = 16
_CONVERTED_WARP_ITEMS = 1024
# Fewer tokens than this per tile cost more than looking up every token's block.
_MIN_ONE_BLOCK_TOKENS = 8
_ROW_TILE_TOKENS = 16
_ITEM_TILE_EDGE = 64
_MIN_WORDS = 16


class SideTiling(NamedTuple):
    """One side's share of the plan: where its tiles start, and what the compiler may assume about their addresses.

    `origin_tokens` counts tokens of the side's runs, or positions where these are adjacent; `base_tokens` is the
    position from which it counts.
    """

    origin_tokens: int
    base_tokens: int
    is_one_block: bool
    # Along which tile axis neighbours are adjacent in memory: 1 tokens, 2 words, 0 unknown.
    contiguous_axis: int
    align_bytes: int
    # No runs, and a kernel of its own for that.
    is_adjacent: bool
    # The block size and the strides, in words, of a paged side whose kernel is compiled for them; None if they are
    # arguments of the kernel.
    strides: tuple[int, ...] | None


class Tile(NamedTuple):
    """The size of a tile: `heads` x `tokens` x `words`, all powers of two, of heads with `num_words` words."""

    word_bytes: int
    num_words: int
    words: int
    heads: int
    tokens: int


class Tiling(NamedTuple):
    """The plan of one launch. Tile `i` along the tokens starts at token `i * tile.tokens - lead_tokens` of the copy, so
    the first may begin before it.
    """

    tile: Tile
    lead_tokens: int
    is_even: bool
    src: SideTiling
    dst: SideTiling
    num_warps: int
    is_one_tile: tuple[bool, bool]
    """If True, all words, and all heads, are in one tile, and there is a kernel of its own for that."""

    def counts(self, geometry: CopyGeometry) -> tuple[int, int, int]:
        """Tiles along tokens, heads and words."""
        return (
            -(-(geometry.num_tokens + self.lead_tokens) // self.tile.tokens),
            -(-geometry.num_heads // self.tile.heads),
            -(-self.tile.num_words // self.tile.words),
        )

    def numbers(self, geometry: CopyGeometry) -> tuple[int, ...]:
        """Return the kernel's arguments from `num_heads` on."""
        counts = self.counts(geometry)
        num_tiles = geometry.num_parts * math.prod(counts)
        return (geometry.num_heads, geometry.num_tokens, self.lead_tokens, num_tiles, *counts)


class _SideFacts(NamedTuple):
    """The facts about a side that the plan needs. `bits` are unions of set bits, whose lowest bit is an alignment.

    From token `base_tokens` on, token `first_token` is the copy's first; tokens are adjacent from each multiple of
    `whole_tokens` to the next, which is the block size where there are no runs. 0: all of them are.
    """

    whole_tokens: int
    base_tokens: int
    first_token: int
    is_dim_contiguous: bool
    is_token_contiguous: bool
    base_bits: int
    token_bits: int
    dim_bits: int


def plan_tiles(
    src: Side, dst: Side, geometry: CopyGeometry, conversion: Conversion | None = None
) -> Tiling:
    """Return the tiling of a copy that `check_copy` accepted. If it converts elements, a word is one of them on either
    side, and a tile's size that of the larger ones.

    Raises:
        RelayoutError: items are copied one by one or converted, and an address or a stride is no multiple of the item
            size.
    """
    items = [geometry.item_size_bytes] * 2
    if conversion is not None:
        items = [conversion.src_item_bytes, conversion.dst_item_bytes]
    facts = _facts(src, geometry, items[0]), _facts(dst, geometry, items[1])
    ours, theirs = facts
    is_row_copy = ours.is_dim_contiguous and theirs.is_dim_contiguous
    bits = ours.base_bits | ours.token_bits | theirs.base_bits | theirs.token_bits
    if not is_row_copy:
        bits |= ours.dim_bits | theirs.dim_bits
    if conversion is not None:
        for side, item in zip(facts, items, strict=True):
            if _alignment(side.base_bits | side.token_bits | side.dim_bits) < item:
                raise RelayoutError(
                    f"converting needs addresses and strides that are multiples of {item} bytes"
                )
        bits = max(items)  # words of one element
    tile = _tile(
        geometry.head_dim,
        max(items),
        geometry.num_heads,
        is_row_copy,
        bits % _MAX_ACCESS_BYTES,
        math.gcd(ours.whole_tokens, theirs.whole_tokens),
        _ROW_TILE_BYTES if conversion is None else _CONVERTED_TILE_BYTES,
    )
    lead_tokens = _lead_tokens(facts, tile.tokens)
    # Kernels that convert are compiled for each pair of pools when engines meet; others serve many.
    is_special = conversion is not None
    ours_tiling, theirs_tiling = (
        _tile_side(
            side_facts,
            tile if conversion is None else tile._replace(word_bytes=item),
            lead_tokens,
            # accesses of as many elements on both sides, so that a lane keeps what it loads
            _MAX_ACCESS_BYTES * item // max(items),
            is_adjacent=is_special and (isinstance(side, PackedSide) or side.runs == ADJACENT),
            strides=_known_strides(side, item) if is_special else None,
        )
        for side, side_facts, item in zip((src, dst), facts, items, strict=True)
    )
    return Tiling(
        tile,
        lead_tokens,
        # Rows are vectorised along their words whatever the tokens' mask; only a transposed tile profits from knowing.
        not is_row_copy and lead_tokens == 0 and geometry.num_tokens % tile.tokens == 0,
        ours_tiling,
        theirs_tiling,
        _warps_that_convert(tile) if is_special else _WARPS,
        (
            is_special and tile.num_words <= tile.words,
            is_special and geometry.num_heads <= tile.heads,
        ),
    )


def _known_strides(side: Side, item: int) -> tuple[int, ...] | None:
    if isinstance(side, PackedSide) or side.table.strides_bytes is None:
        return None
    return (side.table.block_size, *(stride // item for stride in side.table.strides_bytes))


def _warps_that_convert(tile: Tile) -> int:
    count = tile.heads * tile.tokens * tile.words // _CONVERTED_WARP_ITEMS
    return min(_CONVERTED_WARPS, max(_WARPS, count))


@lru_cache(maxsize=1024)
def _tile(
    head_dim: int,
    item_size_bytes: int,
    num_heads: int,
    is_row_copy: bool,
    bits: int,
    whole: int,
    row_tile_bytes: int,
) -> Tile:
    """Return the tile, which does not depend on which tokens are copied. `bits` are the union of all addresses and
    strides that must be aligned, as far as they matter. Tokens are adjacent on both sides from each multiple of `whole`
    to the next, or everywhere if it is 0.
    """
    row_bytes = head_dim * item_size_bytes
    if is_row_copy:
        word_bytes = min(_MAX_WORD_BYTES, _alignment(bits | row_bytes))
        tile_bytes, max_tokens = row_tile_bytes, _ROW_TILE_TOKENS
    else:
        word_bytes = item_size_bytes
        if _alignment(bits) < word_bytes:
            raise RelayoutError(
                f"transposing needs addresses and strides that are multiples of {word_bytes} bytes"
            )
        tile_bytes, max_tokens = _ITEM_TILE_BYTES, _ITEM_TILE_EDGE
    num_words = row_bytes // word_bytes
    tile_words = _tile_words(
        num_words, tile_bytes // word_bytes if is_row_copy else _ITEM_TILE_EDGE
    )
    room = max(1, tile_bytes // (tile_words * word_bytes))
    tile_tokens = _tile_tokens(whole, room, max_tokens, num_heads)
    tile_heads = min(_next_power_of_two(num_heads), max(1, room // tile_tokens))
    return Tile(word_bytes, num_words, tile_words, tile_heads, tile_tokens)


def _facts(side: Side, geometry: CopyGeometry, item: int) -> _SideFacts:
    if not isinstance(side, PackedSide):
        address, block, head, token, dim = side.table.address_bits
        runs, whole = side.runs, side.table.block_size
        base, first = 0, side.token_start
        if runs is not ADJACENT and runs != ADJACENT:
            base, first = side.token_start, runs.skip_tokens
            whole = math.gcd(whole, base, runs.run_tokens, runs.step_tokens)
        return _SideFacts(
            whole,
            base,
            first,
            side.table.is_dim_contiguous,
            side.table.is_token_contiguous,
            address | block | head,
            token,
            dim,
        )
    part, head, token, dim = side.strides_bytes(geometry)
    return _SideFacts(
        0,
        0,
        0,
        dim == item or geometry.head_dim == 1,
        token == item,
        side.address | part | head,
        token,
        dim,
    )


def _tile_words(num_words: int, limit: int) -> int:
    """Return the widest power of two that wastes at most a quarter of the lanes, or else the one that wastes fewest."""
    widest = min(_next_power_of_two(num_words), limit)
    widths = [widest]
    while widths[-1] > _MIN_WORDS:
        widths.append(widths[-1] // 2)
    covered = {width: -(-num_words // width) * width for width in widths}
    allowed = max(min(covered.values()), num_words * 4 // 3)
    return next(width for width in widths if covered[width] <= allowed)


def _tile_tokens(whole: int, room: int, max_tokens: int, num_heads: int) -> int:
    aligned = _alignment(whole, cap=1 << 30) if whole else max_tokens
    if aligned < _MIN_ONE_BLOCK_TOKENS:
        return min(max_tokens, room)
    # Tall tiles only where there are too few heads to fill a tile.
    enough = max(max_tokens, room // _next_power_of_two(num_heads))
    return min(aligned, enough, room)


def _lead_tokens(facts: tuple[_SideFacts, _SideFacts], tile_tokens: int) -> int:
    """Return how many tokens the first tile begins early, so that tiles start where blocks do, preferably on writes."""
    for side in reversed(facts):
        if side.whole_tokens and side.whole_tokens % tile_tokens == 0:
            return side.first_token % tile_tokens
    return 0


def _tile_side(
    side: _SideFacts,
    tile: Tile,
    lead_tokens: int,
    access_bytes: int,
    *,
    is_adjacent: bool,
    strides: tuple[int, ...] | None,
) -> SideTiling:
    origin = side.first_token - lead_tokens
    starts_aligned = origin % tile.tokens == 0
    is_one_block = not side.whole_tokens or (
        starts_aligned and side.whole_tokens % tile.tokens == 0
    )
    axis, bits = 0, tile.word_bytes
    if side.is_dim_contiguous:
        axis, bits = 2, side.base_bits | side.token_bits | tile.words * tile.word_bytes
    elif side.is_token_contiguous and is_one_block and starts_aligned:
        axis, bits = 1, side.base_bits | side.dim_bits | tile.tokens * tile.word_bytes
    align_bytes = _alignment(bits, access_bytes)
    return SideTiling(
        origin, side.base_tokens, is_one_block, axis, align_bytes, is_adjacent, strides
    )


def _alignment(bits: int, cap: int = _MAX_ACCESS_BYTES) -> int:
    """Return the largest power of two that divides all numbers whose bits were united, at most `cap`."""
    return min(cap, bits & -bits) if bits else cap


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
