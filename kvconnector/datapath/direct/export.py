"""A producer worker's pools, described so that a consumer can read them."""

from __future__ import annotations

import os

from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.datapath.pools import Pools
from kvconnector.errors import TransportError
from kvconnector.wire.export import (
    MAX_ALLOCATIONS,
    MAX_ROWS_BYTES,
    MAX_TABLES,
    ExportedTable,
    IpcAllocation,
    PoolExport,
)


def export_pools(pools: Pools, board: LeaseBoard, shared_folder: str = "") -> PoolExport:
    """Describe `pools` and `board` for consumers. On the CPU this moves the pools into the memory that the board is in:
    nothing may write them meanwhile.

    Args:
        pools: The pools that consumers may read.
        board: The lease board, which says when they may.
        shared_folder: If not empty, the folder through which consumers in other containers get the memory.

    Returns:
        The description, which is valid until the board is closed.

    Raises:
        ConfigError: `shared_folder` does not exist, or this process may not write it.
        TransportError: The pools' description is too large, they cannot be shared (see `SharedMemory.share`), or CUDA
            memory has no IPC handle.
    """
    is_cuda, memory = pools.device.startswith("cuda"), board.memory
    export = PoolExport(
        pid=os.getpid(),
        fd=memory.fd,
        nonce=memory.nonce,
        num_buckets=board.num_buckets,
        device="cuda" if is_cuda else "cpu",
        tables=_tables_of(pools),
        ranges=() if is_cuda else memory.share(pools.ranges()),
        gpu_uuid=_gpu_uuid(pools.device) if is_cuda else "",
        allocations=_allocations_of(pools) if is_cuda else (),
    )
    memory.seal()
    if shared_folder:
        memory.serve(shared_folder)
    return export


def _tables_of(pools: Pools) -> tuple[ExportedTable, ...]:
    tables = []
    for (group, family), table in pools.tables.items():
        rows = table.rows.astype("<i8").tobytes()
        if len(rows) > MAX_ROWS_BYTES:
            raise TransportError(
                "a part table is too large for a greeting", group=group, rows=table.num_parts
            )
        tables.append(
            ExportedTable(
                group=group,
                family=family,
                rows=rows,
                **table.sizes,
            )
        )
    if len(tables) > MAX_TABLES:
        raise TransportError("there are too many part tables for a greeting", tables=len(tables))
    return tuple(tables)


def _allocations_of(pools: Pools) -> tuple[IpcAllocation, ...]:
    import torch

    driver = CudaDriver()
    found: list[IpcAllocation] = []
    with torch.cuda.device(pools.device):
        driver.enter(torch.device(pools.device).index)
        addresses = {int(row[0]) for table in pools.tables.values() for row in table.rows}
        for address in sorted(addresses):
            # ascending: the allocation that holds this address is the last one, or a new one
            if not found or address >= found[-1].address + found[-1].nbytes:
                found.append(driver.allocation_of(address))
    if len(found) > MAX_ALLOCATIONS:
        raise TransportError("the caches are in too many allocations", allocations=len(found))
    return tuple(found)


def _gpu_uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
