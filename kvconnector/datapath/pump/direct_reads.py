"""The consumer's direct half of the data path: reads of a producer's pools, checked against its lease board."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvconnector.config import PathsConfig
from kvconnector.datapath.device_memory import addresses_of
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.copies import Jobs
from kvconnector.datapath.pump.loop import Loop
from kvconnector.datapath.pump.pacing import NS_PER_S
from kvconnector.datapath.pump.programs import Program, Programs
from kvconnector.datapath.pump.receives import Receives
from kvconnector.errors import KVConnectorError, LeaseExpiredError, TransportError
from kvconnector.planning import Route
from kvconnector.session import events as ev
from kvconnector.session.lease import lease_key
from kvconnector.session.link import Link
from kvconnector.session.load import RankRead
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)

WAIT_FOR_LEASE_S = 20e-3
"""How long, in seconds, a direct read waits for its lease to be published, or for the producer's kernels to fill its
blocks. After that the producer is asked to send the blocks, and waits for the lease itself.
"""
MAX_READS = 16
"""The most direct reads under way at a time: copies share one thread or stream, so more reads would slow each other
down.
"""


class DirectRead(Program, eq=False, kw_only=True):
    """A `read` from the pools of its producer, which are `remote` here. It waits until `until_s` for the lease that
    `lease_key` names. Of its copy calls `num_calls` had been made when the loop was last polled.
    """

    read: RankRead
    remote: RemotePools
    lease_key: bytes
    until_s: float
    num_calls: int = 0


class DirectReads(Programs[DirectRead]):
    """All direct reads of one worker. `paths` says where pools are found, and whether the log warns if they cannot be
    read. `why_packed`: why this worker opens no pools; empty if it does. Reads that cannot be direct are left to
    `receives`.
    """

    def __init__(
        self, loop: Loop, receives: Receives, paths: PathsConfig, *, why_packed: str
    ) -> None:
        super().__init__(loop, "reads")
        self._receives = receives
        self.why_packed = why_packed
        self._paths = paths
        self._by_read: dict[RankRead, DirectRead] = {}
        self.waiting: dict[DirectRead, Jobs] = {}
        """Reads that wait for their lease or for their turn, the oldest first."""
        self._pools: dict[Link, RemotePools] = {}
        # one for each row, which the last copy of its read sets
        self._fences = loop.copies.make_fences(MAX_READS)
        self._fence_addresses = addresses_of(self._fences).tolist()

    def open(self, link: Link, export: PoolExport, routes: Sequence[Route] = ()) -> str:
        """Open a producer worker's pools for direct reads at `link`, on `routes`. Returns how they are reached, in
        words for the log.

        Raises:
            TransportError, PeerLostError: they cannot be reached.
        """
        try:
            with ExitStack() as stack:
                device, folder = self.loop.copies.pools.device, self._paths.shared_folder
                remote = RemotePools(export, device, folder)
                stack.callback(remote.close)
                self.loop.copies.prepare(remote, routes)
                stack.pop_all()
        except KVConnectorError:
            if self._paths.direct == "always":
                logger.warning("paths.direct is always, but a producer's pools cannot be read")
            raise
        self._pools[link] = remote
        link.maps_pools = True
        return remote.means or self.loop.copies.means

    def close(self, link: Link, then: Callable[[], None] = lambda: None) -> None:
        """Close the pools of a producer worker, if it has any, once no read of them is under way; then call `then`."""
        remote = self._pools.get(link)
        if remote is None:
            then()
            return
        remote.then = then
        self._close_if_unread(link, remote)

    def submit(self, read: RankRead) -> None:
        """Copy a read from the producer's pools, once its lease is published. If they are not open, or the lease is
        late, the producer sends it: see `Receives.submit`. Events follow as there, but no `ReceivePosted`; a read fails
        with `LeaseExpiredError` if its lease ended meanwhile.
        """
        loop, load = self.loop, read.load
        remote = self._pools.get(read.worker.link)
        if remote is None or remote.then is not None:
            self._receives.submit(read)
            return
        try:
            jobs = loop.copies.make_read(read, remote)
        except (RelayoutError, KVConnectorError) as error:
            # the producer knows the reason, and reports it
            logger.debug("read %s is sent: %s", read.read_id, error)
            self._receives.submit(read)
            return
        remote.num_reads += 1
        # a lease that is followed is published under its id and secret alone
        known_blocks = () if load.is_followed else read.remote_blocks
        key = lease_key(load.key.transfer_id, load.key.secret, known_blocks)
        until_s = loop.clock() + WAIT_FOR_LEASE_S
        direct = DirectRead(read=read, remote=remote, lease_key=key, until_s=until_s, jobs=jobs)
        self._by_read[read] = direct
        if len(self.active) >= MAX_READS or not self._begin_or_send(direct, jobs):
            self.waiting[direct] = jobs
        if loop.copies.on_gpu:
            loop.begin(1)  # a GPU copies meanwhile

    def __repr__(self) -> str:
        waiting = [direct.read.read_id for direct in self.waiting]
        active = [direct.read.read_id for direct in self.active.values()]
        return f"<DirectReads of {len(self._pools)} peers, active {active}, waiting {waiting}>"

    def _begin_or_send(self, direct: DirectRead, jobs: Jobs) -> bool:
        """Begin a read if its lease is published, or let it be sent if it is late. Returns False if it waits."""
        read, remote, copies = direct.read, direct.remote, self.loop.copies
        is_late = remote.then is not None or self.loop.clock() >= direct.until_s
        try:
            is_published = remote.then is None and remote.is_published(
                direct.lease_key, read.source.token_stop, read.source.layer_stop
            )
        except KVConnectorError as error:
            logger.debug("read %s is sent: %s", read.read_id, error)
            is_published, is_late = False, True
        if is_published:
            row = self._vacant[-1]
            self._fences[row] = 0
            read.is_moving = True
            self.run(
                direct,
                jobs,
                function=copies.read_function,
                context=copies.context,
                fence=self._fence_addresses[row],
            )
        elif is_late:
            self._drop(direct)
            self._receives.submit(read)
        return is_published or is_late

    def stop(self, read: RankRead) -> None:
        """See `Receives.stop`. The read may be one that the producer sends."""
        direct = self._by_read.get(read)
        if direct is None:
            self._receives.stop(read)
        elif direct in self.waiting:
            del self.waiting[direct]
            self.loop.events.stopped(read)
            self._drop(direct)
        else:
            self.set(direct, "stopped", 1)

    def poll(self) -> None:
        """Report the progress of reads, and begin waiting ones that may begin now, the oldest first."""
        for direct in list(self.active.values()):
            row = self.values(direct)
            if row["phase"] == r.OVER:
                self._end(direct, row)
                continue
            if row["num_calls"] > direct.num_calls and not row["stopped"]:
                self.loop.events.append(ev.ReceiveAdvanced(direct.read))
            direct.num_calls = row["num_calls"]
        begun: list[DirectRead] = []
        for direct, jobs in self.waiting.items():
            if len(self.active) >= MAX_READS:
                break
            if self._begin_or_send(direct, jobs):
                begun.append(direct)
        for direct in begun:
            del self.waiting[direct]

    def release(self) -> None:
        """Close all pools. No copy is under way."""
        for link, remote in self._pools.items():
            remote.close()
            link.maps_pools = False
        self._pools.clear()

    def _end(self, direct: DirectRead, row: dict[str, int]) -> None:
        """Report how a read ended. Its bytes count only if the lease is still published."""
        read, error = direct.read, None
        try:
            if row["error_kind"] != r.NO_ERROR:
                what = "the GPU does not take a read of the producer's pools"
                raise TransportError(what, status=row["error_value"])
            # without the tokens: the first look checked them, and a watermark may be in the middle of a write
            if row["all_begun"] and not direct.remote.is_published(direct.lease_key, 0, 0):
                raise LeaseExpiredError("the lease ended while its blocks were read")
        except KVConnectorError as raised:
            error = raised
        if error is not None:
            self.loop.events.failed(read, error)
        elif not row["all_begun"]:
            self.loop.events.stopped(read)
        else:
            seconds = (row["ended_ns"] - row["started_ns"]) / NS_PER_S
            self.loop.events.append(ev.ReceiveFinished(read, seconds, ev.DIRECT_PATH))
        self._drop(direct)

    def _drop(self, direct: DirectRead) -> None:
        """Forget a read that is over, or has not begun and will not."""
        self.forget(direct)
        del self._by_read[direct.read]
        remote = direct.remote
        remote.num_reads -= 1
        if remote.then is not None:
            self._close_if_unread(direct.read.worker.link, remote)

    def _close_if_unread(self, link: Link, remote: RemotePools) -> None:
        if remote.num_reads == 0 and remote.then is not None:
            del self._pools[link]
            link.maps_pools = False
            remote.close()
            remote.then()
