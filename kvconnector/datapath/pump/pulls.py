"""The consumer's direct half of the pump: programs that read a producer's pools, under the eyes of its lease board."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from kvconnector.datapath.base import Program, ReadOrigin, TransferRecord
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.machine import MAX_PULLS, Machine
from kvconnector.datapath.pump.pulling import PoolReads, Pull
from kvconnector.datapath.report import Report
from kvconnector.errors import KVConnectorError, LeaseExpiredError, TransportError
from kvconnector.planning.paths import PathChooser, ReadSize
from kvconnector.session.commands import LinkId
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)

MAX_PATIENCE_S = 20e-3
"""A read that comes before its lease is published, or before the producer's kernels have filled its blocks, looks again
for so long, and for no longer than a direct read is expected to save: then its producer is asked to send it after all.
So a wait never costs a read more than it could have gained."""
_NS_PER_S = 1e9


class Sent(msgspec.Struct, frozen=True):
    """A read that the producer is to send. `took` wants to know how many seconds it took."""

    read_id: int
    program: Program
    took: Callable[[float], None] | None = None


@dataclass(slots=True, eq=False)
class _Source:
    """A producer's pools, and how many reads of them are not over."""

    remote: RemotePools
    chooser: PathChooser
    num_reads: int = 0
    is_closing: bool = False


class _Read(msgspec.Struct, eq=False):
    """What the rows do not say about a pull."""

    read_id: int
    program: Program
    origin: ReadOrigin
    source: _Source
    pull: Pull
    size: ReadSize
    """What its time depends on."""
    num_calls: int = 0

    @property
    def is_published(self) -> bool:
        """Whether its lease is on the producer's board, and its blocks are complete."""
        return self.source.remote.is_published(self.origin.lease_key, self.origin.token_stop)


class _Waiting(msgspec.Struct, eq=False):
    """A read whose lease is not published yet."""

    read: _Read
    until_s: float


