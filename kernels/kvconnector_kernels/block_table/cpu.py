"""Tables in host memory: compiled loops, one call per group, without the GIL."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from kvconnector_kernels.block_table.operands import PAD_SLOT_ID, TableGeometry, TableSet


@njit(nogil=True, cache=True)
def _apply_writes(table, lengths, records, ids, group, ratio):
    for write in range(records.shape[0]):
        if records[write, 0] != group:
            continue
        row, start, count = records[write, 1], records[write, 2], records[write, 3]
        offset, length = records[write, 4], records[write, 5]
        for index in range(count):
            for step in range(ratio):
                table[row, (start + index) * ratio + step] = ids[offset + index] * ratio + step
        if length >= 0:
            lengths[row] = length * ratio


@njit(nogil=True, cache=True)
def _gather_rows(source, source_lengths, target, target_lengths, rows):
    for batch_row in range(rows.shape[0]):
        row = rows[batch_row]
        length = source_lengths[row] if 0 <= row < source.shape[0] else 0
        for column in range(length):
            target[batch_row, column] = source[row, column]
        for column in range(length, target_lengths[batch_row]):
            target[batch_row, column] = 0
        target_lengths[batch_row] = length


@njit(nogil=True, cache=True)
def _map_slots(table, lengths, query_start_loc, positions, slots, block_sizes, place):
    """`block_sizes`: of the allocator and of kernels; `place`: a row of `TableGeometry.places`."""
    block_size, kernel_block_size = block_sizes
    world_size, rank, interleave_tokens, row_tokens, is_ring = place
    slots_per_block = kernel_block_size // row_tokens
    virtual_block = block_size * world_size
    ratio = block_size // kernel_block_size
    num_reqs = query_start_loc.shape[0] - 1
    for request in range(num_reqs):
        end = min(query_start_loc[request + 1], positions.shape[0])
        for token in range(query_start_loc[request], end):
            position = positions[token]
            if is_ring and position >= 0:
                position %= block_size
            block, offset = position // virtual_block, position % virtual_block
            turn, at = offset // interleave_tokens, offset % interleave_tokens
            local_offset = turn // world_size * interleave_tokens + at
            column = block * ratio + local_offset // kernel_block_size
            slot = PAD_SLOT_ID
            is_ours = turn % world_size == rank and (position + 1) % row_tokens == 0
            if position >= 0 and is_ours and column < lengths[request]:
                slot = table[request, column] * slots_per_block
                slot += local_offset % kernel_block_size // row_tokens
            slots[token] = slot
    for token in range(min(query_start_loc[num_reqs], positions.shape[0]), slots.shape[0]):
        slots[token] = PAD_SLOT_ID


def apply_writes(
    tables: TableSet, geometry: TableGeometry, records: torch.Tensor, ids: torch.Tensor
) -> None:
    """`BlockTableKernels.apply_writes`."""
    staged = records.numpy(), ids.numpy()
    ratios = (geometry.block_sizes // geometry.kernel_block_sizes).tolist()
    for group, ratio in enumerate(ratios):
        _apply_writes(*_arrays(tables, group), *staged, group, ratio)


def gather_rows(source: TableSet, target: TableSet, rows: torch.Tensor) -> None:
    """`BlockTableKernels.gather_rows`."""
    for group in range(source.num_groups):
        _gather_rows(*_arrays(source, group), *_arrays(target, group), rows.numpy())


def map_slots(
    batch: TableSet,
    geometry: TableGeometry,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`BlockTableKernels.map_slots`."""
    tokens = query_start_loc.numpy(), positions.numpy()
    sizes = zip(geometry.block_sizes.tolist(), geometry.kernel_block_sizes.tolist(), strict=True)
    for group, block_sizes in enumerate(sizes):
        place = tuple(geometry.places[group].tolist())
        _map_slots(*_arrays(batch, group), *tokens, slots[group].numpy(), block_sizes, place)


def _arrays(tables: TableSet, group: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return a group's table and the lengths of its rows."""
    return tables.tables[group].numpy(), tables.lengths[group].numpy()
