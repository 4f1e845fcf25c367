"""The consumer's direct half of the pump: programs that read a producer's pools, under the eyes of its lease board."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

from kvconnector.datapath.base import DataEvent, Program, ReadOrigin, TransferRecord
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.machine import MAX_PULLS, Machine
from kvconnector.datapath.pump.pulling import PoolReads, Pull
from kvconnector.errors import KVConnectorError, LeaseExpiredError, TransportError
from kvconnector.planning.cost import PathCost, choose
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)

_NS_PER_S = 1e9


@dataclass(slots=True, eq=False)
class _Source:
    """A producer's pools, and how many reads of them are not over."""

    remote: RemotePools
    cost: PathCost
    sending_cost: PathCost
    num_reads: int = 0
    is_closing: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    """What the rows do not say about a pull."""

    read_id: int
    program: Program
    origin: ReadOrigin
    source: _Source
    pull: Pull
    num_calls: int = 0


class PumpPulls:
    """All direct reads of one worker. `reads` of None: it has no direct path. `always`: where one is possible it is
    taken, else where it is expected to be faster.
    """

    def __init__(
        self, machine: Machine, reads: PoolReads | None, *, device: str, always: bool
    ) -> None:
        self._machine = machine
        self._reads = reads
        self._device = device
        self._always = always
        self._sources: dict[LinkId, _Source] = {}
        self._queue: deque[_Read] = deque()
        self._active: dict[int, _Read] = {}
        self._events: list[DataEvent] = []
        self._records: list[TransferRecord] = []

    def open(self, link: LinkId, export: PoolExport) -> str:
        """See `DataPath.open_export`."""
        if self._reads is None:
            raise TransportError("this worker has no direct path")
        if link in self._sources:
            raise TransportError("an export was opened twice", link=link)
        remote = RemotePools(export, self._device)
        try:
            cost = self._reads.prepare(remote)
            sending_cost = self._reads.sending_cost(cost)
            how = self._judge(cost, sending_cost)
        except BaseException:
            remote.close()
            raise
        self._sources[link] = _Source(remote, cost, sending_cost)
        return how

    def close(self, link: LinkId) -> None:
        """See `DataPath.close_export`."""
        source = self._sources.pop(link, None)
        if source is not None:
            source.is_closing = True
            self._close_unread(source)

    def submit(self, read_id: int, program: Program, origin: ReadOrigin) -> bool:
        """Read it from where it is, if it can be; False: let the producer send it."""
        source = self._sources.get(origin.link)
        if source is None or self._reads is None:
            return False
        try:
            if not source.remote.is_published(origin.lease_key, origin.token_stop):
                return False
            pull = self._reads.make_pull(program, origin, source.remote)
            if not self._is_worth_it(pull, source):
                self._reads.end_pull(pull)
                return False
        except (RelayoutError, KVConnectorError) as error:
            # the producer knows better what is wrong, and says it
            logger.debug("read %s is sent: %s", read_id, error)
            return False
        source.num_reads += 1
        self._queue.append(_Read(read_id, program, origin, source, pull))
        self._admit()
        return True

    def stop(self, read_id: int) -> bool:
        """See `DataPath.stop_receive`; False if it is no direct read."""
        for read in self._queue:
            if read.read_id == read_id:
                self._queue.remove(read)
                self._events += [ev.ReceiveStopped(read_id), ev.ReceiveDrained(read_id)]
                self._forget(read)
                return True
        for index, read in self._active.items():
            if read.read_id == read_id:
                self._machine.pulls.rows[index, r.STOPPED] = 1
                return True
        return False

    def take_events(self) -> list[DataEvent]:
        """How far the reads came."""
        for index in list(self._active):
            self._tell(index)
        self._admit()
        events, self._events = self._events, []
        return events

    def take_records(self) -> list[TransferRecord]:
        """See `DataPath.take_records`."""
        records, self._records = self._records, []
        return records

    def release(self) -> None:
        """Begin nothing more, wait for copies that are under way, and let go of all pools."""
        if self._reads is not None:
            self._reads.finish()
        for source in self._sources.values():
            source.remote.close()
        self._sources.clear()

    def _judge(self, cost: PathCost, sending: PathCost) -> str:
        """In words, what to expect of pools that can be read; `TransportError` if sending is never slower."""
        assert self._reads is not None  # who measured otherwise?
        figures = f"{cost} by {self._reads.path_name}, {sending} packed"
        if not self._always and all(
            ours >= theirs for ours, theirs in zip(cost.shares, sending.shares, strict=True)
        ):
            raise TransportError(f"reading the producer's pools would be slower: {figures}")
        return figures

    def _is_worth_it(self, pull: Pull, source: _Source) -> bool:
        if self._always or not pull.nbytes:
            return True
        per_byte_s = source.cost.per_byte_s * pull.read_bytes / pull.nbytes
        choice = choose(
            pull.nbytes,
            pull.num_runs,
            direct=replace(source.cost, per_byte_s=per_byte_s),
            packed=source.sending_cost,
        )
        logger.debug("a read of %s: %s", choice.path, choice.reason)
        return choice.path == "direct"

    def _admit(self) -> None:
        while self._queue and self._machine.pulls.num_active < MAX_PULLS:
            read = self._queue.popleft()
            self._active[self._machine.pulls.add(read.pull.address)] = read

    def _tell(self, index: int) -> None:
        read, row = self._active[index], self._machine.pulls.rows[index]
        num_calls = int(row[r.NUM_CALLS])
        if num_calls > read.num_calls and not row[r.STOPPED]:
            self._events.append(ev.ReceiveAdvanced(read.read_id))
        read.num_calls = num_calls
        if row[r.PHASE] != r.OVER:
            return
        if row[r.ERROR_KIND] != r.NO_ERROR:
            self._fail(read, self._error_of(read, int(row[r.ERROR_VALUE])))
        elif not row[r.ALL_BEGUN]:
            self._events += [ev.ReceiveStopped(read.read_id), ev.ReceiveDrained(read.read_id)]
        else:
            self._finish(read, int(row[r.ENDED_NS] - row[r.STARTED_NS]))
        del self._active[index]
        self._machine.pulls.remove(index)
        self._forget(read)

    def _finish(self, read: _Read, elapsed_ns: int) -> None:
        """All bytes are here: they count if the lease still holds."""
        origin = read.origin
        try:
            is_published = read.source.remote.is_published(origin.lease_key, origin.token_stop)
        except KVConnectorError as error:
            self._fail(read, error)
            return
        if not is_published:
            self._fail(read, LeaseExpiredError("the lease ended while its blocks were read"))
            return
        self._records.append(
            TransferRecord(
                read_id=read.read_id,
                nbytes=read.pull.nbytes,
                seconds=elapsed_ns / _NS_PER_S,
                chunks=len(read.program.chunks),
                path=self._path_name(),
            )
        )
        self._events.append(ev.ReceiveFinished(read.read_id))

    def _fail(self, read: _Read, error: KVConnectorError) -> None:
        self._events += [ev.ReceiveFailed(read.read_id, error), ev.ReceiveDrained(read.read_id)]

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
