"""A producer worker's side of the direct path: what consumers are told, and which leases they find."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvconnector.datapath.direct.board import LeaseBoard, ReadyWriter
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.datapath.pools import Pools
from kvconnector.wire.export import PoolExport

logger = logging.getLogger(__name__)


class PoolShare:
    """The pools of one worker, for consumers to read. `open_writer`: see `LeaseBoard`.

    Raises:
        TransportError: the pools cannot be shared.
    """

    def __init__(
        self,
        pools: Pools,
        open_writer: Callable[[int, int], ReadyWriter] | None,
    ) -> None:
        self._board = LeaseBoard(open_writer)
        try:
            self._exporter = PoolExporter(pools, self._board)
        except BaseException:
            self._board.close()
            raise

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
        self._board.close()
