"""The consumer's half of the pump: the programs that receive, and the queue of those that wait for slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

from kvconnector.datapath.base import DataEvent, Program, TransferRecord
from kvconnector.datapath.pump.copying import Jobs
from kvconnector.datapath.pump.failures import error_of
from kvconnector.datapath.pump.machine import Machine
from kvconnector.datapath.receiver import WARM_UP_BYTES
from kvconnector.errors import TransportError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Completion, MessageSizeError
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire.messages import CHUNK_TAG_BITS, MAX_CHUNKS
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

PATH_NAME = "packed, pumped"
_NS_PER_S = 1e9


@dataclass(slots=True, eq=False)
class _Receive:
    """What the rows do not say about a receive."""

    read_id: int
    program: Program
    jobs: Jobs
    first_tag: int
    unpacked: int = 0
    told: bool = False


class PumpReceives:
    """All receives of one worker, see `Receiver`: the same contract, but the chunks move in the machine."""

    def __init__(self, transport: UcxTransport, machine: Machine, *, window: int) -> None:
        self._transport = transport
        self._machine = machine
        self._slots = machine.recv_slots
        self._window = window
        self._queue: deque[_Receive] = deque()
        self._receives: dict[int, _Receive] = {}
        self._rows: dict[int, int] = {}
        self._warm_ups: dict[LinkId, int] = {}
        self._warm_up_tickets: dict[int, LinkId] = {}
        self._tag_blocks = count(1)
        self._events: list[DataEvent] = []
        self._records: list[TransferRecord] = []

    def expect_warm_up(self, link: LinkId) -> tuple[int, int]:
        """See `DataPath.expect_warm_up`."""
        tag, pool = self._new_tags(), self._slots.pool
        nbytes = min(WARM_UP_BYTES, pool.slot_bytes)
        ticket = self._transport.recv(tag, pool.buffer(pool.scratch, nbytes))
        self._warm_ups[link] = ticket
        self._warm_up_tickets[ticket] = link
        return tag, nbytes

    def forget_warm_up(self, link: LinkId) -> None:
        """See `DataPath.forget_warm_up`."""
        ticket = self._warm_ups.pop(link, None)
        if ticket is not None:
            self._transport.cancel(ticket)

    def is_warming_up(self) -> bool:
        """Whether a warm-up message is awaited."""
        return bool(self._warm_up_tickets)

    def submit(self, read_id: int, program: Program) -> None:
        """See `DataPath.submit_receive`."""
        try:
            if len(program.chunks) > MAX_CHUNKS:
                raise TransportError("a read has too many chunks", chunks=len(program.chunks))
            jobs = self._machine.copies.make_jobs(program, packing=False)
        except (RelayoutError, TransportError) as error:
            failure = error if isinstance(error, TransportError) else TransportError(str(error))
            self._events += [ev.ReceiveFailed(read_id, failure), ev.ReceiveDrained(read_id)]
            return
        self._queue.append(_Receive(read_id, program, jobs, self._new_tags()))

    def stop(self, read_id: int) -> None:
        """See `DataPath.stop_receive`."""
        for receive in self._queue:
            if receive.read_id == read_id:
                self._queue.remove(receive)
                self._events += [ev.ReceiveStopped(read_id), ev.ReceiveDrained(read_id)]
                return
        row = self._rows.get(read_id)
        if row is not None:
            self._machine.receives.rows[row, r.STOPPED] = 1

    def drain(self, read_id: int, sent_chunks: int | None) -> None:
        """See `DataPath.drain_receive`."""
        index = self._rows.get(read_id)
        if index is None:
            return
        row = self._machine.receives.rows[index]
        row[r.LIMIT] = min(int(row[r.LIMIT]), sent_chunks or 0)
        for slot in self._posted(index, int(row[r.LIMIT])):
            self._transport.libucp.request_cancel(int(self._slots.rows[slot, r.REQUEST]))

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is not ours."""
        if completion.ticket not in self._warm_up_tickets:
            return False
        link = self._warm_up_tickets.pop(completion.ticket)
        # a producer with smaller slots sends a shorter message, which warms the lanes as well
        error = None if isinstance(completion.error, MessageSizeError) else completion.error
        if self._warm_ups.get(link) == completion.ticket:
            del self._warm_ups[link]
            self._events.append(ev.WarmedUp(link, error))
        return True

    def wants_slots(self) -> bool:
        """Whether a receive waits for its first slot."""
        return bool(self._queue)

    def admit(self) -> None:
        """Promise free slots to those that wait, in order. The loop takes them when it begins these programs."""
        receives = self._machine.receives.rows
        is_new = (receives[:, r.PHASE] == r.RUNNING) & (receives[:, r.STARTED_NS] == 0)
        num_free = self._slots.num_free - int(receives[is_new, r.WINDOW].sum())
        while self._queue and num_free:
            receive = self._queue.popleft()
            window = min(self._window, len(receive.program.chunks), num_free)
            num_free -= window
            row = self._machine.receives.add(
                {
                    r.FIRST_TAG: receive.first_tag,
                    r.JOBS: receive.jobs.address,
                    r.NUM_CHUNKS: len(receive.program.chunks),
                    r.WINDOW: window,
                    r.LIMIT: len(receive.program.chunks),
                }
            )
            self._receives[row] = receive
            self._rows[receive.read_id] = row
            self._events.append(ev.ReceivePosted(receive.read_id, window, receive.first_tag))

    def take_events(self) -> list[DataEvent]:
        """How far the receives came."""
        for index in list(self._receives):
            self._tell(index)
        events, self._events = self._events, []
        return events

    def take_records(self) -> list[TransferRecord]:
        """See `DataPath.take_records`."""
        records, self._records = self._records, []
        return records

    def release(self) -> None:
        """Leave what UCX still holds to the transport, which is about to close."""
        for index, receive in self._receives.items():
            for slot in self._posted(index, 0):
                request = int(self._slots.rows[slot, r.REQUEST])
                self._transport.libucp.request_cancel(request)
                buffer = self._slots.buffer(slot, self._slots.pool.slot_bytes)
                self._transport.adopt(request, receive.first_tag, buffer, None)
                self._slots.rows[slot, r.STATE] = r.ARRIVED

    def _new_tags(self) -> int:
        return next(self._tag_blocks) << CHUNK_TAG_BITS

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
        unpacked, phase = int(row[r.NUM_UNPACKED]), int(row[r.PHASE])
        if unpacked > receive.unpacked and not row[r.STOPPED]:
            self._events.append(ev.ReceiveAdvanced(receive.read_id))
        receive.unpacked = unpacked
        is_complete = unpacked == row[r.NUM_CHUNKS]
        if phase != r.RUNNING and not receive.told:
            receive.told = True
            error = error_of(row, self._transport.libucp)
            if is_complete:
                self._record(receive, int(row[r.ENDED_NS] - row[r.STARTED_NS]))
                self._events.append(ev.ReceiveFinished(receive.read_id))
            elif error is not None:
                self._events.append(ev.ReceiveFailed(receive.read_id, error))
            else:
                self._events.append(ev.ReceiveStopped(receive.read_id))
        if phase == r.OVER:
            if not is_complete:
                self._events.append(ev.ReceiveDrained(receive.read_id))
            del self._receives[index], self._rows[receive.read_id]
            self._machine.receives.remove(index)

    def _record(self, receive: _Receive, elapsed_ns: int) -> None:
        program = receive.program
        self._records.append(
            TransferRecord(
                read_id=receive.read_id,
                nbytes=program.total_bytes,
                seconds=elapsed_ns / _NS_PER_S,
                chunks=len(program.chunks),
                path=PATH_NAME,
            )
        )
