"""A producer worker's pools, described for direct reads: a field of `HelloReply`.

Nothing here is trusted: a consumer on the same host verifies with the nonce that `pid` is the process that it greeted,
compares the tables with the geometry in the directory, and reads the lease board before and after every copy.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A virtual address of the exporting process, or a number of bytes there."""
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]

NONCE_BYTES = 16
EPOCH_OFFSET = NONCE_BYTES
"""Offset of the epoch in the file, an aligned uint64."""
BOARD_OFFSET = 4096
"""Offset of the lease board in the file, after the nonce."""
BUCKET_BYTES = 256
"""Bytes of a lease board's bucket: 8 entries of 32 bytes, see `datapath.direct.board`."""
IPC_HANDLE_BYTES = 64
MAX_ROWS_BYTES = 1 << 20
MAX_TABLES = 1 << 10
MAX_ALLOCATIONS = 1 << 12
MAX_EXPORTED_SEGMENTS = 1 << 17
"""Most segments of an export: 256 GiB in the smallest that the driver makes, of 2 MiB."""
FABRIC_HANDLE_BYTES = 64


class ExportedTable(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The part table `[group, family]`: `rows` are little-endian int64 `[num_parts, 5]`, the columns those of
    `layout.views.PART_TABLE_COLUMNS`, addresses and strides in bytes of the exporting process.
    """

    group: Annotated[int, Meta(ge=0, lt=1 << 31)]
    family: Annotated[int, Meta(ge=0, lt=1 << 31)]
    rows: Annotated[bytes, Meta(max_length=MAX_ROWS_BYTES)]
    num_blocks: Count
    block_size: Count
    num_heads: Count
    head_dim: Count
    item_size_bytes: Count


class IpcAllocation(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One allocation of CUDA memory: `handle` opens it whole, `nbytes` from `address` in the exporting process."""

    handle: Annotated[bytes, Meta(min_length=IPC_HANDLE_BYTES, max_length=IPC_HANDLE_BYTES)]
    address: Address
    nbytes: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class SegmentRun(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """CUDA memory that was mapped into the exporting process piece by piece: `count` physical segments of `nbytes` each
    follow each other from `address` on. Segments are numbered over all runs of an export, from 0. The exporting
    process's descriptor socket gives a handle of each.
    """

    address: Address
    nbytes: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    count: Annotated[int, Meta(ge=1, le=MAX_EXPORTED_SEGMENTS)]


class SharedRange(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """`nbytes` from `address` in the exporting process are at `offset` of the file that it shares."""

    address: Address
    nbytes: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    offset: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class PoolExport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The memory of one producer worker's pools, and its lease board of `num_buckets` (a power of two).

    Descriptor `fd` of process `pid` is a file in memory that it shares: first `nonce`, at `BOARD_OFFSET` the board, and
    on the CPU the pools, in `ranges`. CUDA pools are on the GPU `gpu_uuid`, in `allocations`, or in `segments`: these
    are fetched from the descriptor socket, in the shared folder or else descriptor `socket_fd` of the process. A table
    has the blocks that are in this memory, which may be fewer than the pool will have.

    The file's word at `EPOCH_OFFSET` is `epoch` for as long as this memory is the pools'. It changes before memory is
    taken away, so what a consumer has mapped is never read as the pools' once it is not. Releases that know no segments
    send 0.
    """

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, Meta(ge=0, lt=1 << 31)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    num_buckets: Annotated[int, Meta(ge=1, le=1 << 20)]
    device: Literal["cpu", "cuda"]
    tables: Annotated[tuple[ExportedTable, ...], Meta(max_length=MAX_TABLES)]
    ranges: Annotated[tuple[SharedRange, ...], Meta(max_length=MAX_ALLOCATIONS)] = ()
    gpu_uuid: Annotated[str, Meta(max_length=128)] = ""
    allocations: Annotated[tuple[IpcAllocation, ...], Meta(max_length=MAX_ALLOCATIONS)] = ()
    segments: Annotated[tuple[SegmentRun, ...], Meta(max_length=MAX_ALLOCATIONS)] = ()
    socket_fd: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
