"""A producer worker's side of the direct path: what consumers are told, and which leases they find."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from kvconnector.datapath.direct.board import LeaseBoard, ReadyWriter
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.datapath.direct.regions import SharedRegions
from kvconnector.datapath.pools import Pools
from kvconnector.errors import TransportError
from kvconnector.transport.ucx.rma import Rma
from kvconnector.wire.export import PoolExport

logger = logging.getLogger(__name__)


class PoolShare:
    """The pools of one worker, for consumers to read. `open_writer`: see `LeaseBoard`. `on_host`: by those of this host
    themselves; `rma`: also by those of others.

    Raises:
        TransportError: the pools cannot be shared.
    """

    def __init__(
        self,
        pools: Pools,
        open_writer: Callable[[int, int], ReadyWriter] | None,
        *,
        on_host: bool = True,
        rma: Rma | None = None,
    ) -> None:
        self._board = LeaseBoard(open_writer)
        self._regions: SharedRegions | None = None
        try:
            self._exporter = PoolExporter(pools, self._board, on_host=on_host)
            if rma is not None:
                self._open_regions(rma, is_needed=not on_host)
        except BaseException:
            self._board.close()
            raise

    def _open_regions(self, rma: Rma, *, is_needed: bool) -> None:
        try:
            self._regions = SharedRegions(rma, self._exporter.message)
        except TransportError as error:
            if is_needed:
                raise
            logger.info("no consumer on another host can read these pools: %s", error)
            return
        self._exporter.message = msgspec.structs.replace(
            self._exporter.message, regions=self._regions.told
        )

    @property
    def export(self) -> PoolExport:
        """What consumers are told."""
        return self._exporter.message

    def publish(self, key: bytes, num_tokens: int) -> None:
        """See `DataPath.publish_lease`."""
        if not self._board.publish(key, num_tokens):
            logger.debug("a lease is not published: its bucket of the board is full")

    def retract(self, key: bytes) -> None:
        """See `DataPath.retract_lease`."""
        self._board.retract(key)

    def close(self) -> None:
        """Retract all leases. Idempotent.

        Raises:
            TransportError: see `LeaseBoard.close`.
        """
        if self._regions is not None:
            self._regions.close()
        self._board.close()
