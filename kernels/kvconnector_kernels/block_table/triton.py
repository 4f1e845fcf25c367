"""Tables on a GPU: one launch per operation over all groups, found through the pointer table.

No operation reads anything back to the host or allocates, so a CUDA graph can hold it.
Legend: a tile is `[TILE]` consecutive entries of one row, or tokens of one request. Address
arithmetic is int64.
"""

# Triton reads the annotations of a kernel's parameters: no `from __future__ import annotations`.
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from kvconnector_kernels.block_table.operands import (
    PAD_SLOT_ID,
    WRITE_COLUMNS,
    TableGeometry,
    TableSet,
)

_TILE = 1024
# Small, because in most steps most requests have one token.
_TOKEN_TILE = 256


@triton.jit
def _table_row(pointers, widths, group, row):
    """Pointer to the first id of a row of a group's table."""
    table = tl.load(pointers + group).to(tl.pointer_type(tl.int32))
    return table + row.to(tl.int64) * tl.load(widths + group)


@triton.jit
def _apply_writes_kernel(
    pointers,  # int64 [G]
    widths,  # int64 [G]
    lengths,  # int32 [G, R]
    block_sizes,  # int64 [G]
    kernel_block_sizes,  # int64 [G]
    records,  # int32 [num_writes, COLUMNS]
    ids,  # int32
    lengths_stride,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    record = records + tl.program_id(0).to(tl.int64) * COLUMNS
    group = tl.load(record).to(tl.int64)
    row = tl.load(record + 1).to(tl.int64)
    start = tl.load(record + 2).to(tl.int64)
    count = tl.load(record + 3).to(tl.int64)
    offset = tl.load(record + 4).to(tl.int64)
    length = tl.load(record + 5).to(tl.int64)
    ratio = tl.load(block_sizes + group) // tl.load(kernel_block_sizes + group)
    target = _table_row(pointers, widths, group, row) + start * ratio
    for first in range(0, count * ratio, TILE):
        entries = first + tl.arange(0, TILE).to(tl.int64)
        mask = entries < count * ratio
        blocks = tl.load(ids + offset + entries // ratio, mask=mask, other=0)
        tl.store(target + entries, (blocks * ratio + entries % ratio).to(tl.int32), mask=mask)
    if length >= 0:
        tl.store(lengths + group * lengths_stride + row, (length * ratio).to(tl.int32))


@triton.jit
def _gather_rows_kernel(
    source_pointers,  # int64 [G]
    source_widths,  # int64 [G]
    source_lengths,  # int32 [G, num_source_rows]
    target_pointers,  # int64 [G]
    target_widths,  # int64 [G]
    target_lengths,  # int32 [G, num_target_rows]
    rows,  # int32 [num_reqs]
    num_source_rows,
    num_target_rows,
    TILE: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    batch_row = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + batch_row).to(tl.int64)
    exists = (row >= 0) & (row < num_source_rows)
    length = tl.load(source_lengths + group * num_source_rows + row, mask=exists, other=0)
    target_length = target_lengths + group * num_target_rows + batch_row
    stale_length = tl.load(target_length)
    source = _table_row(source_pointers, source_widths, group, tl.where(exists, row, 0))
    target = _table_row(target_pointers, target_widths, group, batch_row)
    end = tl.maximum(length, stale_length)
    for first in range(0, end, TILE):
        entries = first + tl.arange(0, TILE)
        ids = tl.load(source + entries, mask=entries < length, other=0)
        tl.store(target + entries, ids, mask=entries < end)
    tl.store(target_length, length)


@triton.jit(do_not_specialize=["num_positions", "num_reqs"])
def _map_slots_kernel(
    pointers,  # int64 [G]
    widths,  # int64 [G]
    lengths,  # int32 [G, num_rows]
    block_sizes,  # int64 [G]
    kernel_block_sizes,  # int64 [G]
    places,  # int64 [G, 5]
    query_start_loc,  # int32 [num_reqs + 1]
    positions,  # int64 [num_positions]
    slots,  # int64 [G, max_num_tokens]
    num_rows,
    num_reqs,
    num_positions,
    max_num_tokens,
    IS_PLAIN: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    slots += group * max_num_tokens
    begin = tl.minimum(tl.load(query_start_loc + request), num_positions)
    # The last program pads the entries after all requests' tokens.
    if request == num_reqs:
        for first in range(begin, max_num_tokens, TILE):
            tokens = first + tl.arange(0, TILE)
            tl.store(slots + tokens, tl.full([TILE], PAD, tl.int64), mask=tokens < max_num_tokens)
        return
    end = tl.minimum(tl.load(query_start_loc + request + 1), num_positions)
    block_size = tl.load(block_sizes + group).to(tl.int32)
    kernel_block_size = tl.load(kernel_block_sizes + group).to(tl.int32)
    world_size = 1
    row_tokens = 1
    if not IS_PLAIN:
        world_size = tl.load(places + group * 5).to(tl.int32)
        rank = tl.load(places + group * 5 + 1).to(tl.int32)
        interleave = tl.load(places + group * 5 + 2).to(tl.int32)
        row_tokens = tl.load(places + group * 5 + 3).to(tl.int32)
        is_ring = tl.load(places + group * 5 + 4) != 0
    row = _table_row(pointers, widths, group, request)
    length = tl.load(lengths + group * num_rows + request)
    for first in range(begin, end, TILE):
        tokens = first + tl.arange(0, TILE)
        mask = tokens < end
        position64 = tl.load(positions + tokens, mask=mask, other=0)
        # A row's tokens fit into int32, whose divisions are several times faster.
        stored = mask & (position64 >= 0) & (position64 <= 0x7FFFFFFF)
        position = position64.to(tl.int32)
        if not IS_PLAIN:
            position = tl.where(is_ring, position % block_size, position)
        offset = position % (block_size * world_size)
        if not IS_PLAIN:
            turn = offset // interleave
            offset = turn // world_size * interleave + offset % interleave
            stored = (
                stored & (turn % world_size == rank) & (position % row_tokens == row_tokens - 1)
            )
        column = position // (block_size * world_size) * (block_size // kernel_block_size)
        column += offset // kernel_block_size
        stored = stored & (column < length)
        kernel_id = tl.load(row + column, mask=stored, other=0).to(tl.int64)
        slot = kernel_id * (kernel_block_size // row_tokens)
        slot += offset % kernel_block_size // row_tokens
        tl.store(slots + tokens, tl.where(stored, slot, PAD), mask=mask)


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tables'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def apply_writes(
    tables: TableSet, geometry: TableGeometry, records: torch.Tensor, ids: torch.Tensor
) -> None:
    """`BlockTableKernels.apply_writes`, one program per write."""
    with _on(tables.lengths):
        _apply_writes_kernel[(len(records),)](
            tables.pointers,
            tables.widths,
            tables.lengths,
            geometry.block_sizes,
            geometry.kernel_block_sizes,
            records,
            ids,
            tables.num_rows,
            COLUMNS=len(WRITE_COLUMNS),
            TILE=_TILE,
        )


def gather_rows(source: TableSet, target: TableSet, rows: torch.Tensor) -> None:
    """`BlockTableKernels.gather_rows`, one program per group and row."""
    if not len(rows):
        return
    with _on(source.lengths):
        _gather_rows_kernel[(source.num_groups, len(rows))](
            source.pointers,
            source.widths,
            source.lengths,
            target.pointers,
            target.widths,
            target.lengths,
            rows,
            source.num_rows,
            target.num_rows,
            TILE=_TILE,
        )


def map_slots(
    batch: TableSet,
    geometry: TableGeometry,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`BlockTableKernels.map_slots`, one program per group and request, one more for padding."""
    num_reqs = len(query_start_loc) - 1
    with _on(slots):
        _map_slots_kernel[(batch.num_groups, num_reqs + 1)](
            batch.pointers,
            batch.widths,
            batch.lengths,
            geometry.block_sizes,
            geometry.kernel_block_sizes,
            geometry.places,
            query_start_loc,
            positions,
            slots,
            batch.num_rows,
            num_reqs,
            len(positions),
            slots.shape[1],
            IS_PLAIN=geometry.is_plain,
            PAD=PAD_SLOT_ID,
            TILE=_TOKEN_TILE,
        )
