"""Tables in host memory: C loops, one call per group, without the GIL. See kernels/native/block_table.c."""

from __future__ import annotations

import ctypes

import torch

from kvconnector_kernels.block_table.operands import TableGeometry, TableSet
from kvconnector_kernels.library import releasing
from kvconnector_kernels.pump.records import TokenShare


def apply_writes(
    tables: TableSet, geometry: TableGeometry, records: torch.Tensor, ids: torch.Tensor
) -> None:
    """`BlockTableKernels.apply_writes`."""
    records, ids = _vector(records, torch.int32), _vector(ids, torch.int32)
    staged = records.data_ptr(), len(records), ids.data_ptr()
    ratios = (geometry.block_sizes // geometry.kernel_block_sizes).tolist()
    for group, ratio in enumerate(ratios):
        table, width, lengths = _table(tables, group)
        releasing.kvc_apply_writes(table, width, lengths, *staged, group, ratio)


def gather_rows(source: TableSet, target: TableSet, rows: torch.Tensor) -> None:
    """`BlockTableKernels.gather_rows`."""
    rows = _vector(rows, torch.int32)
    for group in range(source.num_groups):
        table, width, lengths = _table(source, group)
        releasing.kvc_gather_rows(
            *(table, width, source.num_rows, lengths),
            *(*_table(target, group), rows.data_ptr(), len(rows)),
        )


def map_slots(
    batch: TableSet,
    geometry: TableGeometry,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`BlockTableKernels.map_slots`."""
    starts, positions = _vector(query_start_loc, torch.int32), _vector(positions, torch.int64)
    tokens = starts.data_ptr(), len(starts) - 1, positions.data_ptr(), len(positions)
    sizes = zip(geometry.block_sizes.tolist(), geometry.kernel_block_sizes.tolist(), strict=True)
    for group, (block_sizes, place) in enumerate(zip(sizes, geometry.places.tolist(), strict=True)):
        table, width, lengths = _table(batch, group)
        found = _written(slots[group], torch.int64)
        share = TokenShare(*block_sizes, *place)
        releasing.kvc_map_slots(
            *(table, width, lengths, *tokens),
            *(found.data_ptr(), len(found), ctypes.byref(share)),
        )


def _vector(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an operand that is read, contiguous. Raises ValueError: it is of another type, or not in host memory."""
    if numbers.dtype != dtype or numbers.device.type != "cpu":
        raise ValueError(
            f"a block table's operand is {dtype} on cpu, not {numbers.dtype} on {numbers.device}"
        )
    return numbers.contiguous()


def _written(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an operand that is written. Raises ValueError: it is not contiguous, or see `_vector`."""
    if not numbers.is_contiguous():
        raise ValueError(
            f"a block table's operand of shape {tuple(numbers.shape)} is not contiguous"
        )
    return _vector(numbers, dtype)


def _table(tables: TableSet, group: int) -> tuple[int, int, int]:
    """Return the address and the width of a group's table, and the address of the lengths of its rows."""
    table = _written(tables.tables[group], torch.int32)
    lengths = _written(tables.lengths[group], torch.int32)
    return table.data_ptr(), table.shape[1], lengths.data_ptr()
