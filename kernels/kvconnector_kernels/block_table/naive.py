"""The oracle: one entry at a time, as the definitions say."""

from __future__ import annotations

import torch

from kvconnector_kernels.block_table.operands import PAD_SLOT_ID, TableGeometry, TableSet


def apply_writes(
    tables: TableSet, geometry: TableGeometry, records: torch.Tensor, ids: torch.Tensor
) -> None:
    """`BlockTableKernels.apply_writes`."""
    for group, row, start, count, offset, length in records.tolist():
        ratio = int(geometry.block_sizes[group] // geometry.kernel_block_sizes[group])
        for index in range(count):
            for step in range(ratio):
                kernel_id = int(ids[offset + index]) * ratio + step
                tables.tables[group][row, (start + index) * ratio + step] = kernel_id
        if length >= 0:
            tables.lengths[group, row] = length * ratio


def gather_rows(source: TableSet, target: TableSet, rows: torch.Tensor) -> None:
    """`BlockTableKernels.gather_rows`."""
    for group in range(source.num_groups):
        for batch_row, row in enumerate(rows.tolist()):
            length = int(source.lengths[group, row]) if 0 <= row < source.num_rows else 0
            target.tables[group][batch_row] = 0
            if length:
                target.tables[group][batch_row, :length] = source.tables[group][row, :length]
            target.lengths[group, batch_row] = length


def map_slots(
    batch: TableSet,
    geometry: TableGeometry,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`BlockTableKernels.map_slots`."""
    slots.fill_(PAD_SLOT_ID)
    bounds = query_start_loc.tolist()
    for group in range(batch.num_groups):
        for request in range(len(bounds) - 1):
            for token in range(bounds[request], min(bounds[request + 1], len(positions))):
                slots[group, token] = _slot(batch, geometry, group, request, int(positions[token]))


def _slot(batch: TableSet, geometry: TableGeometry, group: int, request: int, position: int) -> int:
    block_size = int(geometry.block_sizes[group])
    kernel_block_size = int(geometry.kernel_block_sizes[group])
    if position < 0:
        return PAD_SLOT_ID
    world_size, rank, interleave_tokens, row_tokens, is_ring = geometry.places[group].tolist()
    if is_ring:
        position %= block_size
    block, offset = divmod(position, block_size * world_size)
    turn, place = divmod(offset, interleave_tokens)
    round_of_turns, owner = divmod(turn, world_size)
    local_offset = round_of_turns * interleave_tokens + place
    column = block * (block_size // kernel_block_size) + local_offset // kernel_block_size
    if owner != rank or (position + 1) % row_tokens or column >= batch.lengths[group, request]:
        return PAD_SLOT_ID
    kernel_id = int(batch.tables[group][request, column])
    row = local_offset % kernel_block_size // row_tokens
    return kernel_id * (kernel_block_size // row_tokens) + row
