"""The consumer's reads over the network in the pump: programs that get a producer's blocks, between two looks at its
lease board.

UCX cannot take a get back. A read that is stopped ends when those under way have; their number is bounded, and a
producer that leaves them unanswered is given up: disconnecting from it ends them at once, for its endpoint is watched.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from kvconnector.datapath.base import Program, ReadOrigin, TransferRecord, Untold
from kvconnector.datapath.direct.remote_regions import RemoteRegions
from kvconnector.datapath.pump.getting import (
    PROBE_BYTES,
    PROBE_RUN_BYTES,
    SMALL_PROBE_BYTES,
    Get,
    Gets,
    error_of,
)
from kvconnector.datapath.pump.machine import MAX_PULLS, Machine
from kvconnector.datapath.pump.pulls import Sent
from kvconnector.datapath.report import Report
from kvconnector.errors import (
    KVConnectorError,
    PeerLostError,
    TransferTimeoutError,
    TransportError,
)
from kvconnector.planning.cost import PathCost, Probe, packed_over_network
from kvconnector.planning.paths import PathChooser
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport.ucx import UcxTransport
from kvconnector.transport.ucx.rma import reads_memory
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.pump import gets as g
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)

PATH_NAME = "rma, ucx"
RELEASE_S = 2.0
"""How long closing waits for what is under way before it disconnects from the producers."""
_PROBE_RUNS = (SMALL_PROBE_BYTES, PROBE_BYTES, PROBE_RUN_BYTES)
_PROBE_ROUNDS = 3
_NS_PER_S = 1e9


@dataclass(slots=True, eq=False)
class _Source:
    """A producer's pools. `chooser` is None while reads are being timed, or where that does not matter."""

    link: LinkId
    endpoint: int
    remote: RemoteRegions
    is_usable: bool
    chooser: PathChooser | None = None
    probes: list[Probe] = field(default_factory=list)
    num_reads: int = 0
    is_closing: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    """A pull. A probe has no program. `error`: why it was stopped, unless the session did."""

    source: _Source
    get: Get
    read_id: int = 0
    program: Program | None = None
    num_done: int = 0
    stopped_s: float | None = None
    error: KVConnectorError | None = None


