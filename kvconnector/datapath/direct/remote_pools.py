"""A producer worker's pools as its consumer reaches them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.direct import board
from kvconnector.datapath.direct.export_check import rows_of
from kvconnector.datapath.direct.mappings import map_allocations
from kvconnector.datapath.direct.peer_memory import PeerMemory, Place
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.planning import Route
from kvconnector.wire.export import BOARD_OFFSET, PoolExport
from kvconnector_kernels.relayout import PartTable, RelayoutError

logger = logging.getLogger(__name__)


class RemotePools:
    """An export, opened: part tables with the addresses that kernels on `device` read, and the lease board. `export`
    must have passed `check_export`. `shared_folder`: see `PeerMemory`.

    Raises:
        TransportError: another host or container, no permission, other devices, or memory that cannot be mapped.
        PeerLostError: the producer's process is gone.
    """

    def __init__(self, export: PoolExport, device: str, shared_folder: str = "") -> None:
        if export.device != device.partition(":")[0]:
            raise TransportError(
                "pools of another kind of device", theirs=export.device, ours=device
            )
        self.lanes: dict[Route, Any] = {}
        """What reads of these pools have in common, by their route, for who makes them."""
        self.num_reads = 0
        """Those that are not over, for who begins them; none begins once there is a `then`."""
        self.then: Callable[[], None] | None = None
        """To be called after the pools are closed."""
        self._num_buckets = export.num_buckets
        self._is_cuda = export.device == "cuda"
        self._memory = PeerMemory(export, shared_folder)
        self._board_address = self._memory.array.ctypes.data + BOARD_OFFSET
        self._mapped = ExitStack()
        try:
            places = self._memory.places
            if self._is_cuda:
                places = map_allocations(export, device, self._mapped)
            self.tables = tables_of(export, device, places)
        except BaseException:
            self.close()
            raise

    def is_published(self, key: bytes, token_stop: int, layer_stop: int) -> bool:
        """Returns True if blocks under a lease hold their tokens up to `token_stop` in the layers below `layer_stop`
        right now. Raises PeerLostError: the producer's process is gone, and so may be its CUDA memory.
        """
        if self._is_cuda:
            self._memory.check_alive()
        assert self._board_address  # it is open: another address would end this process
        bucket = self._board_address + board.bucket_offset(key, self._num_buckets)
        return board.is_valid(bucket, key, token_stop, layer_stop)

    def close(self) -> None:
        """Unmap whatever was mapped: no copy may be under way. Idempotent."""
        self._board_address = 0
        self._memory.close()
        try:
            self._mapped.close()
        except KVConnectorError as error:
            logger.warning("memory of a producer stays mapped: %s", error)


def tables_of(
    export: PoolExport, device: str, places: list[Place]
) -> dict[tuple[int, int], PartTable]:
    """Its part tables by group and family, at the addresses that they have here. Raises TransportError: they make no
    sense, or a part is in none of the places.
    """
    try:
        return {
            (table.group, table.family): PartTable(
                _to_here(rows_of(table), places),
                num_blocks=table.num_blocks,
                block_size=table.block_size,
                num_heads=table.num_heads,
                head_dim=table.head_dim,
                item_size_bytes=table.item_size_bytes,
                device=device,
            )
            for table in export.tables
        }
    except RelayoutError as exc:
        raise TransportError(f"the producer's part tables make no sense: {exc}") from exc


def _to_here(rows: npt.NDArray[np.int64], places: list[Place]) -> npt.NDArray[np.int64]:
    for row in rows:
        address = int(row[0])
        for there, nbytes, offset in places:
            if there <= address < there + nbytes:
                row[0] += offset
                break
        else:
            raise TransportError("an exported part is in no allocation", address=hex(address))
    return rows