class PumpPulls:
    """All direct reads of one worker. `reads` of None: it has no direct path. `always`: where one is possible it is
    taken, else where it is expected to be faster. What becomes of them goes to `report`.
    """

    def __init__(
        self,
        machine: Machine,
        reads: PoolReads | None,
        report: Report,
        *,
        device: str,
        always: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._reads = reads
        self._report = report
        self._device = device
        self._always = always
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._sources: dict[LinkId, _Source] = {}
        self._queue: deque[_Read] = deque()
        self._active: dict[int, _Read] = {}

    def open(self, link: LinkId, export: PoolExport) -> str:
        """See `DataPath.open_export`."""
        if self._reads is None:
            raise TransportError("this worker has no direct path")
        if link in self._sources:
            raise TransportError("an export was opened twice", link=link)
        remote = RemotePools(export, self._device)
        try:
            cost = self._reads.prepare(remote)
        except BaseException:
            remote.close()
            raise
        chooser = PathChooser(cost, self._reads.sending_cost(cost))
        self._sources[link] = _Source(remote, chooser)
        return f"by {self._reads.path_name}, {chooser}"

    def close(self, link: LinkId) -> None:
        """See `DataPath.close_export`."""
        source = self._sources.pop(link, None)
        if source is not None:
            source.is_closing = True
            self._close_unread(source)

    def submit(self, read_id: int, program: Program, origin: ReadOrigin) -> list[Sent]:
        """Read it from where it is, now or once its lease is published. What is to be sent, as `look_again` has it."""
        source = self._sources.get(origin.link)
        if source is None or self._reads is None:
            return [Sent(read_id, program)]
        try:
            pull = self._reads.make_pull(program, origin, source.remote)
        except (RelayoutError, KVConnectorError) as error:
            # the producer knows better what is wrong, and says it
            logger.debug("read %s is sent: %s", read_id, error)
            return [Sent(read_id, program)]
        size = ReadSize(max(1, pull.nbytes), max(1, pull.read_bytes), max(1, pull.num_runs))
        read = _Read(read_id, program, origin, source, pull, size)
        source.num_reads += 1
        patience_s = self._patience_s(read)
        if patience_s is None:
            return [self._send(read, is_chosen=True)]
        self._waiting.append(_Waiting(read, self._clock() + patience_s))
        return self.look_again()

    @property
    def is_waiting(self) -> bool:
        """Whether `look_again` is to be called soon."""
        return bool(self._waiting)

    def look_again(self) -> list[Sent]:
        """Begin the reads whose leases are published by now; those that are to be sent instead."""
        waiting, self._waiting = self._waiting, []
        given_up = []
        for one in waiting:
            try:
                is_published = not one.read.source.is_closing and one.read.is_published
            except KVConnectorError as error:
                logger.debug("read %s is sent: %s", one.read.read_id, error)
                given_up.append(self._send(one.read))
                continue
            if is_published:
                self._queue.append(one.read)
            elif one.read.source.is_closing or self._clock() >= one.until_s:
                logger.debug("read %s is sent: its lease is not published", one.read.read_id)
                given_up.append(self._send(one.read))
            else:
                self._waiting.append(one)
        self._admit()
        return given_up

    def stop(self, read_id: int) -> bool:
        """See `DataPath.stop_receive`; False if it is no direct read."""
        unbegun = [*self._queue, *(one.read for one in self._waiting)]
        for read in unbegun:
            if read.read_id == read_id:
                self._queue = deque(one for one in self._queue if one is not read)
                self._waiting = [one for one in self._waiting if one.read is not read]
                self._report.stopped(read_id)
                self._forget(read)
                return True
        for index, read in self._active.items():
            if read.read_id == read_id:
                self._machine.pulls.rows[index, r.STOPPED] = 1
                return True
        return False

    def look(self) -> None:
        """See how far the reads came, and begin those that may begin now."""
        for index in list(self._active):
            self._tell(index)
        self._admit()

    def release(self) -> None:
        """Begin nothing more, wait for copies that are under way, and let go of all pools."""
        if self._reads is not None:
            self._reads.finish()
        for source in self._sources.values():
            source.remote.close()
        self._sources.clear()

    def _patience_s(self, read: _Read) -> float | None:
        """How long to wait for the lease of a read that is better made here; None if it is better sent."""
        if self._always or not read.pull.nbytes:
            return MAX_PATIENCE_S
        choice = read.source.chooser.choose(read.size)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("a read of %s: %s", choice.path, choice.reason)
        return min(MAX_PATIENCE_S, choice.saved_s) if choice.path == "direct" else None

    def _send(self, read: _Read, *, is_chosen: bool = False) -> Sent:
        """Leave a read to its producer."""
        took = None
        if is_chosen:
            try:
                # the time that a lease is waited for says nothing about the path
                is_told = read.is_published
            except KVConnectorError:
                is_told = False
            if is_told:
                took = partial(read.source.chooser.observe, "packed", read.size)
        self._forget(read)
        return Sent(read.read_id, read.program, took)

    def _admit(self) -> None:
        while self._queue and self._machine.pulls.num_active < MAX_PULLS:
            read = self._queue.popleft()
            assert self._reads is not None  # who queued it otherwise?
            self._active[self._machine.pulls.add(self._reads, read.pull.address)] = read

    def _tell(self, index: int) -> None:
        read, row = self._active[index], self._machine.pulls.rows[index]
        num_calls = int(row[r.NUM_CALLS])
        if row[r.PHASE] != r.OVER:
            if num_calls > read.num_calls and not row[r.STOPPED]:
                self._report.advanced(read.read_id)
            read.num_calls = num_calls
            return
        if row[r.ERROR_KIND] != r.NO_ERROR:
            self._report.failed(read.read_id, self._error_of(read, int(row[r.ERROR_VALUE])))
        elif not row[r.ALL_BEGUN]:
            self._report.stopped(read.read_id)
        else:
            self._finish(read, int(row[r.ENDED_NS] - row[r.STARTED_NS]))
        del self._active[index]
        self._machine.pulls.remove(index)
        self._forget(read)

    def _finish(self, read: _Read, elapsed_ns: int) -> None:
        """All bytes are here: they count if the lease still holds."""
        try:
            is_published = read.is_published
        except KVConnectorError as error:
            self._report.failed(read.read_id, error)
            return
        if not is_published:
            late = LeaseExpiredError("the lease ended while its blocks were read")
            self._report.failed(read.read_id, late)
            return
        seconds = elapsed_ns / _NS_PER_S
        read.source.chooser.observe("direct", read.size, seconds)
        self._report.finished(
            TransferRecord(
                read_id=read.read_id,
                nbytes=read.pull.nbytes,
                seconds=seconds,
                chunks=len(read.program.rectangles),
                path=self._path_name(),
            )
        )

    def _error_of(self, read: _Read, status: int) -> KVConnectorError:
        assert self._reads is not None  # who read otherwise?
        return self._reads.error_of(status, read.source.remote)

    def _path_name(self) -> str:
        assert self._reads is not None  # who read otherwise?
        return self._reads.path_name

    def _forget(self, read: _Read) -> None:
        if self._reads is not None:
            self._reads.end_pull(read.pull)
        read.source.num_reads -= 1
        self._close_unread(read.source)

    def _close_unread(self, source: _Source) -> None:
        if source.is_closing and source.num_reads == 0:
            source.remote.close()
