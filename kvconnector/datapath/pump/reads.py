"""The consumer's direct half of the data path: reads of a producer's pools, checked against its lease board."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvconnector.config import PathsConfig
from kvconnector.datapath.device_memory import addresses_of
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.pacing import NS_PER_S, WAIT_FOR_LEASE_S
from kvconnector.datapath.pump.programs import Programs
from kvconnector.errors import KVConnectorError, LeaseExpiredError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.lease import lease_key
from kvconnector.session.link import Link
from kvconnector.session.reads import RankRead
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath

logger = logging.getLogger(__name__)

MAX_READS = 16
"""Most direct reads under way at a time: copies share one thread or stream, so more would slow each other down."""


class DirectReads(Programs[RankRead]):
    """All direct reads of one worker, unless it has no direct path. `paths` says where pools are found, and if the log
    warns when they cannot be read.
    """

    def __init__(self, path: DataPath, paths: PathsConfig, *, is_enabled: bool) -> None:
        super().__init__(path, "reads")
        self._is_enabled = is_enabled
        self._paths = paths
        self.waiting: dict[RankRead, None] = {}
        """Reads that wait for their lease or for their turn, the oldest first."""
        self._open: set[Link] = set()
        # one for each row, which the last copy of its read sets
        self._fences = path.copies.make_fences(MAX_READS)
        self._fence_addresses = addresses_of(self._fences).tolist()

    def open(self, link: Link, export: PoolExport) -> str:
        """Open a producer worker's pools for direct reads at `link`. Returns the way in which they are reached, as
        words for the log.

        Raises:
            TransportError, PeerLostError: they cannot be reached.
        """
        if not self._is_enabled:
            raise TransportError("this worker has no direct path")
        try:
            with ExitStack() as stack:
                device, folder = self.path.copies.pools.device, self._paths.shared_folder
                remote = RemotePools(export, device, folder)
                stack.callback(remote.close)
                self.path.copies.prepare(remote)
                stack.pop_all()
        except KVConnectorError:
            if self._paths.direct == "always":
                logger.warning("paths.direct is always, but a producer's pools cannot be read")
            raise
        link.pools = remote
        self._open.add(link)
        return self.path.copies.means

    def close(self, link: Link, then: Callable[[], None] = lambda: None) -> None:
        """Close the pools of a producer worker, if it has any, once no read of them is under way; then call `then`."""
        if link.pools is None:
            then()
            return
        link.pools.then = then
        self._close_if_unread(link)

    def submit(self, read: RankRead) -> None:
        """Copy a read from the producer's pools, once its lease is published. If they are not open, or the lease is
        late, the producer sends it: see `Receives.submit`. Events follow as there, but no `ReceivePosted`; a read fails
        with `LeaseExpiredError` if its lease ended meanwhile.
        """
        path, load = self.path, read.load
        remote: RemotePools | None = read.worker.link.pools
        if remote is None or remote.then is not None:
            path.receives.submit(read)
            return
        try:
            read.jobs = path.copies.make_read(read, remote)
        except (RelayoutError, KVConnectorError) as error:
            # the producer knows the reason, and reports it
            logger.debug("read %s is sent: %s", read.read_id, error)
            path.receives.submit(read)
            return
        remote.num_reads += 1
        # a lease that is followed is published under its id and secret alone
        known_blocks = () if load.is_followed else read.remote_blocks
        read.lease_key = lease_key(load.key.transfer_id, load.key.secret, known_blocks)
        read.until_s = path.clock() + WAIT_FOR_LEASE_S
        if len(self.active) >= MAX_READS or not self._begin_or_send(read):
            self.waiting[read] = None
        if path.copies.on_gpu:
            path.begin(1)  # a GPU copies meanwhile

    def __repr__(self) -> str:
        waiting = [read.read_id for read in self.waiting]
        active = [read.read_id for read in self.active.values()]
        return f"<DirectReads of {len(self._open)} peers, active {active}, waiting {waiting}>"

    def _begin_or_send(self, read: RankRead) -> bool:
        """Begin a read if its lease is published, or let it be sent if it is late. Returns False if it waits."""
        remote: RemotePools = read.worker.link.pools
        is_late = remote.then is not None or self.path.clock() >= read.until_s
        try:
            is_published = remote.then is None and remote.is_published(
                read.lease_key, read.source.token_stop, read.source.layer_stop
            )
        except KVConnectorError as error:
            logger.debug("read %s is sent: %s", read.read_id, error)
            is_published, is_late = False, True
        if is_published:
            row, copies = self._vacant[-1], self.path.copies
            self._fences[row] = 0
            self.run(
                read,
                function=copies.read_function,
                context=copies.context,
                fence=self._fence_addresses[row],
            )
        elif is_late:
            self._drop(read)
            self.path.receives.submit(read)
        return is_published or is_late

    def stop(self, read: RankRead) -> None:
        """See `Receives.stop`. The read may be one that the producer sends."""
        if read in self.waiting:
            del self.waiting[read]
            self.path.events.stopped(read)
            self._drop(read)
        elif read in self:
            self.set(read, "stopped", 1)
        else:
            self.path.receives.stop(read)

    def poll(self) -> None:
        """Report the progress of reads, and begin waiting ones that may begin now, the oldest first."""
        for read in list(self.active.values()):
            row = self.values(read)
            if row["phase"] == r.OVER:
                self._end(read, row)
                self.forget(read)
                continue
            if row["num_calls"] > read.num_moved and not row["stopped"]:
                self.path.events.append(ev.ReceiveAdvanced(read))
            read.num_moved = row["num_calls"]
        begun: list[RankRead] = []
        for read in self.waiting:
            if len(self.active) >= MAX_READS:
                break
            if self._begin_or_send(read):
                begun.append(read)
        for read in begun:
            del self.waiting[read]

    def release(self) -> None:
        """Wait for copies under way, and close all pools."""
        if self._open:
            self.path.copies.finish()
        for link in self._open:
            link.pools.close()
            link.pools = None
        self._open.clear()

    def _end(self, read: RankRead, row: dict[str, int]) -> None:
        """Report how a read ended. Its bytes count only if the lease is still published."""
        link, error = read.worker.link, None
        try:
            if row["error_kind"] != r.NO_ERROR:
                what = "the GPU does not take a read of the producer's pools"
                raise TransportError(what, status=row["error_value"])
            # without the token: the first look checked it, and a watermark may be in the middle of a write
            if row["all_begun"] and not link.pools.is_published(read.lease_key, 0, 0):
                raise LeaseExpiredError("the lease ended while its blocks were read")
        except KVConnectorError as raised:
            error = raised
        if error is not None:
            self.path.events.failed(read, error)
        elif not row["all_begun"]:
            self.path.events.stopped(read)
        else:
            seconds = (row["ended_ns"] - row["started_ns"]) / NS_PER_S
            self.path.events.append(ev.ReceiveFinished(read, seconds, ev.DIRECT_PATH))
        link.pools.num_reads -= 1
        if link.pools.then is not None:
            self._close_if_unread(link)

    def _drop(self, read: RankRead) -> None:
        """Drop a read that has not begun, and will not."""
        self.forget(read)
        link = read.worker.link
        link.pools.num_reads -= 1
        if link.pools.then is not None:
            self._close_if_unread(link)

    def _close_if_unread(self, link: Link) -> None:
        remote: RemotePools = link.pools
        if remote.num_reads == 0 and remote.then is not None:
            self._open.remove(link)
            link.pools = None
            remote.close()
            remote.then()
