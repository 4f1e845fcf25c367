"""Re-layout on a GPU: one launch for all parts, through the part tables.

Legend: a tile is `[heads, tokens, words]`; strides inside the kernel count words; all address arithmetic is int64.
"""

# Triton reads the annotations of a kernel's parameters, so they stay evaluated: no postponed annotations here.
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import numpy as np
import torch
import triton
import triton.language as tl

from kvconnector_kernels.relayout.block_ids import BlockIdsAt
from kvconnector_kernels.relayout.checks import RelayoutError
from kvconnector_kernels.relayout.convert import (
    ELEMENT_TYPES,
    ROUNDINGS,
    Conversion,
    is_scaled,
)
from kvconnector_kernels.relayout.sides import (
    CopyCounts,
    CopyGeometry,
    PackedSide,
    Side,
    check_copy,
)
from kvconnector_kernels.relayout.tiles import SideTiling, Tiling, plan_tiles

_WORD_TYPES = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_SIDE_NUMBERS = (
    *("address", "part_stride", "head_stride", "token_stride", "dim_stride", "part_start"),
    *("head_start", "origin", "block_size", "base", "run", "step"),
)

_CAST_E5M2 = tl.constexpr(
    "{ .reg .b16 first, last; .reg .b32 found; .reg .f32 size; .reg .pred is_large;"
    " cvt.rn.satfinite.e5m2x2.f32 first, $2, $1; cvt.rn.satfinite.e5m2x2.f32 last, $4, $3;"
    " mov.b32 found, {first, last};"
    + "".join(
        f" abs.f32 size, ${index + 1}; setp.ge.f32 is_large, size, 0f47700000;"
        f" @is_large add.u32 found, found, {1 << 8 * index};"
        for index in range(4)
    )
    + " mov.b32 $0, found; }"
)
"""Four floats as e5m2 with infinities. The instruction stores the largest number, 57344, for all that is larger. The
next bits are those of infinity, to which 61440 and more are rounded. NaN is not compared as large.
"""


@triton.jit
def _step(row, COLUMN: tl.constexpr, STRIDES: tl.constexpr, WORD_BYTES: tl.constexpr):
    """Return a stride in words: of blocks, heads, tokens or dim, in columns from 1 on."""
    known: tl.constexpr = STRIDES is not None
    return tl.full((), STRIDES[COLUMN], tl.int64) if known else tl.load(row + COLUMN) // WORD_BYTES


