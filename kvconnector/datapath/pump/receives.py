"""The consumer's half of the pump: the programs that receive, and the queue of those that wait for slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvconnector.datapath.admission import (
    WARM_UP_BYTES,
    AdmissionQueue,
    Waiting,
    WarmUps,
)
from kvconnector.datapath.base import Program, TransferRecord, as_ours
from kvconnector.datapath.pump.copying import Jobs, unread_jobs
from kvconnector.datapath.pump.failures import error_of
from kvconnector.datapath.pump.machine import Machine
from kvconnector.datapath.report import Report
from kvconnector.errors import KVConnectorError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Completion
from kvconnector.transport.ucx import UcxTransport
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

PATH_NAME = "packed, pumped"
_NS_PER_S = 1e9


@dataclass(slots=True, eq=False)
class _Promise:
    """A receive whose producer may send into `num_slots` slots by now, but of which the machine knows nothing yet.
    `limit` is the number of chunks that the producer sends.
    """

    asked: Waiting[Program]
    num_slots: int
    limit: int
    is_stopped: bool = False


@dataclass(slots=True, eq=False)
class _Receive:
    """What the rows do not say about a receive. `error`: why its copies could not be made. `cancelled_s`: when UCX was
    first asked to end what it awaits for it.
    """

    asked: Waiting[Program]
    jobs: Jobs
    error: KVConnectorError | None
    unpacked: int = 0
    told: bool = False
    cancelled_s: float | None = None


class PumpReceives:
    """All receives of one worker, see `Receiver`: the same contract, but the chunks move in the machine.

    A receive begins in two phases, since all that its producer is told of are slots and tags: `admit` promises these,
    and `begin` makes its copies while the producer is on it already. What comes before its receive is posted waits in
    UCX, mostly as no more than a header.

    A cancelled operation that UCX does not end within `quarantine_s` loses its slot: UCX keeps the memory for as long
    as it may write there, and other memory takes its place.
    """

    def __init__(
        self,
        transport: UcxTransport,
        machine: Machine,
        report: Report,
        *,
        window: int,
        quarantine_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._machine = machine
        self._slots = machine.recv_slots
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._records, self._events = report.records, report.events
        self._warm_ups = WarmUps(transport, self._events)
        self._queue: AdmissionQueue[Program] = AdmissionQueue(window=window, events=self._events)
        self._promises: dict[int, _Promise] = {}
        self._receives: dict[int, _Receive] = {}
        self._rows: dict[int, int] = {}

    def expect_warm_up(self, link: LinkId) -> tuple[int, int]:
        """See `DataPath.expect_warm_up`."""
        return self._warm_ups.expect(link, self._slots.pool.scratch(WARM_UP_BYTES))

    def forget_warm_up(self, link: LinkId) -> None:
        """See `DataPath.forget_warm_up`."""
        self._warm_ups.forget(link)

    def is_warming_up(self) -> bool:
        """Whether a warm-up message is awaited."""
        return self._warm_ups.is_awaited

    def submit(self, read_id: int, program: Program) -> None:
        """See `DataPath.submit_receive`."""
        self._queue.submit(read_id, program, len(program.chunks))

    def stop(self, read_id: int) -> None:
        """See `DataPath.stop_receive`."""
        row, promise = self._rows.get(read_id), self._promises.get(read_id)
        if row is not None:
            self._machine.receives.rows[row, r.STOPPED] = 1
        elif promise is not None:
            promise.is_stopped = True
        else:
            self._queue.stop(read_id)

    def drain(self, read_id: int, sent_chunks: int | None) -> None:
        """See `DataPath.drain_receive`."""
        index, promise = self._rows.get(read_id), self._promises.get(read_id)
        if promise is not None:
            promise.limit = min(promise.limit, sent_chunks or 0)
        if index is None:
            return
        row = self._machine.receives.rows[index]
        row[r.LIMIT] = min(int(row[r.LIMIT]), sent_chunks or 0)
        receive = self._receives[index]
        for slot in self._posted(index, int(row[r.LIMIT])):
            if receive.cancelled_s is None:
                receive.cancelled_s = self._clock()
            self._transport.libucp.request_cancel(int(self._slots.rows[slot, r.REQUEST]))

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is not ours."""
        return self._warm_ups.complete(completion)

    def wants_slots(self) -> bool:
        """Whether a receive waits for its first slot."""
        return bool(self._queue)

    def admit(self) -> None:
        """Promise free slots to those that wait, in order."""
        if not self._queue:
            return
        for asked, num_slots in self._queue.admit(self._num_unpromised()):
            self._promises[asked.read_id] = _Promise(asked, num_slots, asked.num_chunks)

    def begin(self) -> None:
        """Let the machine have what was promised: to be called before each of its runs, which then takes the slots."""
        if not self._promises:
            return
        promises, self._promises = self._promises, {}
        for read_id, promise in promises.items():
            program = promise.asked.read
            jobs, error = self._make_jobs(promise)
            row = self._machine.receives.add(
                {
                    r.FIRST_TAG: promise.asked.first_tag,
                    r.JOBS: jobs.address,
                    r.NUM_CHUNKS: len(program.chunks),
                    r.WINDOW: promise.num_slots,
                    r.LIMIT: promise.limit,
                    r.STOPPED: promise.is_stopped or error is not None,
                }
            )
            self._receives[row] = _Receive(promise.asked, jobs, error)
            self._rows[read_id] = row

    def look(self) -> None:
        """See how far the receives came."""
        for index in list(self._receives):
            self._tell(index)

    def refresh(self) -> None:
        """Take the slots from operations that were cancelled and do not end, and use their memory once they have."""
        self._slots.end_quarantines()
        latest_s = self._clock() - self._quarantine_s
        for index, receive in self._receives.items():
            if receive.cancelled_s is not None and receive.cancelled_s <= latest_s:
                row = self._machine.receives.rows[index]
                for slot in self._posted(index, int(row[r.LIMIT])):
                    ticket = self._adopt(slot, receive)
                    row[r.NUM_POSTED] -= 1
                    self._slots.quarantine(slot, partial(self._is_over, ticket))

    def release(self) -> None:
        """Await nothing more, and leave what UCX still holds to the transport."""
        self._warm_ups.forget_all()
        self._promises.clear()
        for index, receive in self._receives.items():
            for slot in self._posted(index, 0):
                self._transport.libucp.request_cancel(int(self._slots.rows[slot, r.REQUEST]))
                self._adopt(slot, receive)
                self._slots.rows[slot, r.STATE] = r.ARRIVED

    def _num_unpromised(self) -> int:
        """Slots that are free, and that no receive in front of its first run will take."""
        receives = self._machine.receives.rows
        is_new = (receives[:, r.PHASE] == r.RUNNING) & (receives[:, r.STARTED_NS] == 0)
        num_promised = sum(promise.num_slots for promise in self._promises.values())
        return self._slots.num_free - num_promised - int(receives[is_new, r.WINDOW].sum())

    def _make_jobs(self, promise: _Promise) -> tuple[Jobs, KVConnectorError | None]:
        """The copies of a receive, or why there are none: then it takes what comes and drops it."""
        program, copies = promise.asked.read, self._machine.copies
        error: KVConnectorError | None = None
        if not promise.is_stopped:
            try:
                return copies.make_jobs(program, packing=False), None
            except (RelayoutError, KVConnectorError) as exc:
                error = as_ours(exc)
        slot_bytes = self._slots.pool.slot_bytes
        return unread_jobs(program, job_bytes=copies.job_bytes, slot_bytes=slot_bytes), error

    def _adopt(self, slot: int, receive: _Receive) -> int:
        """Leave a slot's operation and its memory to the transport; the ticket."""
        buffer = self._slots.buffer(slot, self._slots.pool.slot_bytes)
        request = int(self._slots.rows[slot, r.REQUEST])
        return self._transport.adopt(request, receive.asked.first_tag, buffer, None)

    def _is_over(self, ticket: int) -> bool:
        return not self._transport.holds(ticket)

    def _posted(self, index: int, first_chunk: int) -> list[int]:
        """The slots in which a program awaits a chunk from `first_chunk` on."""
        slots = self._slots.rows
        posted = (
            (slots[:, r.STATE] == r.POSTED)
            & (slots[:, r.PROGRAM] == index)
            & (slots[:, r.CHUNK] >= first_chunk)
        )
        found: list[int] = posted.nonzero()[0].tolist()
        return found

    def _tell(self, index: int) -> None:
        receive, row = self._receives[index], self._machine.receives.rows[index]
        read_id = receive.asked.read_id
        unpacked, phase = int(row[r.NUM_UNPACKED]), int(row[r.PHASE])
        if unpacked > receive.unpacked and not row[r.STOPPED]:
            self._events.append(ev.ReceiveAdvanced(read_id))
        receive.unpacked = unpacked
        is_complete = unpacked == row[r.NUM_CHUNKS]
        if phase != r.RUNNING and not receive.told:
            receive.told = True
            error = receive.error or error_of(row, self._transport.libucp)
            if is_complete:
                seconds = int(row[r.ENDED_NS] - row[r.STARTED_NS]) / _NS_PER_S
                self._records.append(
                    TransferRecord.of(read_id, receive.asked.read, seconds, PATH_NAME)
                )
                self._events.append(ev.ReceiveFinished(read_id))
            elif error is not None:
                self._events.append(ev.ReceiveFailed(read_id, error))
            else:
                self._events.append(ev.ReceiveStopped(read_id))
        if phase == r.OVER:
            if not is_complete:
                self._events.append(ev.ReceiveDrained(read_id))
            self._machine.copies.end_jobs(receive.jobs)
            del self._receives[index], self._rows[read_id]
            self._machine.receives.remove(index)
