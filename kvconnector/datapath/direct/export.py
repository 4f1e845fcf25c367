"""A producer worker's pools, described so that a consumer can read them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial

from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.datapath.direct.cuda_segments import (
    Mapping,
    check_num_segments,
    num_blocks_inside,
    runs_of,
    segments_of,
)
from kvconnector.datapath.direct.descriptor_socket import Segments, close_handles
from kvconnector.datapath.direct.shared_memory import joined
from kvconnector.datapath.pools import Pools
from kvconnector.errors import TransportError
from kvconnector.wire.export import (
    MAX_ALLOCATIONS,
    MAX_EXPORTED_SEGMENTS,
    MAX_ROWS_BYTES,
    MAX_TABLES,
    ExportedTable,
    IpcAllocation,
    PoolExport,
)
from kvconnector_kernels.relayout import PartTable

logger = logging.getLogger(__name__)


def export_pools(pools: Pools, board: LeaseBoard, shared_folder: str = "") -> PoolExport:
    """Describe `pools` and `board` for consumers. On the CPU this moves the pools into the memory that the board is in:
    nothing may write them meanwhile. Pools on a GPU may be exported again, once their memory was replaced or has grown.

    Args:
        pools: The pools that consumers may read.
        board: The lease board, which says when they may.
        shared_folder: If not empty, the folder through which consumers in other containers get the memory.

    Returns:
        The description, which is valid until the board is closed or its memory withdrawn.

    Raises:
        ConfigError: `shared_folder` does not exist, or this process may not write it.
        TransportError: The pools' description is too large, they cannot be shared (see `SharedMemory.share`), or CUDA
            memory has neither an IPC handle nor one by which its segments can be shared.
    """
    is_cuda, memory = pools.device.startswith("cuda"), board.memory
    allocations, segments = _cuda_memory_of(pools) if is_cuda else ([], [])
    ranges = () if is_cuda else memory.share(pools.ranges())
    tables = _tables_of(pools, allocations, segments)
    memory.seal()
    if shared_folder or segments:
        memory.serve(shared_folder, _exporter_of(pools.device, segments))
    return PoolExport(
        pid=os.getpid(),
        fd=memory.fd,
        nonce=memory.nonce,
        num_buckets=board.num_buckets,
        device="cuda" if is_cuda else "cpu",
        tables=tables,
        ranges=ranges,
        gpu_uuid=_gpu_uuid(pools.device) if is_cuda else "",
        allocations=tuple(allocations),
        segments=runs_of(segments),
        socket_fd=memory.socket_fd,
        epoch=memory.epoch,
    )


def _tables_of(
    pools: Pools, allocations: Sequence[IpcAllocation], segments: Sequence[Mapping]
) -> tuple[ExportedTable, ...]:
    shared: tuple[IpcAllocation | Mapping, ...] = (*allocations, *segments)
    places = joined([(each.address, each.address + each.nbytes) for each in shared])
    tables = []
    for (group, family), table in pools.tables.items():
        rows = table.rows.astype("<i8").tobytes()
        if len(rows) > MAX_ROWS_BYTES:
            raise TransportError(
                "a part table is too large for a greeting", group=group, rows=table.num_parts
            )
        sizes = dict(table.sizes)
        if segments:
            sizes["num_blocks"] = _num_blocks_in(table, places)
        if not sizes["num_blocks"]:
            raise TransportError("a part of the caches has no memory yet", group=group)
        tables.append(ExportedTable(group=group, family=family, rows=rows, **sizes))
    if len(tables) > MAX_TABLES:
        raise TransportError("there are too many part tables for a greeting", tables=len(tables))
    return tuple(tables)


def _num_blocks_in(table: PartTable, places: Sequence[tuple[int, int]]) -> int:
    """Return how many blocks have memory in all parts of a table: pools that grow have none at their end."""
    counts = (
        table.num_blocks,
        table.num_heads,
        table.block_size,
        table.head_dim,
        table.item_size_bytes,
    )
    return min(num_blocks_inside(row, counts, places) for row in table.rows.tolist())


def _cuda_memory_of(pools: Pools) -> tuple[list[IpcAllocation], list[Mapping]]:
    """See `memory_of`."""
    import torch

    driver = CudaDriver()
    with torch.cuda.device(pools.device):
        driver.enter(torch.device(pools.device).index)
        allocations, segments = memory_of(driver, pools.ranges())
    if (
        len(allocations) + len(runs_of(segments)) > MAX_ALLOCATIONS
        or len(segments) > MAX_EXPORTED_SEGMENTS
    ):
        raise TransportError(
            "the caches are in too many allocations",
            allocations=len(allocations),
            segments=len(segments),
        )
    return allocations, segments


def memory_of(
    driver: CudaDriver, ranges: Iterable[tuple[int, int]]
) -> tuple[list[IpcAllocation], list[Mapping]]:
    """Return the allocations that hold CUDA memory, and the segments that hold what is in none, both ascending.

    Raises:
        TransportError: some of it has no handle by which it can be shared, or it is in too many segments.
    """
    allocations: list[IpcAllocation] = []
    others: list[tuple[int, int]] = []
    reason = None
    for start, stop in sorted(ranges):
        # ascending: the allocation that holds this address is the last one, or a new one
        if allocations and start < allocations[-1].address + allocations[-1].nbytes:
            continue
        try:
            allocations.append(driver.allocation_of(start))
        except TransportError as error:
            others.append((start, stop))
            reason = error
    segments = segments_of(others, driver.segment_at)
    check_num_segments(len(segments))
    if reason is not None and not segments:
        raise reason
    kinds = driver.check_shareable(segments)
    if segments:
        logger.info(
            "%s segments of GPU memory are shared by %s", len(segments), " and ".join(kinds)
        )
    return allocations, segments


def _exporter_of(device: str, segments: Sequence[Mapping]) -> Segments | None:
    """Return what gives handles of segments to the descriptor socket's thread; None if there are none."""
    if not segments:
        return None
    index = int(device.partition(":")[2] or 0)
    return partial(export_segments, CudaDriver(), index, tuple(segments))


def export_segments(
    driver: CudaDriver, device_index: int, segments: Sequence[Mapping], which: range
) -> list[int | bytes]:
    """Return handles of some segments, by their numbers. The caller closes those that are descriptors.

    Raises:
        TransportError: the memory has fewer segments than the request names, or one is not mapped any more.
    """
    if which.stop > len(segments):
        raise TransportError(
            "the memory has fewer segments than the request names",
            segments=len(segments),
            asked=which.stop,
        )
    driver.enter(device_index)
    handles: list[int | bytes] = []
    with ExitStack() as undone:
        undone.callback(close_handles, handles)
        for index in which:
            handles.append(driver.export_segment(segments[index].address))  # noqa: PERF401 - one may fail
        undone.pop_all()
    return handles


def _gpu_uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
