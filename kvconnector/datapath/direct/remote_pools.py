"""A producer worker's pools, mapped for its consumer."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.direct.board import is_valid
from kvconnector.datapath.direct.export_check import rows_of
from kvconnector.datapath.direct.peer_memory import (
    MappedRange,
    check_alive,
    map_allocations,
    map_file,
    map_segments,
)
from kvconnector.datapath.lanes import Lane
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.planning import Route
from kvconnector.wire.export import BOARD_OFFSET, EPOCH_OFFSET, PoolExport
from kvconnector_kernels.relayout import PartTable, RelayoutError

logger = logging.getLogger(__name__)


class RemotePools:
    """A producer's exported pools, mapped here: part tables with the addresses that kernels on `device` read, and the
    lease board. `export` must have passed `check_export`. `shared_folder`: see `map_file`.

    Raises:
        TransportError: Another host or container, no permission, different devices, or memory that cannot be mapped.
        PeerLostError: The producer's process has ended.
    """

    def __init__(self, export: PoolExport, device: str, shared_folder: str = "") -> None:
        if export.device != device.partition(":")[0]:
            raise TransportError(
                "the producer's pools are on another kind of device",
                theirs=export.device,
                ours=device,
            )
        self.lanes: dict[Route, tuple[Lane, ...]] = {}
        """The lanes of reads from these pools, by route. `Copies` makes them."""
        self.num_reads = 0
        """Number of direct reads of these pools that are not over. Once `then` is set, no further read begins."""
        self.then: Callable[[], None] | None = None
        """Called after the pools are closed."""
        self.means = ""
        """How the pools are reached, for the log, if not in the device's usual way."""
        self._num_buckets, self._pid = export.num_buckets, export.pid
        self._opened = ExitStack()
        try:
            memory, self._statm = map_file(export, shared_folder, self._opened)
            places = [(r.address, r.nbytes, memory + r.offset - r.address) for r in export.ranges]
            if export.device == "cuda":
                places = map_allocations(export, device, self._opened)
            if export.segments:
                found, self.means = map_segments(export, device, shared_folder, self._opened)
                places += found
            self.tables = tables_of(export, device, places)
        except BaseException:
            self.close()
            raise
        self._board = memory + BOARD_OFFSET
        self._epoch, self._epoch_word = (
            export.epoch,
            ctypes.c_uint64.from_address(memory + EPOCH_OFFSET),
        )

    def is_published(self, key: bytes, token_stop: int, layer_stop: int) -> bool:
        """Returns True if blocks under a lease hold their tokens up to `token_stop` in the layers below `layer_stop`
        right now. Raises PeerLostError: the producer's process is gone, and its CUDA memory may be.
        """
        if self._statm >= 0:
            check_alive(self._statm, self._pid)
        assert self._board, "an address outside the mapping would crash this process"
        if not is_valid(self._board, self._num_buckets, key, token_stop, layer_stop):
            return False
        # the epoch is read after the lease: a lease on memory that has replaced what is mapped here is published only
        # after the epoch has changed
        return self._epoch_word.value == self._epoch

    def close(self) -> None:
        """Unmap the pools, when no copy is under way. Idempotent."""
        self._board = 0
        try:
            self._opened.close()
        except KVConnectorError as error:
            logger.warning("memory of a producer stays mapped: %s", error)


def tables_of(
    export: PoolExport, device: str, places: list[MappedRange]
) -> dict[tuple[int, int], PartTable]:
    """Return an export's part tables by group and family, with the addresses here. Raises TransportError: they make no
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
        raise TransportError(f"the producer's part tables are inconsistent: {exc}") from exc


def _to_here(rows: npt.NDArray[np.int64], places: list[MappedRange]) -> npt.NDArray[np.int64]:
    for row in rows:
        address = int(row[0])
        for there, nbytes, offset in places:
            if there <= address < there + nbytes:
                row[0] += offset
                break
        else:
            raise TransportError("an exported part is in no allocation", address=hex(address))
    return rows
