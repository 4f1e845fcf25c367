"""Checks a producer worker's export against the geometry in its directory, before anything is opened."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.direct.cuda_segments import areas_of
from kvconnector.errors import IncompatiblePeerError, RemoteProtocolError
from kvconnector.layout import PART_TABLE_COLUMNS
from kvconnector.topology import GroupGeometry, RankGeometry
from kvconnector.wire.export import MAX_EXPORTED_SEGMENTS, ExportedTable, PoolExport

_MAX_ADDRESS = (1 << 63) - 1


def check_export(export: PoolExport, theirs: RankGeometry) -> None:
    """Check that an export has exactly the tables of the producer's rank, all inside its memory.

    Raises:
        IncompatiblePeerError: There are too few or too many tables, or one has other counts than the geometry.
        RemoteProtocolError: a lease board of an impossible size, rows that are not whole, an address or a stride below
            zero, a part outside every range and allocation, or two of these that overlap.
    """
    if export.num_buckets & (export.num_buckets - 1):
        raise RemoteProtocolError(
            "the number of a lease board's buckets must be a power of two",
            num_buckets=export.num_buckets,
        )
    is_cuda = export.device == "cuda"
    num_segments = sum(run.count for run in export.segments)
    if is_cuda != bool(export.allocations or num_segments) or (is_cuda and export.ranges):
        raise RemoteProtocolError(
            "an export must name CUDA allocations or segments for a CUDA device, and ranges of shared memory"
            " for the CPU",
            device=export.device,
            allocations=len(export.allocations),
            segments=num_segments,
            ranges=len(export.ranges),
        )
    if num_segments > MAX_EXPORTED_SEGMENTS:
        raise RemoteProtocolError("an export has too many segments", segments=num_segments)
    tables = {(table.group, table.family): table for table in export.tables}
    expected = {
        (index, family)
        for index, group in enumerate(theirs.groups)
        if group.layers
        for family in range(len(group.families))
    }
    if set(tables) != expected or len(tables) != len(export.tables):
        raise IncompatiblePeerError(
            "an export does not have one table per cache group and part family",
            found=sorted((table.group, table.family) for table in export.tables),
            expected=sorted(expected),
        )
    places = [
        (each.address, each.address + each.nbytes)
        for several in (export.ranges, export.allocations, areas_of(export.segments))
        for each in several
    ]
    # if it were in two, a part could be checked in one and read in the other
    if any(second < stop for (_, stop), (second, _) in pairwise(sorted(places))):
        raise RemoteProtocolError("ranges of shared memory overlap", pid=export.pid)
    for table in export.tables:
        _check_counts(table, theirs.groups[table.group])
        _check_memory(table, places)


def rows_of(table: ExportedTable) -> npt.NDArray[np.int64]:
    """Return the rows of a table, `[num_parts, 5]`.

    Raises:
        RemoteProtocolError: The length is no multiple of a row's, or there is no row.
    """
    width = len(PART_TABLE_COLUMNS)
    if not table.rows or len(table.rows) % (8 * width):
        raise RemoteProtocolError(
            "the length of a part table is not a multiple of a row's",
            nbytes=len(table.rows),
            row_bytes=8 * width,
        )
    return np.frombuffer(table.rows, "<i8").reshape(-1, width).astype(np.int64)


def _check_counts(table: ExportedTable, group: GroupGeometry) -> None:
    family = group.families[table.family]
    num_rows, heads = len(group.layers) * family.num_parts, len(family.head_range)
    expected = (num_rows, group.block_size, heads, family.head_dim, family.item_size_bytes)
    sizes = (table.block_size, table.num_heads, table.head_dim, table.item_size_bytes)
    found = (len(rows_of(table)), *sizes)
    if found != expected:
        raise IncompatiblePeerError(
            "an exported part table does not have its geometry's rows, block size, heads, head dim and item size",
            group=table.group,
            family=table.family,
            expected=expected,
            found=found,
        )


def _check_memory(table: ExportedTable, places: Sequence[tuple[int, int]]) -> None:
    """Check that every element of every part is in one of the `(start, stop)` places: only these are mapped."""
    counts = (table.num_blocks, table.num_heads, table.block_size, table.head_dim)
    # Python's integers: products of a peer's values may exceed 64 bits
    for row in rows_of(table).tolist():
        address, *strides = row
        last = address + sum(s * (count - 1) for s, count in zip(strides, counts, strict=True))
        stop = last + table.item_size_bytes
        is_inside = any(first <= address and stop <= end for first, end in places)
        if address < 1 or min(strides) < 0 or stop > _MAX_ADDRESS or not is_inside:
            raise RemoteProtocolError(
                "an exported part is outside the memory that is shared",
                group=table.group,
                family=table.family,
                row=row,
                blocks=table.num_blocks,
            )
