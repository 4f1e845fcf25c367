"""A producer worker's pools as its consumer reaches them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.direct import board
from kvconnector.datapath.direct.mappings import Mappings
from kvconnector.datapath.direct.process_memory import MemoryReader, read_memory
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.session.export_check import rows_of
from kvconnector.wire.export import BUCKET_BYTES, PoolExport
from kvconnector_kernels.relayout import PartTable, RelayoutError

logger = logging.getLogger(__name__)


class RemotePools:
    """An export, opened: part tables with addresses that mean something here, and the lease board.

    On the CPU these are addresses of process `pid`; on a GPU they are mapped where kernels on `device` read them.
    `export` must have passed `check_export`.

    Raises:
        TransportError: another host or pid namespace, no permission, other devices, or memory that cannot be mapped.
        PeerLostError: the producer's process is gone.
    """

    def __init__(self, export: PoolExport, device: str) -> None:
        kind = device.partition(":")[0]
        if export.device != kind:
            raise TransportError(
                "pools of another kind of device", theirs=export.device, ours=device
            )
        self.pid = export.pid
        self._export = export
        self._check_process()
        self._buckets = MemoryReader(export.pid, BUCKET_BYTES)
        self._mappings = Mappings(export, device) if kind == "cuda" else None
        to_here = self._mappings.to_here if self._mappings is not None else _unchanged
        try:
            self.tables = tables_of(export, device, to_here)
        except BaseException:
            self.close()
            raise

    def is_published(self, key: bytes, token_stop: int, layer_stop: int) -> bool:
        """Whether blocks under a lease hold their tokens up to `token_stop` in the layers below `layer_stop` right now.
        Raises PeerLostError: the producer's process is gone. TransportError: its memory cannot be read any more.
        """
        at = self._export.board_address + board.bucket_offset(key, self._export.num_buckets)
        return board.is_valid(self._buckets.read(at), key, token_stop, layer_stop)

    def close(self) -> None:
        """Unmap whatever was mapped: no copy may be under way. Idempotent."""
        if self._mappings is not None:
            try:
                self._mappings.close()
            except KVConnectorError as error:
                logger.warning("memory of a producer stays mapped: %s", error)

    def _check_process(self) -> None:
        """That the pid names the process that we greeted: nobody else has its nonce."""
        export = self._export
        if read_memory(export.pid, export.nonce_address, len(export.nonce)) != export.nonce:
            raise TransportError("the producer's process id is another process here", pid=self.pid)


def _unchanged(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return rows


def tables_of(
    export: PoolExport,
    device: str,
    to_here: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] = _unchanged,
) -> dict[tuple[int, int], PartTable]:
    """Its part tables by group and family, at the addresses of `to_here`. Raises TransportError: they make no sense."""
    try:
        return {
            (table.group, table.family): PartTable(
                to_here(rows_of(table)),
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
