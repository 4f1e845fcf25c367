"""The compiled copy loops for host memory. All arguments are plain int64, so there is one compiled version of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvconnector_kernels.pump.native import load, operation, pointer_to
from kvconnector_kernels.pump.steps import helper

# One witness value per item width: the strided loops are compiled once for each of these types.
_U8, _U16, _U32, _U64 = np.uint8(0), np.uint16(0), np.uint32(0), np.uint64(0)
_TILE_ITEMS = 32
_ID_BYTES = 4
_LINE_BYTES = 64
# Shorter runs than this spend more on their unaligned ends than streaming saves.
_MIN_STREAMED_BYTES = 128


@operation(types.void)
def _copy_bytes(builder: Any, dst: Any, src: Any, nbytes: Any) -> None:
    """memcpy between two addresses."""
    pointers = [pointer_to(ir.IntType(8), builder, address) for address in (dst, src)]
    cgutils.raw_memcpy(builder, *pointers, nbytes, 1)


@intrinsic
def _load(typingctx: Any, address: Any, witness: Any) -> Any:
    """Return the item of the witness's type at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = context.get_value_type(signature.return_type)
        return builder.load(builder.inttoptr(args[0], item.as_pointer()), align=1)

    return witness(types.int64, witness), codegen


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write one item at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = context.get_value_type(signature.args[1])
        builder.store(args[1], builder.inttoptr(args[0], item.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@operation(types.void)
def _stream_line(builder: Any, dst: Any, src: Any) -> None:
    """Copy 64 bytes to an address that is a multiple of 64, past the caches."""
    line = ir.VectorType(ir.IntType(64), 8)
    value = builder.load(pointer_to(line, builder, src), align=1)
    stored = builder.store(value, pointer_to(line, builder, dst), align=_LINE_BYTES)
    one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    stored.set_metadata("nontemporal", one)


@helper
def _copy_run(dst, src, nbytes, is_streamed):
    """Copy one contiguous run. Streaming saves reading the destination's lines first: a third of the memory traffic."""
    if not is_streamed or nbytes < _MIN_STREAMED_BYTES:
        _copy_bytes(dst, src, nbytes)
        return
    lead = -dst % _LINE_BYTES
    if lead:
        _copy_bytes(dst, src, lead)
    end = lead + (nbytes - lead) // _LINE_BYTES * _LINE_BYTES
    for at in range(lead, end, _LINE_BYTES):
        _stream_line(dst + at, src + at)
    if end < nbytes:
        _copy_bytes(dst + end, src + end, nbytes - end)


@helper
def _copy_strided(witness, dst, dst_strides, src, src_strides, counts):
    """Copy an `[outer, inner]` matrix item by item, in tiles that stay in the first-level cache on both sides."""
    for outer_tile in range(0, counts[0], _TILE_ITEMS):
        outer_end = min(outer_tile + _TILE_ITEMS, counts[0])
        for inner_tile in range(0, counts[1], _TILE_ITEMS):
            inner_end = min(inner_tile + _TILE_ITEMS, counts[1])
            for outer in range(outer_tile, outer_end):
                to = dst + outer * dst_strides[0] + inner_tile * dst_strides[1]
                at = src + outer * src_strides[0] + inner_tile * src_strides[1]
                for _ in range(inner_tile, inner_end):
                    _store(to, _load(at, witness))
                    to += dst_strides[1]
                    at += src_strides[1]


@helper
def _copy_matrix(dst, dst_strides, src, src_strides, counts, item_bytes, is_streamed):
    """Copy one head's `[token, dim]` matrix whose dim is not contiguous on both sides."""
    if dst_strides[0] < dst_strides[1]:
        # The inner loop follows the destination's finer axis, so that writes are in order.
        dst_strides, src_strides = dst_strides[::-1], src_strides[::-1]
        counts = counts[::-1]
    if dst_strides[1] == item_bytes and src_strides[1] == item_bytes:
        for outer in range(counts[0]):
            to, at = dst + outer * dst_strides[0], src + outer * src_strides[0]
            _copy_run(to, at, counts[1] * item_bytes, is_streamed)
    elif item_bytes == 1:
        _copy_strided(_U8, dst, dst_strides, src, src_strides, counts)
    elif item_bytes == 2:
        _copy_strided(_U16, dst, dst_strides, src, src_strides, counts)
    elif item_bytes == 4:
        _copy_strided(_U32, dst, dst_strides, src, src_strides, counts)
    else:
        _copy_strided(_U64, dst, dst_strides, src, src_strides, counts)


@helper
def _copy_rows(dst, dst_strides, src, src_strides, counts, row_bytes, is_streamed):
    """Copy a `[head, token]` matrix of contiguous rows, joined along an axis that is contiguous on both sides."""
    if dst_strides[0] < dst_strides[1]:
        # As in `_copy_matrix`: writes in order. The inner axis is now the heads.
        dst_strides, src_strides = dst_strides[::-1], src_strides[::-1]
        counts = counts[::-1]
    is_joined = dst_strides[1] == row_bytes and src_strides[1] == row_bytes
    for outer in range(counts[0]):
        to, at = dst + outer * dst_strides[0], src + outer * src_strides[0]
        if is_joined:
            _copy_run(to, at, counts[1] * row_bytes, is_streamed)
        else:
            for _ in range(counts[1]):
                _copy_run(to, at, row_bytes, is_streamed)
                to += dst_strides[1]
                at += src_strides[1]


@helper
def _dense_order(strides, num_heads, num_tokens, head_dim, item_bytes):
    """Return the order in which `[head, token, dim]` lies without gaps: 1 HND, 2 NHD, 3 HDN, 0 if none."""
    head, token, dim = strides
    row_bytes = head_dim * item_bytes
    is_head_outermost = head == num_tokens * row_bytes or num_heads == 1
    if dim == item_bytes or head_dim == 1:
        if is_head_outermost and (token == row_bytes or num_tokens == 1):
            return 1
        is_token_outermost = token == num_heads * row_bytes or num_tokens == 1
        if is_token_outermost and (head == row_bytes or num_heads == 1):
            return 2
    elif is_head_outermost and token == item_bytes and dim == num_tokens * item_bytes:
        return 3
    return 0


@helper
def next_box(base, block_stride, token_stride, window, token):
    """Return a token's address, how many tokens from it on are evenly spaced in its block, and their stride."""
    ids, block_size, _, token_start, run, step, skip = window
    turn = (skip + token) // run
    place = skip + token - turn * run
    position = token_start + turn * step + place
    index = position // block_size
    offset = position - index * block_size
    block = np.int64(_load(ids + index * _ID_BYTES, np.int32(0)))
    address = base + block * block_stride + offset * token_stride
    if run == 1:
        return address, (block_size - offset + step - 1) // step, step * token_stride
    return address, min(block_size - offset, run - place), token_stride


@helper
def _copy_box(dst, dst_strides, src, src_strides, num_heads, num_tokens, item, is_streamed):
    """`[head, token, dim]` within one block on each side; `item` is (head dim, bytes)."""
    is_dim_joined = dst_strides[2] == item[1] and src_strides[2] == item[1]
    if is_dim_joined or item[0] == 1:
        _copy_rows(
            dst,
            dst_strides[:2],
            src,
            src_strides[:2],
            (num_heads, num_tokens),
            item[0] * item[1],
            is_streamed,
        )
        return
    for head in range(num_heads):
        _copy_matrix(
            dst + head * dst_strides[0],
            dst_strides[1:],
            src + head * src_strides[0],
            src_strides[1:],
            (num_tokens, item[0]),
            item[1],
            is_streamed,
        )


@helper
def copy_part(dst_row, dst_window, src_row, src_window, num_heads, span, item, is_streamed):
    """Copy the tokens `span[0]` to `span[1]` of one part, all heads. Checks nothing. `end_stream` follows if streamed.

    A row is the address of a side's part table row (5 int64). A window is (address of the int32 block ids, block size,
    first head, first token, tokens of a run, tokens from one run's start to the next, tokens skipped at first), see
    `TokenRuns`; `item` is (head dim, item bytes).
    """
    dst_block, src_block = load(dst_row + 8), load(src_row + 8)
    dst_strides = (load(dst_row + 16), load(dst_row + 24), load(dst_row + 32))
    src_strides = (load(src_row + 16), load(src_row + 24), load(src_row + 32))
    dst_base = load(dst_row) + dst_window[2] * dst_strides[0]
    src_base = load(src_row) + src_window[2] * src_strides[0]
    # One run that still grows: boxes that follow each other on both sides become one copy.
    zero = np.int64(0)
    run_dst, run_src, run_bytes = zero, zero, zero
    token = span[0]
    while token < span[1]:
        dst, dst_left, dst_step = next_box(dst_base, dst_block, dst_strides[1], dst_window, token)
        src, src_left, src_step = next_box(src_base, src_block, src_strides[1], src_window, token)
        count = min(span[1] - token, dst_left, src_left)
        dst_box = (dst_strides[0], dst_step, dst_strides[2])
        src_box = (src_strides[0], src_step, src_strides[2])
        dense = _dense_order(dst_box, num_heads, count, item[0], item[1])
        if dense and dense == _dense_order(src_box, num_heads, count, item[0], item[1]):
            if dst != run_dst + run_bytes or src != run_src + run_bytes:
                _copy_run(run_dst, run_src, run_bytes, is_streamed)
                run_dst, run_src, run_bytes = dst, src, zero
            run_bytes += num_heads * count * item[0] * item[1]
        else:
            _copy_box(dst, dst_box, src, src_box, num_heads, count, item, is_streamed)
        token += count
    _copy_run(run_dst, run_src, run_bytes, is_streamed)
