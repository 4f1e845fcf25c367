"""The compiled copy loops for host memory. All arguments are plain int64, so there is one compiled version of each.

Everything lives in this one file because numba's on-disk cache notices changes in the file of the cached function only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# One witness value per item width: the strided loops are compiled once for each of these types.
_U8, _U16, _U32, _U64 = np.uint8(0), np.uint16(0), np.uint32(0), np.uint64(0)
_TILE_TOKENS, _TILE_DIMS = 32, 32


@intrinsic
def _copy_bytes(typingctx: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """memcpy between two addresses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_pointer = cgutils.voidptr_t
        dst_pointer = builder.inttoptr(args[0], byte_pointer)
        src_pointer = builder.inttoptr(args[1], byte_pointer)
        cgutils.raw_memcpy(builder, dst_pointer, src_pointer, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _load(typingctx: Any, address: Any, witness: Any) -> Any:
    """The item of the witness's type at an address."""

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


@njit(nogil=True, cache=True)
def _copy_strided(
    witness,
    dst,
    dst_token_stride,
    dst_dim_stride,
    src,
    src_token_stride,
    src_dim_stride,
    num_tokens,
    head_dim,
):
    """One head's `[token, dim]` matrix item by item, in tiles that stay in the first-level cache on both sides."""
    for token_tile in range(0, num_tokens, _TILE_TOKENS):
        token_end = min(token_tile + _TILE_TOKENS, num_tokens)
        for dim_tile in range(0, head_dim, _TILE_DIMS):
            dim_end = min(dim_tile + _TILE_DIMS, head_dim)
            if dst_dim_stride <= dst_token_stride:
                for token in range(token_tile, token_end):
                    to = dst + token * dst_token_stride + dim_tile * dst_dim_stride
                    at = src + token * src_token_stride + dim_tile * src_dim_stride
                    for _ in range(dim_tile, dim_end):
                        _store(to, _load(at, witness))
                        to += dst_dim_stride
                        at += src_dim_stride
            else:
                for dim in range(dim_tile, dim_end):
                    to = dst + token_tile * dst_token_stride + dim * dst_dim_stride
                    at = src + token_tile * src_token_stride + dim * src_dim_stride
                    for _ in range(token_tile, token_end):
                        _store(to, _load(at, witness))
                        to += dst_token_stride
                        at += src_token_stride


@njit(nogil=True, cache=True)
def _copy_matrix(
    dst,
    dst_token_stride,
    dst_dim_stride,
    src,
    src_token_stride,
    src_dim_stride,
    num_tokens,
    head_dim,
    item_bytes,
):
    """One head's `[token, dim]` matrix whose dim is not contiguous on both sides."""
    if src_token_stride == item_bytes and dst_token_stride == item_bytes:
        for dim in range(head_dim):
            _copy_bytes(
                dst + dim * dst_dim_stride, src + dim * src_dim_stride, num_tokens * item_bytes
            )
    elif item_bytes == 1:
        _copy_strided(
            _U8, dst, dst_token_stride, dst_dim_stride, src, src_token_stride, src_dim_stride,
            num_tokens, head_dim,
        )  # fmt: skip
    elif item_bytes == 2:
        _copy_strided(
            _U16, dst, dst_token_stride, dst_dim_stride, src, src_token_stride, src_dim_stride,
            num_tokens, head_dim,
        )  # fmt: skip
    elif item_bytes == 4:
        _copy_strided(
            _U32, dst, dst_token_stride, dst_dim_stride, src, src_token_stride, src_dim_stride,
            num_tokens, head_dim,
        )  # fmt: skip
    else:
        _copy_strided(
            _U64, dst, dst_token_stride, dst_dim_stride, src, src_token_stride, src_dim_stride,
            num_tokens, head_dim,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _copy_rows(
    dst,
    dst_head_stride,
    dst_token_stride,
    src,
    src_head_stride,
    src_token_stride,
    num_heads,
    num_tokens,
    row_bytes,
):
    """`num_heads` x `num_tokens` contiguous rows, joined along whichever axis is contiguous on both sides."""
    if src_token_stride == row_bytes and dst_token_stride == row_bytes:
        for head in range(num_heads):
            _copy_bytes(
                dst + head * dst_head_stride, src + head * src_head_stride, num_tokens * row_bytes
            )
    elif src_head_stride == row_bytes and dst_head_stride == row_bytes:
        for token in range(num_tokens):
            _copy_bytes(
                dst + token * dst_token_stride,
                src + token * src_token_stride,
                num_heads * row_bytes,
            )
    elif dst_head_stride > dst_token_stride:
        for head in range(num_heads):
            for token in range(num_tokens):
                _copy_bytes(
                    dst + head * dst_head_stride + token * dst_token_stride,
                    src + head * src_head_stride + token * src_token_stride,
                    row_bytes,
                )
    else:
        for token in range(num_tokens):
            for head in range(num_heads):
                _copy_bytes(
                    dst + head * dst_head_stride + token * dst_token_stride,
                    src + head * src_head_stride + token * src_token_stride,
                    row_bytes,
                )


@njit(nogil=True, cache=True)
def _is_dense(head_stride, token_stride, dim_stride, num_heads, num_tokens, head_dim, item_bytes):
    """The order in which `[head, token, dim]` lies without gaps: 1 HND, 2 NHD, 3 HDN, 0 if none."""
    row_bytes = head_dim * item_bytes
    if dim_stride == item_bytes or head_dim == 1:
        tokens_dense = token_stride == row_bytes or num_tokens == 1
        if tokens_dense and (head_stride == num_tokens * row_bytes or num_heads == 1):
            return 1
        heads_dense = head_stride == row_bytes or num_heads == 1
        if heads_dense and (token_stride == num_heads * row_bytes or num_tokens == 1):
            return 2
        return 0
    if (
        (token_stride == item_bytes or num_tokens == 1)
        and dim_stride == num_tokens * item_bytes
        and (head_stride == num_tokens * row_bytes or num_heads == 1)
    ):
        return 3
    return 0


@njit(nogil=True, cache=True)
def copy_span(
    dst_rows,
    dst_ids,
    dst_block_size,
    dst_head_start,
    dst_token_start,
    src_rows,
    src_ids,
    src_block_size,
    src_head_start,
    src_token_start,
    num_heads,
    num_tokens,
    head_dim,
    item_bytes,
    unit_start,
    unit_end,
):
    """Copy the units `unit_start` to `unit_end`, where unit `part * num_tokens + token` is all heads of one token.

    Each side is given by the address of its table rows (int64 `[num_parts, 5]`, the window's first part first), the
    address of its block ids (int32), and the window's starts. Nothing is checked here, and no Python object is touched.
    """
    row_bytes = head_dim * item_bytes
    witness = np.int64(0)
    narrow = np.int32(0)
    # One run that is still growing: spans that follow each other on both sides become one memcpy.
    run_dst, run_src, run_bytes = 0, 0, 0
    unit = unit_start
    while unit < unit_end:
        part = unit // num_tokens
        token = unit - part * num_tokens
        dst_row, src_row = dst_rows + part * 40, src_rows + part * 40
        dst_head, dst_token = _load(dst_row + 16, witness), _load(dst_row + 24, witness)
        src_head, src_token = _load(src_row + 16, witness), _load(src_row + 24, witness)
        dst_dim, src_dim = _load(dst_row + 32, witness), _load(src_row + 32, witness)
        dst_base = _load(dst_row, witness) + dst_head_start * dst_head
        src_base = _load(src_row, witness) + src_head_start * src_head
        part_end = min(unit_end - part * num_tokens, num_tokens)
        is_row_copy = (dst_dim == item_bytes and src_dim == item_bytes) or head_dim == 1
        while token < part_end:
            dst_at, src_at = dst_token_start + token, src_token_start + token
            dst_index, src_index = dst_at // dst_block_size, src_at // src_block_size
            dst_offset = dst_at - dst_index * dst_block_size
            src_offset = src_at - src_index * src_block_size
            count = min(
                part_end - token, dst_block_size - dst_offset, src_block_size - src_offset
            )
            dst = (
                dst_base
                + np.int64(_load(dst_ids + dst_index * 4, narrow)) * _load(dst_row + 8, witness)
                + dst_offset * dst_token
            )
            src = (
                src_base
                + np.int64(_load(src_ids + src_index * 4, narrow)) * _load(src_row + 8, witness)
                + src_offset * src_token
            )
            dense = _is_dense(
                dst_head, dst_token, dst_dim, num_heads, count, head_dim, item_bytes
            )
            if dense != 0 and dense == _is_dense(
                src_head, src_token, src_dim, num_heads, count, head_dim, item_bytes
            ):
                span_bytes = num_heads * count * row_bytes
                if dst == run_dst + run_bytes and src == run_src + run_bytes:
                    run_bytes += span_bytes
                else:
                    _copy_bytes(run_dst, run_src, run_bytes)
                    run_dst, run_src, run_bytes = dst, src, span_bytes
            elif is_row_copy:
                _copy_rows(
                    dst, dst_head, dst_token, src, src_head, src_token, num_heads, count, row_bytes
                )
            else:
                for head in range(num_heads):
                    _copy_matrix(
                        dst + head * dst_head, dst_token, dst_dim,
                        src + head * src_head, src_token, src_dim,
                        count, head_dim, item_bytes,
                    )  # fmt: skip
            token += count
        unit = part * num_tokens + part_end
    _copy_bytes(run_dst, run_src, run_bytes)
