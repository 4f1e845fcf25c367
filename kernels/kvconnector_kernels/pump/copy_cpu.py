"""Copies in host memory, as C functions for the loop: of a chunk to or from its slot, and of a read of a peer's pools.

A `CopyJob` is the same heads and tokens of some parts, from one side to the other. A side is a window into pools, or
the slot of a chunk, whose address is known when it is copied. See kernels/native/copy_cpu.c.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvconnector_kernels.library import address_of_function, releasing
from kvconnector_kernels.pump.records import CALL_BYTES, Part, SideRecord, num_words
from kvconnector_kernels.relayout.block_ids import BlockIdsAt
from kvconnector_kernels.relayout.convert import Conversion
from kvconnector_kernels.relayout.sides import ROW_COLUMNS, CopyGeometry, PackedSide, Side

__all__ = ["CALL_BYTES", "COPY", "READ", "ROW_BYTES", "copy", "help_reads", "job_of"]

ROW_BYTES = ctypes.sizeof(Part)
assert ROW_BYTES == 8 * ROW_COLUMNS  # a part table is an array of parts
_NO_SIDE = (0,) * num_words(SideRecord)

copy = releasing.kvc_copy_cpu
"""`copy(0, job, slot, flag, value)`: copy a chunk, and set a 32-bit flag. It is complete on return."""
COPY = address_of_function("kvc_copy_cpu")
"""The address of `copy`, as a state takes it."""
READ = address_of_function("kvc_read_cpu")
"""The address of the function of reads, of some pieces per call. Its context is a `Crew` or 0."""
help_reads = releasing.kvc_help
"""`help_reads(crew)`: what a helping thread does until its crew is closed."""


def job_of(
    src: Side,
    dst: Side,
    geometry: CopyGeometry,
    *,
    is_streamed: bool = False,
    conversion: Conversion | None = None,
) -> list[int]:
    """Return the words of a `CopyJob` for a copy that `check_copy` accepted, one for each field, in order. The sides
    must outlive the job; it copies a chunk to or from any slot.

    Args:
        src: The side to read.
        dst: The side to write.
        geometry: The geometry of the copy.
        is_streamed: True to write past the caches.
        conversion: How elements change type, if they do. It must outlive the job.
    """
    strides = (0, 0, 0, 0)
    for side in (src, dst):
        if isinstance(side, PackedSide):
            strides = side.strides_bytes(geometry)
    counts = (geometry.num_parts, geometry.num_heads, geometry.num_tokens)
    item = (geometry.head_dim, geometry.item_size_bytes, is_streamed)
    number, scales = 0, 0
    if conversion is not None:
        paged = dst if not isinstance(dst, PackedSide) else src
        assert not isinstance(paged, PackedSide)  # no copy is between two chunks
        number = conversion.number
        scales = conversion.scales_address + paged.part_start * conversion.row_bytes
    # a chunk's tokens are one block, number 0
    slot = (0, 0, *strides[1:])
    return [
        geometry.nbytes,
        *counts,
        *item,
        strides[0],
        number,
        scales,
        *slot,
        *_side(src),
        *_side(dst),
    ]


def _side(side: Side) -> tuple[int, ...]:
    if isinstance(side, PackedSide):
        return _NO_SIDE
    ids: Any = side.block_ids
    runs = side.runs
    return (
        side.table.rows_address + side.part_start * ROW_BYTES,
        ids.address if isinstance(ids, BlockIdsAt) else ids.__array_interface__["data"][0],
        side.table.block_size,
        side.head_start,
        side.token_start,
        runs.run_tokens,
        runs.step_tokens,
        runs.skip_tokens,
    )
