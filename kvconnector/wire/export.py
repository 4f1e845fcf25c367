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
BOARD_OFFSET = 4096
"""Offset of the lease board in the file, after the nonce."""
BUCKET_BYTES = 256
"""Bytes of a lease board's bucket: 8 entries of 32 bytes, see `datapath.direct.board`."""
IPC_HANDLE_BYTES = 64
MAX_ROWS_BYTES = 1 << 20
MAX_TABLES = 1 << 10
MAX_ALLOCATIONS = 1 << 12


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


class SharedRange(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """`nbytes` from `address` in the exporting process are at `offset` of the file that it shares."""

    address: Address
    nbytes: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    offset: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class PoolExport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The memory of one producer worker's pools, and its lease board of `num_buckets` (a power of two).

    Descriptor `fd` of process `pid` is a file in memory that it shares: first `nonce`, at `BOARD_OFFSET` the board, and
    on the CPU the pools, in `ranges`. CUDA pools are in `allocations` of the GPU `gpu_uuid`.
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