# fmt: off
@triton.jit
def _tile_pointers(
    rows,  # int64 [num_parts, 5] of a paged side; None if packed
    ids,  # int32 [num_blocks of the request]; None if packed
    address, part_stride, head_stride, token_stride, dim_stride,  # bytes, of a packed side
    part, block_size, base_token, run, step,
    STRIDES: tl.constexpr,  # `SideTiling.strides` of a paged side, if they are part of the kernel
    first_token,  # of the tile, on this side: counted from `base_token` and along the runs
    heads, tokens_mask, words,  # [HEADS], [TOKENS], [WORDS]
    WORD: tl.constexpr, WORD_BYTES: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
    ONE_BLOCK: tl.constexpr, AXIS: tl.constexpr, ALIGN: tl.constexpr, ADJACENT: tl.constexpr,
):
    # fmt: on
    """Pointers to the tile's words, `[HEADS, TOKENS, WORDS]`. Known strides leave no more than a few additions for each
    tile: the compiler computes the place of a lane's words in a tile once.
    """
    in_tile = tl.arange(0, TOKENS)
    if rows is None:
        base = address.to(tl.int64) + part.to(tl.int64) * part_stride
        head_step = head_stride.to(tl.int64) // WORD_BYTES
        token_step = token_stride.to(tl.int64) // WORD_BYTES
        dim_step = dim_stride.to(tl.int64) // WORD_BYTES
    else:
        row = rows + part.to(tl.int64) * 5
        base = tl.load(row)
        if STRIDES is not None:
            block_size = STRIDES[0]
        block_step = _step(row, 1, STRIDES, WORD_BYTES)
        head_step = _step(row, 2, STRIDES, WORD_BYTES)
        token_step = _step(row, 3, STRIDES, WORD_BYTES)
        dim_step = _step(row, 4, STRIDES, WORD_BYTES)
    # A constant step of one word lets the compiler see which neighbours share an access.
    if AXIS == 1:
        token_step = 1
    if AXIS == 2:
        dim_step = 1
    if rows is None:
        base += first_token.to(tl.int64) * token_stride
        token_offsets = in_tile.to(tl.int64) * token_step
    elif ONE_BLOCK:
        at = base_token + first_token
        if not ADJACENT:
            at = base_token + first_token // run * step + first_token % run
        block = tl.load(ids + at // block_size).to(tl.int64)
        start = block * block_step + (at % block_size).to(tl.int64) * token_step
        base += start * WORD_BYTES
        token_offsets = in_tile.to(tl.int64) * token_step
    else:
        # Masked tokens may lie before the first block: their index is never used.
        along = tl.where(tokens_mask, first_token + in_tile, 0)
        at = base_token + along // run * step + along % run
        blocks = tl.load(ids + at // block_size, mask=tokens_mask, other=0).to(tl.int64)
        token_offsets = blocks * block_step + (at % block_size).to(tl.int64) * token_step
    offsets = (
        (heads.to(tl.int64) * head_step)[:, None, None]
        + token_offsets[None, :, None]
        + (words.to(tl.int64) * dim_step)[None, None, :]
    )
    pointers = base.to(tl.pointer_type(WORD)) + offsets
    if AXIS == 1:
        pointers = tl.multiple_of(pointers, (WORD_BYTES, ALIGN, WORD_BYTES))
        pointers = tl.max_contiguous(pointers, (1, TOKENS, 1))
    if AXIS == 2:
        pointers = tl.multiple_of(pointers, (WORD_BYTES, WORD_BYTES, ALIGN))
        pointers = tl.max_contiguous(pointers, (1, 1, WORDS))
    return pointers


@triton.jit
def _bits(value: tl.constexpr):
    """Return a number of the kernel as unsigned 32 bits."""
    return tl.full((), value, tl.uint32)


@triton.jit
def _widen(
    number, SHIFT: tl.constexpr, BIAS: tl.constexpr, NORMAL: tl.constexpr, UNIT: tl.constexpr,
    SPECIAL: tl.constexpr, SIGN: tl.constexpr,
):
    """See `widen` in kernels/native/convert.c."""
    bits = number.to(tl.uint32)
    magnitude = bits & (SIGN - 1)
    sign = tl.where(bits >= SIGN, _bits(0x80000000), _bits(0))
    found = (magnitude << SHIFT) + _bits(BIAS << 23)
    denormal = (magnitude.to(tl.int32).to(tl.float32) * UNIT).to(tl.uint32, bitcast=True)
    found = tl.where(magnitude < NORMAL, denormal, found)
    found = tl.where(magnitude >= SPECIAL, (magnitude << SHIFT) | _bits(0x7F800000), found)
    return (found | sign).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(
    value, SHIFT: tl.constexpr, BIAS: tl.constexpr, SMALLEST: tl.constexpr, MAGIC: tl.constexpr,
    MAGIC_BITS: tl.constexpr, MAX: tl.constexpr, NAN: tl.constexpr, SIGN: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
):
    """See `narrow` in kernels/native/convert.c. `SMALLEST`, `MAGIC_BITS` and `MAX` are the bits of floats."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & _bits(0x7FFFFFFF)
    kept = tl.where(magnitude < _bits(MAX), magnitude, _bits(MAX))
    normal = kept + _bits((1 << (SHIFT - 1)) - 1) + ((kept >> SHIFT) & 1) - _bits(BIAS << 23)
    denormal = (kept.to(tl.float32, bitcast=True) + MAGIC).to(tl.uint32, bitcast=True)
    found = tl.where(kept < _bits(SMALLEST), denormal - _bits(MAGIC_BITS), normal >> SHIFT)
    sign = tl.where(bits >= _bits(0x80000000), _bits(SIGN), _bits(0))
    nan = sign | _bits(NAN) if SIGNED_NAN else _bits(NAN)
    return tl.where(magnitude > _bits(0x7F800000), nan, found | sign)


@triton.jit
def _kept(magnitude, MAX: tl.constexpr):
    """Return the bits of a magnitude, saturated, NaN too."""
    return tl.where(magnitude < _bits(MAX), magnitude, _bits(MAX))


@triton.jit
def _truncate(value, kept, denormal, SHIFT: tl.constexpr, BIAS: tl.constexpr, SMALLEST: tl.constexpr):
    """See `truncate` in kernels/native/convert.c."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & _bits(0x7FFFFFFF)
    found = tl.where(kept < _bits(SMALLEST), denormal, (kept - _bits(BIAS << 23)) >> SHIFT)
    has_sign = (bits > _bits(0x80000000)) & (magnitude <= _bits(0x7F800000))
    return found | tl.where(has_sign, _bits(0x80), _bits(0))


@triton.jit
def _truncated(value, TYPE: tl.constexpr):
    """Return a float32 as the bits of an fp8 number that is not beyond it."""
    magnitude = value.to(tl.uint32, bitcast=True) & _bits(0x7FFFFFFF)
    if TYPE == 3:
        kept = _kept(magnitude, 0x43E00000)
        denormal = (kept.to(tl.float32, bitcast=True) + 0.015625).to(tl.uint32, bitcast=True)
        return _truncate(value, kept, (denormal - _bits(0x3C800000)) >> 20, 20, 120, 0x3C800000)
    kept = _kept(magnitude, 0x47600000)
    small = tl.where(kept < _bits(0x38800000), kept, _bits(0)).to(tl.float32, bitcast=True)
    return _truncate(value, kept, (small * 65536.0).to(tl.int32).to(tl.uint32), 21, 112, 0x38800000)


@triton.jit
def _value_of(number, TYPE: tl.constexpr, HAS_CASTS: tl.constexpr):
    """Return an element's number as float32. `TYPE` is one of `ELEMENT_TYPES`."""
    if TYPE == 2:
        value = (number.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif HAS_CASTS:
        if TYPE == 1:
            value = number.to(tl.float16, bitcast=True).to(tl.float32)
        elif TYPE == 3:
            value = number.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            value = number.to(tl.float8e5, bitcast=True).to(tl.float32)
    elif TYPE == 1:
        value = _widen(number, 13, 112, 0x400, 2.0**-24, 0x7C00, 0x8000)
    elif TYPE == 3:
        value = _widen(number, 20, 120, 8, 2.0**-9, 0x7F, 0x80)
    else:
        value = _widen(number, 21, 112, 4, 2.0**-16, 0x7C, 0x80)
    return value


@triton.jit
def _divided(
    value, scale, nearest, below, rest, SRC_TYPE: tl.constexpr, DIVISION: tl.constexpr
):
    """Return a value divided by the destination's scale as fp8 tells the quotient from others; see `kernel_scales` for
    the other factors. Of the other ways, 1 and 3 multiply by one factor. If `BY_PAIR` and the source is fp8, the value
    comes with the other sign.

    An instruction that divides is a subroutine of a GPU, entered for every zero. So `BY_PAIR` multiplies by the sum of
    two numbers, `below` and `rest`: the quotient has an error of at most 1.5 * 2^-46 of it before its only rounding.
    fp8 asks whether the quotient as a float is below, above or exactly some B of at most 5 bits, so on which side of an
    M the exact one is, of 25 bits or 26: B (1 +- 2^-24), or B (1 - 2^-25) if B is a power of two. A `value` of 11 bits
    or fewer, as in bf16 and fp16, has at least 36 zeros at the end where the product of M and `scale` has its last bit.
    M's few bits allow no such product so close to a number of so many zeros, but that of scale 1 - 2^-24 and M
    1 + 2^-24: there `rest`, rounded up, has the right side.

    Longer values, fp8 numbers times scales, may be closer. The remainder, which a fused multiplication gives exactly,
    corrects their quotients to the nearest float (Markstein), as `nearest` is the nearest to the reciprocal.

    No step adds zeros of unlike signs, or infinities, but for the infinities of e5m2, which are set aside.
    """
    if DIVISION == 0:
        found = tl.math.div_rn(value, tl.broadcast_to(scale, value.shape))
    elif DIVISION % 2 == 1:
        found = value * nearest
    elif SRC_TYPE <= 2:
        found = tl.fma(value, tl.broadcast_to(below, value.shape), value * rest)
    else:
        found = tl.fma(value, tl.broadcast_to(-below, value.shape), value * -rest)
        excess = tl.fma(found, tl.broadcast_to(scale, value.shape), value)
        found = tl.fma(excess, tl.broadcast_to(-nearest, value.shape), found)
        if SRC_TYPE == 4:
            found = tl.where(tl.abs(value) < 2.0**96, found, -value)
    return found


@triton.jit
def _cast(value, TYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """Return a float32 as the bits of an element, by a GPU's instructions. Those to fp8 saturate, and have one NaN."""
    is_nan = value != value  # noqa: PLR0124 (only NaN is)
    if TYPE == 1:
        found = value.to(tl.float16).to(tl.uint16, bitcast=True)
        found = tl.where(is_nan, tl.full((), 0x7E00, tl.uint16), found)
    elif TYPE == 2:
        found = value.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        found = tl.where(is_nan, tl.full((), 0x7FC0, tl.uint16), found)
    elif TYPE == 3:
        found = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif ROUNDING == 2:
        found = tl.inline_asm_elementwise(
            _CAST_E5M2, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        found = value.to(tl.float8e5, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    return found


@triton.jit
def _number_of(
    value, TYPE: tl.constexpr, ROUNDING: tl.constexpr, SIGNED_NAN: tl.constexpr, HAS_CASTS: tl.constexpr
):
    """Return a float32 as the bits of an element. `ROUNDING` is one of `ROUNDINGS`."""
    if ROUNDING == 1:
        found = _truncated(value, TYPE)
    elif HAS_CASTS:
        found = _cast(value, TYPE, ROUNDING)
    elif TYPE == 1:
        found = _narrow(
            value, 13, 112, 0x38800000, 0.5, 0x3F000000, 0x47800000, 0x7E00, 0x8000, False
        )
    elif TYPE == 2:
        bits = value.to(tl.uint32, bitcast=True)
        found = (bits + _bits(0x7FFF) + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & _bits(0x7FFFFFFF)) > _bits(0x7F800000)
        found = tl.where(is_nan, _bits(0x7FC0), found)
    elif TYPE == 3:
        found = _narrow(
            value, 20, 120, 0x3C800000, 16384.0, 0x46800000, 0x43E00000, 0x7F, 0x80, SIGNED_NAN
        )
    else:
        largest: tl.constexpr = 0x47800000 if ROUNDING == 2 else 0x47600000
        found = _narrow(
            value, 21, 112, 0x38800000, 128.0, 0x43000000, largest, 0x7F, 0x80, SIGNED_NAN
        )
    return found


# fmt: off
@triton.jit(
    do_not_specialize=[
        *(f"{side}_{name}" for side in ("src", "dst") for name in _SIDE_NUMBERS),
        *("num_heads", "num_tokens", "lead_tokens", "num_tiles"),
        *("num_token_tiles", "num_head_tiles", "num_word_tiles"),
    ]
)
def relayout_kernel(
    src_rows, src_ids,
    src_address: tl.int64, src_part_stride: tl.int64, src_head_stride: tl.int64,
    src_token_stride: tl.int64, src_dim_stride: tl.int64,
    src_part_start: tl.int32, src_head_start: tl.int32, src_origin: tl.int32, src_block_size: tl.int32,
    src_base: tl.int32, src_run: tl.int32, src_step: tl.int32,
    dst_rows, dst_ids,
    dst_address: tl.int64, dst_part_stride: tl.int64, dst_head_stride: tl.int64,
    dst_token_stride: tl.int64, dst_dim_stride: tl.int64,
    dst_part_start: tl.int32, dst_head_start: tl.int32, dst_origin: tl.int32, dst_block_size: tl.int32,
    dst_base: tl.int32, dst_run: tl.int32, dst_step: tl.int32,
    num_heads: tl.int32, num_tokens: tl.int32, lead_tokens: tl.int32,
    num_tiles: tl.int32, num_token_tiles: tl.int32, num_head_tiles: tl.int32, num_word_tiles: tl.int32,
    scales,  # `Conversion.kernel_scales`, a row per part; None if elements are copied as they are
    WORD: tl.constexpr, WORD_BYTES: tl.constexpr, DST_WORD: tl.constexpr, DST_WORD_BYTES: tl.constexpr,
    SRC_TYPE: tl.constexpr, DST_TYPE: tl.constexpr, SRC_SCALED: tl.constexpr, DST_SCALED: tl.constexpr,
    ROUNDING: tl.constexpr, SIGNED_NAN: tl.constexpr, DIVISION: tl.constexpr, HAS_CASTS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
    ONE_WORD_TILE: tl.constexpr, ONE_HEAD_TILE: tl.constexpr, EVEN_TOKENS: tl.constexpr,
    SRC_ONE_BLOCK: tl.constexpr, SRC_AXIS: tl.constexpr, SRC_ALIGN: tl.constexpr,
    SRC_ADJACENT: tl.constexpr, SRC_STRIDES: tl.constexpr,
    DST_ONE_BLOCK: tl.constexpr, DST_AXIS: tl.constexpr, DST_ALIGN: tl.constexpr,
    DST_ADJACENT: tl.constexpr, DST_STRIDES: tl.constexpr,
):
    # fmt: on
    """Copies tiles `program_id`, `program_id + num_programs`, ...; words vary fastest, then heads, tokens, parts."""
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        rest, words, heads = tile, tl.arange(0, WORDS), tl.arange(0, HEADS)
        # divisions by what is not known take a good part of a tile's time
        if not ONE_WORD_TILE:
            words += (rest % num_word_tiles) * WORDS
            rest = rest // num_word_tiles
        if not ONE_HEAD_TILE:
            heads += (rest % num_head_tiles) * HEADS
            rest = rest // num_head_tiles
        tile_start = (rest % num_token_tiles) * TOKENS
        part = rest // num_token_tiles
        tokens = tile_start - lead_tokens + tl.arange(0, TOKENS)
        tokens_mask = (tokens >= 0) & (tokens < num_tokens)
        if EVEN_TOKENS:
            tokens_mask = tl.full((TOKENS,), 1, tl.int1)
        mask = (
            (heads < num_heads)[:, None, None]
            & tokens_mask[None, :, None]
            & (words < NUM_WORDS)[None, None, :]
        )
        # fmt: off
        src = _tile_pointers(
            src_rows, src_ids,
            src_address, src_part_stride, src_head_stride, src_token_stride, src_dim_stride,
            src_part_start + part, src_block_size, src_base, src_run, src_step, SRC_STRIDES,
            src_origin + tile_start, src_head_start + heads, tokens_mask, words,
            WORD, WORD_BYTES, HEADS, TOKENS, WORDS, SRC_ONE_BLOCK, SRC_AXIS, SRC_ALIGN, SRC_ADJACENT,
        )
        dst = _tile_pointers(
            dst_rows, dst_ids,
            dst_address, dst_part_stride, dst_head_stride, dst_token_stride, dst_dim_stride,
            dst_part_start + part, dst_block_size, dst_base, dst_run, dst_step, DST_STRIDES,
            dst_origin + tile_start, dst_head_start + heads, tokens_mask, words,
            DST_WORD, DST_WORD_BYTES, HEADS, TOKENS, WORDS, DST_ONE_BLOCK, DST_AXIS, DST_ALIGN, DST_ADJACENT,
        )
        # fmt: on
        found = tl.load(src, mask=mask)
        if scales is not None:
            # ptxas, which saves registers, would have each load wait for the conversion of what the one before it
            # loaded. It moves no load past a barrier: neither those of elements nor, back, those of the scales, without
            # which nothing can be converted.
            tl.debug_barrier()
            # a chunk has no parts of its own: it starts with part 0
            row = (src_part_start if dst_rows is None else dst_part_start) + part
            factors = scales + (row.to(tl.int64) * num_heads + heads) * 5
            is_head = heads < num_heads
            # the compiler leaves out those that are not used
            source = tl.load(factors, mask=is_head, other=1.0)[:, None, None]
            scale = tl.load(factors + 1, mask=is_head, other=1.0)[:, None, None]
            nearest = tl.load(factors + 2, mask=is_head, other=1.0)[:, None, None]
            below = tl.load(factors + 3, mask=is_head, other=1.0)[:, None, None]
            rest = tl.load(factors + 4, mask=is_head, other=1.0)[:, None, None]
            value = _value_of(found, SRC_TYPE, HAS_CASTS)
            if SRC_SCALED and DIVISION != 3:
                if DST_SCALED and ROUNDING != 1 and DIVISION == 2:
                    source = -source
                value = value * source
            if DST_SCALED:
                if ROUNDING == 1:
                    value = value * nearest
                else:
                    value = _divided(value, scale, nearest, below, rest, SRC_TYPE, DIVISION)
            found = _number_of(value, DST_TYPE, ROUNDING, SIGNED_NAN, HAS_CASTS).to(DST_WORD)
        tl.store(dst, found, mask=mask)


def relayout_triton(
    src: Side,
    dst: Side,
    *,
    conversion: Conversion | None = None,
    max_programs: int | None = None,
    **counts: Unpack[CopyCounts],
) -> None:
    """Copy between two sides with one launch on the current stream, see `relayout`. `max_programs` caps the programs.

    Sides on `cpu` run in Triton's interpreter (`TRITON_INTERPRET=1` before Triton is imported): for tests.

    Raises:
        RelayoutError: the sides do not hold the copy, see `check_copy`; `max_programs` is below 1.
    """
    geometry = check_copy(src, dst, conversion, **counts)
    if max_programs is not None and max_programs < 1:
        raise RelayoutError(f"max_programs must be at least 1, not {max_programs}")
    if geometry.nbytes == 0:
        return
    tiling = plan_tiles(src, dst, geometry, conversion)
    num_programs = geometry.num_parts * math.prod(tiling.counts(geometry))
    if max_programs is not None:
        num_programs = min(num_programs, max_programs)
    with on_device(src.device):
        relayout_kernel[(num_programs,)](
            *side_arguments(src, tiling.src, geometry),
            *side_arguments(dst, tiling.dst, geometry),
            *tiling.numbers(geometry),
            None if conversion is None else conversion.kernel_scales(),
            **kernel_constants(tiling, conversion),
            num_warps=tiling.num_warps,
        )


def side_arguments(side: Side, tiling: SideTiling, geometry: CopyGeometry) -> tuple[Any, ...]:
    """Return one side's arguments of the kernel: its table rows and block ids, and `side_numbers`."""
    if isinstance(side, PackedSide):
        return (None, None, *side_numbers(side, tiling, geometry))
    rows: Any = side.table.device_rows
    ids: Any = side.block_ids
    if rows is None:
        rows = torch.tensor(side.table.rows)
    if isinstance(ids, np.ndarray):
        ids = torch.tensor(ids)
    elif isinstance(ids, BlockIdsAt):
        raise RelayoutError("block ids at an address are for launches that are prepared")
    return (rows, ids, *side_numbers(side, tiling, geometry))


def side_numbers(side: Side, tiling: SideTiling, geometry: CopyGeometry) -> tuple[int, ...]:
    """Return one side's arguments of the kernel, from a chunk's address to its runs."""
    if isinstance(side, PackedSide):
        strides = side.strides_bytes(geometry)
        return (side.address, *strides, 0, 0, tiling.origin_tokens, 1, 0, 1, 1)
    window = (side.part_start, side.head_start, tiling.origin_tokens, side.table.block_size)
    runs = (tiling.base_tokens, side.runs.run_tokens, side.runs.step_tokens)
    return (0, 0, 0, 0, 0, *window, *runs)


def kernel_constants(tiling: Tiling, conversion: Conversion | None = None) -> dict[str, Any]:
    """Return the kernel's compile-time arguments."""
    src_bytes = dst_bytes = tiling.tile.word_bytes
    types, scaled, rounding, signed_nan = (0, 0), (False, False), 0, False
    division, has_casts = 0, False
    if conversion is not None:
        src_bytes, dst_bytes = conversion.src_item_bytes, conversion.dst_item_bytes
        elements = conversion.src_element, conversion.dst_element
        types = ELEMENT_TYPES[elements[0]], ELEMENT_TYPES[elements[1]]
        scaled = is_scaled(elements[0]), is_scaled(elements[1])
        rounding = ROUNDINGS[conversion.rounding]
        signed_nan = conversion.signed_nan
        division, has_casts = conversion.division, conversion.has_casts
    return {
        "WORD": _WORD_TYPES[src_bytes],
        "WORD_BYTES": src_bytes,
        "DST_WORD": _WORD_TYPES[dst_bytes],
        "DST_WORD_BYTES": dst_bytes,
        "SRC_TYPE": types[0],
        "DST_TYPE": types[1],
        "SRC_SCALED": scaled[0],
        "DST_SCALED": scaled[1],
        "ROUNDING": rounding,
        "SIGNED_NAN": signed_nan,
        "DIVISION": division,
        "HAS_CASTS": has_casts,
        "NUM_WORDS": tiling.tile.num_words,
        "HEADS": tiling.tile.heads,
        "TOKENS": tiling.tile.tokens,
        "WORDS": tiling.tile.words,
        "ONE_WORD_TILE": tiling.is_one_tile[0],
        "ONE_HEAD_TILE": tiling.is_one_tile[1],
        "EVEN_TOKENS": tiling.is_even,
        "SRC_ONE_BLOCK": tiling.src.is_one_block,
        "SRC_AXIS": tiling.src.contiguous_axis,
        "SRC_ALIGN": tiling.src.align_bytes,
        "SRC_ADJACENT": tiling.src.is_adjacent,
        "SRC_STRIDES": tiling.src.strides,
        "DST_ONE_BLOCK": tiling.dst.is_one_block,
        "DST_AXIS": tiling.dst.contiguous_axis,
        "DST_ALIGN": tiling.dst.align_bytes,
        "DST_ADJACENT": tiling.dst.is_adjacent,
        "DST_STRIDES": tiling.dst.strides,
    }


def on_device(device: str) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the sides' one."""
    return nullcontext() if device == "cpu" else torch.cuda.device(device)
