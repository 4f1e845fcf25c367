"""A producer worker's pools, told so that a consumer can read them."""

from __future__ import annotations

import ctypes
import os
import secrets

import numpy as np

from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.datapath.pools import Pools
from kvconnector.errors import TransportError
from kvconnector.wire.export import (
    MAX_ALLOCATIONS,
    MAX_ROWS_BYTES,
    MAX_TABLES,
    NONCE_BYTES,
    ExportedTable,
    IpcAllocation,
    PoolExport,
)

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class PoolExporter:
    """What consumers are told of `pools` and `board`, and the memory of the nonce. `message` is valid while this lives.

    Under Yama's `ptrace_scope` 1 only this process's ancestors could read it: making this lets every process of this
    user do so.

    Raises:
        TransportError: pools that are too large to be told, or CUDA memory that has no IPC handle.
    """

    def __init__(self, pools: Pools, board: LeaseBoard) -> None:
        self.board = board
        self._nonce = np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)
        is_cuda = pools.device.startswith("cuda")
        self.message = PoolExport(
            pid=os.getpid(),
            nonce_address=self._nonce.ctypes.data,
            nonce=self._nonce.tobytes(),
            board_address=board.address,
            num_buckets=board.num_buckets,
            device="cuda" if is_cuda else "cpu",
            tables=_tables_of(pools),
            gpu_uuid=_gpu_uuid(pools.device) if is_cuda else "",
            allocations=_allocations_of(pools) if is_cuda else (),
        )
        allow_reads()


def _tables_of(pools: Pools) -> tuple[ExportedTable, ...]:
    tables = []
    for (group, family), table in pools.tables.items():
        rows = table.rows.astype("<i8").tobytes()
        if len(rows) > MAX_ROWS_BYTES:
            raise TransportError(
                "a part table is too large to be told to peers", group=group, rows=table.num_parts
            )
        tables.append(
            ExportedTable(
                group=group,
                family=family,
                rows=rows,
                num_blocks=table.num_blocks,
                block_size=table.block_size,
                num_heads=table.num_heads,
                head_dim=table.head_dim,
                item_size_bytes=table.item_size_bytes,
            )
        )
    if len(tables) > MAX_TABLES:
        raise TransportError("there are too many part tables to be told", tables=len(tables))
    return tuple(tables)


def _allocations_of(pools: Pools) -> tuple[IpcAllocation, ...]:
    import torch

    driver = CudaDriver()
    found: list[IpcAllocation] = []
    with torch.cuda.device(pools.device):
        driver.enter(torch.device(pools.device).index)
        addresses = {int(row[0]) for table in pools.tables.values() for row in table.rows}
        for address in sorted(addresses):
            # ascending: an allocation that holds this address is the last one, or new
            if not found or address >= found[-1].address + found[-1].nbytes:
                found.append(driver.allocation_of(address))
    if len(found) > MAX_ALLOCATIONS:
        raise TransportError("the caches are in too many allocations", allocations=len(found))
    return tuple(found)


def _gpu_uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def allow_reads() -> None:
    """Let every process of this user read this one's memory, see `PoolExporter`."""
    # refused where Yama is not: then nothing is needed
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
