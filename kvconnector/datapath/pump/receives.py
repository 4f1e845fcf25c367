"""The consumer's half of the pump: the programs that receive, and the queue of those that wait for slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvconnector.datapath.admission import (
    WARM_UP_BYTES,
    AdmissionQueue,
    Waiting,
    WarmUps,
)
from kvconnector.datapath.base import DataEvent, Program, TransferRecord, Untold
from kvconnector.datapath.pump.copying import Jobs
from kvconnector.datapath.pump.failures import error_of
from kvconnector.datapath.pump.machine import Machine
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Completion
from kvconnector.transport.ucx import UcxTransport
from kvconnector_kernels.pump import records as r

PATH_NAME = "packed, pumped"
_NS_PER_S = 1e9


@dataclass(slots=True, eq=False)
class _Receive:
    """What the rows do not say about a receive."""

    asked: Waiting[Jobs]
    unpacked: int = 0
    told: bool = False


class PumpReceives:
    """All receives of one worker, see `Receiver`: the same contract, but the chunks move in the machine."""

    def __init__(self, transport: UcxTransport, machine: Machine, *, window: int) -> None:
        self._transport = transport
        self._machine = machine
        self._slots = machine.recv_slots
        self._events: Untold[DataEvent] = Untold()
        self._records: Untold[TransferRecord] = Untold()
        self._warm_ups = WarmUps(transport, self._events)
        self._queue = AdmissionQueue(self._make_jobs, window=window, events=self._events)
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

    def submit(
        self, read_id: int, program: Program, took: Callable[[float], None] | None = None
    ) -> None:
        """See `DataPath.submit_receive`. `took` is told how many seconds it took, once it is complete."""
        self._queue.submit(read_id, program, took)

    def stop(self, read_id: int) -> None:
        """See `DataPath.stop_receive`."""
        row = self._rows.get(read_id)
        if not self._queue.stop(read_id) and row is not None:
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
        return self._warm_ups.complete(completion)

    def wants_slots(self) -> bool:
        """Whether a receive waits for its first slot."""
        return bool(self._queue)

    def admit(self) -> None:
        """Promise free slots to those that wait, in order. The loop takes them when it begins these programs."""
        receives = self._machine.receives.rows
        is_new = (receives[:, r.PHASE] == r.RUNNING) & (receives[:, r.STARTED_NS] == 0)
        num_free = self._slots.num_free - int(receives[is_new, r.WINDOW].sum())
        for waiting, num_slots in self._queue.admit(num_free):
            row = self._machine.receives.add(
                {
                    r.FIRST_TAG: waiting.first_tag,
                    r.JOBS: waiting.copies.address,
                    r.NUM_CHUNKS: len(waiting.program.chunks),
                    r.WINDOW: num_slots,
                    r.LIMIT: len(waiting.program.chunks),
                }
            )
            self._receives[row] = _Receive(waiting)
            self._rows[waiting.read_id] = row

    def take_events(self) -> list[DataEvent]:
        """How far the receives came."""
        for index in list(self._receives):
            self._tell(index)
        return self._events.take()

    def take_records(self) -> list[TransferRecord]:
        """See `DataPath.take_records`."""
        return self._records.take()

    def release(self) -> None:
        """Await nothing more, and leave what UCX still holds to the transport."""
        self._warm_ups.forget_all()
        for index, receive in self._receives.items():
            for slot in self._posted(index, 0):
                request = int(self._slots.rows[slot, r.REQUEST])
                self._transport.libucp.request_cancel(request)
                buffer = self._slots.buffer(slot, self._slots.pool.slot_bytes)
                self._transport.adopt(request, receive.asked.first_tag, buffer, None)
                self._slots.rows[slot, r.STATE] = r.ARRIVED

    def _make_jobs(self, program: Program) -> Jobs:
        return self._machine.copies.make_jobs(program, packing=False)

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
            error = error_of(row, self._transport.libucp)
            if is_complete:
                seconds = int(row[r.ENDED_NS] - row[r.STARTED_NS]) / _NS_PER_S
                if receive.asked.took is not None:
                    receive.asked.took(seconds)
                self._records.append(
                    TransferRecord.of(read_id, receive.asked.program, seconds, PATH_NAME)
                )
                self._events.append(ev.ReceiveFinished(read_id))
            elif error is not None:
                self._events.append(ev.ReceiveFailed(read_id, error))
            else:
                self._events.append(ev.ReceiveStopped(read_id))
        if phase == r.OVER:
            if not is_complete:
                self._events.append(ev.ReceiveDrained(read_id))
            del self._receives[index], self._rows[read_id]
            self._machine.receives.remove(index)
