"""A producer worker's pools and lease board, registered with UCX for consumers on other hosts."""

from __future__ import annotations

import logging

from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.session.export_check import spans_of
from kvconnector.transport.ucx.rma import Region, Rma
from kvconnector.wire.export import BUCKET_BYTES, MAX_REGIONS, ExportedRegion, PoolExport

logger = logging.getLogger(__name__)


class SharedRegions:
    """The memory of one export, registered for as long as this is open.

    Raises:
        TransportError: GPU memory, too many pieces of memory, or UCX cannot register it.
    """

    def __init__(self, rma: Rma, export: PoolExport) -> None:
        if export.device != "cpu":
            # UCX answers gets over lanes without one-sided reads by copying on the CPU, whatever the memory is
            raise TransportError("pools on a GPU are not shared with other hosts")
        spans = joined_spans(
            [
                (export.board_address, export.board_address + export.num_buckets * BUCKET_BYTES),
                *(span for table in export.tables for span in spans_of(table)),
            ]
        )
        if len(spans) > MAX_REGIONS:
            raise TransportError("the caches are in too many pieces of memory", pieces=len(spans))
        self._rma = rma
        self._regions: list[Region] = []
        try:
            for start, stop in spans:
                self._regions.append(rma.register(start, stop - start))
        except BaseException:
            self.close()
            raise
        self.told = tuple(
            ExportedRegion(address=region.address, nbytes=region.nbytes, key=region.key)
            for region in self._regions
        )

    def close(self) -> None:
        """Let no consumer read any more. Idempotent."""
        regions, self._regions = self._regions, []
        for region in regions:
            try:
                self._rma.unregister(region)
            except KVConnectorError as error:
                logger.warning("memory stays registered: %s", error)


def joined_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same memory in as few spans as possible, by rising address."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
