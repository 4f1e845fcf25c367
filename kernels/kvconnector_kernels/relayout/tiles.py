"""How the GPU kernel cuts a copy into tiles `[heads, tokens, words]`, and how wide its accesses are. Pure Python.

Where dim is contiguous on both sides, a word is as wide as both sides' alignment allows and a tile moves whole rows.
Else a word is one item, and the tile is transposed on the way, which Triton does through shared memory.

One program moves one tile. Tiles are laid over the tokens so that, if block sizes and runs allow it, no tile crosses a
block or leaves a run on either side: then the block id and its divisions are needed once per tile, not per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvconnector_kernels.relayout.errors import RelayoutError
from kvconnector_kernels.relayout.runs import ADJACENT
from kvconnector_kernels.relayout.sides import CopyGeometry, PackedSide, Side

_MAX_ACCESS_BYTES = 16
_MAX_WORD_BYTES = 8
_ROW_TILE_BYTES = 16384
_ITEM_TILE_BYTES = 8192
# Fewer tokens than this per tile cost more than looking up every token's block.
_MIN_ONE_BLOCK_TOKENS = 8
_ROW_TILE_TOKENS = 16
_ITEM_TILE_EDGE = 64
_MIN_WORDS = 16


@dataclass(frozen=True, slots=True)
class SideTiling:
    """One side's share of the plan: where its tiles start, and what the compiler may assume of their addresses.

    `origin_tokens` counts tokens of the side's runs, or positions where these are adjacent; `base_tokens` is the
    position from which it counts.
    """

    origin_tokens: int
    base_tokens: int
    is_one_block: bool
    # Along which tile axis neighbours are adjacent in memory: 1 tokens, 2 words, 0 unknown.
    contiguous_axis: int
    align_bytes: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """The plan of one launch. A tile covers `tile_heads` x `tile_tokens` x `tile_words`, all powers of two.

    Tile `i` along the tokens starts at token `i * tile_tokens - lead_tokens` of the copy, so the first may begin
    before it.
    """

    word_bytes: int
    num_words: int
    tile_words: int
    tile_heads: int
    tile_tokens: int
    lead_tokens: int
    is_even: bool
    src: SideTiling
    dst: SideTiling

    def counts(self, geometry: CopyGeometry) -> tuple[int, int, int]:
        """Tiles along tokens, heads and words."""
        return (
            -(-(geometry.num_tokens + self.lead_tokens) // self.tile_tokens),
            -(-geometry.num_heads // self.tile_heads),
            -(-self.num_words // self.tile_words),
        )


@dataclass(frozen=True, slots=True)
class _SideFacts:
    """What the plan needs to know of a side; `bits` are unions of set bits, whose lowest bit is an alignment.

    From token `base_tokens` on, token `first_token` is the copy's first; tokens are adjacent from each multiple of
    `whole_tokens` to the next, which is the block size where there are no runs. None: all of them are.
    """

    whole_tokens: int | None
    base_tokens: int
    first_token: int
    is_dim_contiguous: bool
    is_token_contiguous: bool
    base_bits: int
    token_bits: int
    dim_bits: int


def plan_tiles(src: Side, dst: Side, geometry: CopyGeometry) -> Tiling:
    """The tiling of a copy that `check_copy` accepted.

    Raises:
        RelayoutError: items are copied one by one, and an address or a stride is no multiple of the item size.
    """
    facts = (_facts(src, geometry), _facts(dst, geometry))
    row_bytes = geometry.head_dim * geometry.item_size_bytes
    is_row_copy = all(side.is_dim_contiguous for side in facts)
    if is_row_copy:
        bits = row_bytes
        for side in facts:
            bits |= side.base_bits | side.token_bits
        word_bytes = min(_MAX_WORD_BYTES, _alignment(bits))
        tile_bytes, max_tokens = _ROW_TILE_BYTES, _ROW_TILE_TOKENS
    else:
        word_bytes = geometry.item_size_bytes
        for side in facts:
            if _alignment(side.base_bits | side.token_bits | side.dim_bits) < word_bytes:
                raise RelayoutError(
                    f"transposing needs addresses and strides that are multiples of {word_bytes} bytes"
                )
        tile_bytes, max_tokens = _ITEM_TILE_BYTES, _ITEM_TILE_EDGE
    num_words = row_bytes // word_bytes
    tile_words = _tile_words(
        num_words, tile_bytes // word_bytes if is_row_copy else _ITEM_TILE_EDGE
    )
    room = max(1, tile_bytes // (tile_words * word_bytes))
    tile_tokens = _tile_tokens(facts, room, max_tokens, geometry.num_heads)
    lead_tokens = _lead_tokens(facts, tile_tokens)
    sides = [_tile_side(side, tile_tokens, tile_words, lead_tokens, word_bytes) for side in facts]
    return Tiling(
        word_bytes=word_bytes,
        num_words=num_words,
        tile_words=tile_words,
        tile_heads=min(_next_power_of_two(geometry.num_heads), max(1, room // tile_tokens)),
        tile_tokens=tile_tokens,
        lead_tokens=lead_tokens,
        # Rows are vectorised along their words whatever the tokens' mask; only a transposed tile profits from knowing.
        is_even=not is_row_copy and lead_tokens == 0 and geometry.num_tokens % tile_tokens == 0,
        src=sides[0],
        dst=sides[1],
    )


def _facts(side: Side, geometry: CopyGeometry) -> _SideFacts:
    item = geometry.item_size_bytes
    if not isinstance(side, PackedSide):
        address, block, head, token, dim = side.table.address_bits
        runs, whole = side.runs, side.table.block_size
        base, first = 0, side.token_start
        if runs != ADJACENT:
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
        None,
        0,
        0,
        dim == item or geometry.head_dim == 1,
        token == item,
        side.address | part | head,
        token,
        dim,
    )


def _tile_words(num_words: int, limit: int) -> int:
    """The widest power of two that wastes at most a quarter of the lanes, or else the one that wastes fewest."""
    widest = min(_next_power_of_two(num_words), limit)
    widths = [widest]
    while widths[-1] > _MIN_WORDS:
        widths.append(widths[-1] // 2)
    covered = {width: -(-num_words // width) * width for width in widths}
    allowed = max(min(covered.values()), num_words * 4 // 3)
    return next(width for width in widths if covered[width] <= allowed)


def _tile_tokens(
    facts: tuple[_SideFacts, _SideFacts], room: int, max_tokens: int, num_heads: int
) -> int:
    whole = [side.whole_tokens for side in facts if side.whole_tokens is not None]
    aligned = _alignment(math.gcd(*whole), cap=1 << 30) if whole else max_tokens
    if aligned < _MIN_ONE_BLOCK_TOKENS:
        return min(max_tokens, room)
    # Tall tiles only where there are too few heads to fill a tile.
    enough = max(max_tokens, room // _next_power_of_two(num_heads))
    return min(aligned, enough, room)


def _lead_tokens(facts: tuple[_SideFacts, _SideFacts], tile_tokens: int) -> int:
    """How far the first tile reaches before the copy, so that tiles start where blocks do, first of all for writes."""
    for side in reversed(facts):
        if side.whole_tokens is not None and side.whole_tokens % tile_tokens == 0:
            return side.first_token % tile_tokens
    return 0


def _tile_side(
    side: _SideFacts, tile_tokens: int, tile_words: int, lead_tokens: int, word_bytes: int
) -> SideTiling:
    origin = side.first_token - lead_tokens
    starts_aligned = origin % tile_tokens == 0
    is_one_block = side.whole_tokens is None or (
        starts_aligned and side.whole_tokens % tile_tokens == 0
    )
    axis, bits = 0, word_bytes
    if side.is_dim_contiguous:
        axis, bits = 2, side.base_bits | side.token_bits | tile_words * word_bytes
    elif side.is_token_contiguous and is_one_block and starts_aligned:
        axis, bits = 1, side.base_bits | side.dim_bits | tile_tokens * word_bytes
    return SideTiling(origin, side.base_tokens, is_one_block, axis, _alignment(bits))


def _alignment(bits: int, cap: int = _MAX_ACCESS_BYTES) -> int:
    """The largest power of two that divides all numbers whose bits were united, at most `cap`."""
    return min(cap, bits & -bits) if bits else cap


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