class PumpGets:
    """All reads over the network of one worker. `gets` of None: there are none. `always`: they are taken where they are
    possible, else where they are expected to be faster. `emulated`: also where UCX has the producer's thread answer;
    for tests, see `reads_memory`. A producer that does not answer for `quarantine_s` after a stop is given up.
    What becomes of reads goes to `report`.
    """

    path_name: ClassVar[str] = PATH_NAME

    def __init__(
        self,
        transport: UcxTransport,
        machine: Machine,
        gets: Gets | None,
        report: Report,
        *,
        always: bool,
        emulated: bool,
        quarantine_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._machine = machine
        self._gets = gets
        self._report = report
        self._always = always
        self._emulated = emulated
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._sources: dict[LinkId, _Source] = {}
        self._queue: deque[_Read] = deque()
        self._active: dict[int, _Read] = {}
        self._sent: Untold[Sent] = Untold()

    def open(self, link: LinkId, export: PoolExport, endpoint: int | None) -> str:
        """See `DataPath.open_export`."""
        rma = self._transport.rma
        if self._gets is None or rma is None or not export.regions:
            raise TransportError("the producer's memory cannot be read over UCX")
        if endpoint is None or link in self._sources:
            raise TransportError("an export needs an endpoint, and is opened once", link=link)
        if not self._transport.is_watched(endpoint):
            raise TransportError("UCX does not watch peers on this host, and cannot end reads")
        lanes = self._transport.lanes(endpoint)
        if not (self._emulated or reads_memory(lanes, [region.key for region in export.regions])):
            raise TransportError(
                "UCX would only emulate reads of the producer's memory", lanes=lanes
            )
        handle = self._transport.endpoint_handle(endpoint)
        remote = RemoteRegions(export, rma, handle)
        source = self._sources[link] = _Source(link, endpoint, remote, is_usable=self._always)
        if self._always:
            return f"by {PATH_NAME}, over {lanes}"
        self._probe(source)
        return f"by {PATH_NAME} or packed, over {lanes}: that is being timed"

    def close(self, link: LinkId) -> None:
        """See `DataPath.close_export`. Reads that are under way end: the endpoint goes."""
        source = self._sources.pop(link, None)
        if source is not None:
            self._give_up(source, PeerLostError("the connection to the producer was closed"))
            source.is_closing = True
            self._close_unread(source)

    def has_open(self, link: LinkId) -> bool:
        """Whether reads of a producer may be made by gets."""
        return link in self._sources

    def submit(self, read_id: int, program: Program, origin: ReadOrigin) -> list[Sent]:
        """Get it from where it is, if that can be done, and may be faster; else it is to be sent."""
        source = self._sources[origin.link]
        if self._gets is None or not source.is_usable:
            return [Sent(read_id, program)]
        try:
            get = self._gets.of_read(program, origin, source.remote)
        except (RelayoutError, KVConnectorError) as error:
            # the producer knows better what is wrong, and says it
            logger.debug("read %s is sent: %s", read_id, error)
            return [Sent(read_id, program)]
        if source.chooser is not None:
            choice = source.chooser.choose(get.size)
            logger.debug("a read of %s: %s", choice.path, choice.reason)
            if choice.path == "packed":
                took = partial(source.chooser.observe, "packed", get.size)
                return [Sent(read_id, program, took)]
        self._enqueue(_Read(source, get, read_id, program))
        return []

    def stop(self, read_id: int) -> bool:
        """See `DataPath.stop_receive`; False if it is no read of this kind."""
        for read in self._queue:
            if read.program is not None and read.read_id == read_id:
                self._queue.remove(read)
                self._report.stopped(read_id)
                self._forget(read)
                return True
        for index, read in self._active.items():
            if read.program is not None and read.read_id == read_id:
                self._stop(index)
                return True
        return False

    def refresh(self) -> None:
        """Before every run: endpoints' handles may have changed, their peers may be lost or silent."""
        for read in self._active.values():
            source = read.source
            if source.is_closing:
                continue
            try:
                read.get.rows[g.ENDPOINT] = self._transport.endpoint_handle(source.endpoint)
            except KVConnectorError as error:
                self._give_up(source, error)
        now_s = self._clock()
        for read in list(self._active.values()):
            if read.stopped_s is None or now_s - read.stopped_s < self._quarantine_s:
                continue
            read.stopped_s = None
            if read.source.link in self._sources:
                silence = TransferTimeoutError("the producer leaves reads of its memory unanswered")
                self._report.events.append(ev.LinkLost(read.source.link, silence))
                self._transport.disconnect(read.source.endpoint)
                self._give_up(read.source, silence)

    def take_sent(self) -> list[Sent]:
        """Reads that are to be sent after all, for their lease is not on the producer's board."""
        return self._sent.take()

    def look(self) -> None:
        """See how far the reads came, and begin those that may begin now."""
        for index in list(self._active):
            self._tell(index)
        self._admit()

    def release(self) -> None:
        """Begin nothing more, wait for what is under way, and let go of all keys."""
        self._queue.clear()
        for source in self._sources.values():
            source.is_closing = True
        for index in self._active:
            self._stop(index)
        self._drain()
        if self._active:
            for source in self._sources.values():
                self._transport.disconnect(source.endpoint)
            self._drain()
        if self._active:
            # as nothing is known to do this, nothing is known that could be done
            logger.error("UCX keeps %s reads, and may yet write their memory", len(self._active))
            return
        for source in self._sources.values():
            source.remote.close()
        self._sources.clear()

    def _drain(self) -> None:
        deadline_s = self._clock() + RELEASE_S
        while self._active and self._clock() < deadline_s:
            self._machine.run(1e-3, wants_slots=False)
            for index in list(self._active):
                self._tell(index)

    def _probe(self, source: _Source) -> None:
        """Time the next get of a few blocks, or judge by those that were timed."""
        num_kinds = len(_PROBE_RUNS)
        turn = len(source.probes)
        assert self._gets is not None  # who opened the source otherwise?
        if turn < num_kinds * _PROBE_ROUNDS:
            run_bytes = _PROBE_RUNS[turn % num_kinds]
            nbytes = min(PROBE_BYTES, run_bytes) if turn % num_kinds == 0 else PROBE_BYTES
            self._enqueue(_Read(source, self._gets.of_probe(source.remote, nbytes, run_bytes)))
            return
        smallest, longest, scattered = (
            min(source.probes[kind::num_kinds], key=lambda probe: probe.seconds)
            for kind in range(num_kinds)
        )
        cost = PathCost.fit(smallest=smallest, longest=longest, scattered=scattered)
        source.chooser = PathChooser(cost, packed_over_network(cost))
        source.is_usable = True
        lanes = self._transport.lanes(source.endpoint)
        logger.info("reads by %s over %s: %s", PATH_NAME, lanes, source.chooser)

    def _enqueue(self, read: _Read) -> None:
        read.source.num_reads += 1
        self._queue.append(read)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._machine.pulls.num_active < MAX_PULLS:
            read = self._queue.popleft()
            assert self._gets is not None  # who queued it otherwise?
            self._active[self._machine.pulls.add(self._gets, read.get.rows.ctypes.data)] = read
        if self._active:
            self.refresh()

    def _stop(self, index: int, error: KVConnectorError | None = None) -> None:
        read = self._active[index]
        if read.stopped_s is None:
            read.stopped_s = self._clock()
        read.error = read.error or error
        self._machine.pulls.rows[index, r.STOPPED] = 1

    def _give_up(self, source: _Source, error: KVConnectorError) -> None:
        """End the reads of a producer."""
        source.is_usable = False
        for read in [read for read in self._queue if read.source is source]:
            self._queue.remove(read)
            if read.program is not None:
                self._report.failed(read.read_id, error)
            self._forget(read)
        for index, read in self._active.items():
            if read.source is source:
                self._stop(index, error)

    def _tell(self, index: int) -> None:
        read, row = self._active[index], self._machine.pulls.rows[index]
        num_done = int(read.get.rows[g.NUM_DONE])
        if num_done > read.num_done and read.program is not None and not row[r.STOPPED]:
            self._report.advanced(read.read_id)
        read.num_done = num_done
        if row[r.PHASE] != r.OVER:
            return
        status = int(row[r.ERROR_VALUE]) if row[r.ERROR_KIND] != r.NO_ERROR else r.ALL
        is_stopped = not row[r.ALL_BEGUN]
        seconds = int(row[r.ENDED_NS] - row[r.STARTED_NS]) / _NS_PER_S
        del self._active[index]
        self._machine.pulls.remove(index)
        if read.program is None:
            if not is_stopped:
                self._end_probe(read, status, seconds)
        elif read.error is not None:
            self._report.failed(read.read_id, read.error)
        elif is_stopped or (read.stopped_s is not None and status == g.NOT_PUBLISHED):
            self._report.stopped(read.read_id)
        else:
            self._end(read, read.program, status, seconds)
        self._forget(read)

    def _end_probe(self, read: _Read, status: int, seconds: float) -> None:
        source = read.source
        if status == r.ALL and not source.is_closing:
            source.probes.append(Probe(read.get.nbytes, read.get.num_runs, seconds))
            self._probe(source)
        elif status != r.ALL:
            logger.info("reads are sent: %s", error_of(status, self._transport))

    def _end(self, read: _Read, program: Program, status: int, seconds: float) -> None:
        if status == r.ALL:
            if read.source.chooser is not None:
                read.source.chooser.observe("direct", read.get.size, seconds)
            self._report.finished(
                TransferRecord(
                    read_id=read.read_id,
                    nbytes=read.get.nbytes,
                    seconds=seconds,
                    chunks=len(program.rectangles),
                    path=PATH_NAME,
                )
            )
        elif status == g.NOT_PUBLISHED:
            self._sent.append(Sent(read.read_id, program))
        else:
            self._report.failed(read.read_id, error_of(status, self._transport))

    def _forget(self, read: _Read) -> None:
        read.source.num_reads -= 1
        self._close_unread(read.source)

    def _close_unread(self, source: _Source) -> None:
        if source.is_closing and source.num_reads == 0:
            source.remote.close()
