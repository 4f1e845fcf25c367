"""The consumer's half of the packed path: receive a chunk into a slot, unpack it, reuse the slot.

The network writes slots only; once a read is stopped and its unpack kernels are through, its blocks are free, whatever
still arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvconnector.datapath.admission import (
    WARM_UP_BYTES,
    AdmissionQueue,
    Waiting,
    WarmUps,
)
from kvconnector.datapath.base import DataEvent, Program, TransferRecord, Untold, as_ours
from kvconnector.datapath.copier import BoundProgram, Copier, Fence
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Completion, Transport
from kvconnector_kernels.relayout import RelayoutError


class _Receive:
    """One read being received. `limit` is the number of chunks that the peer sends."""

    __slots__ = (
        "bound",
        "error",
        "first_tag",
        "is_stopped",
        "limit",
        "next_chunk",
        "posted",
        "read_id",
        "started_s",
        "told",
        "unpacked",
        "unpacking",
    )

    def __init__(self, read_id: int, bound: BoundProgram, first_tag: int, started_s: float) -> None:
        self.read_id = read_id
        self.bound = bound
        self.first_tag = first_tag
        self.limit = len(bound.program.chunks)
        self.next_chunk = 0
        self.posted: dict[int, int] = {}
        self.unpacking: deque[tuple[int, Fence]] = deque()
        self.unpacked = 0
        self.is_stopped = False
        self.told = False
        self.error: KVConnectorError | None = None
        self.started_s = started_s

    @property
    def num_chunks(self) -> int:
        return len(self.bound.program.chunks)


class Receiver:
    """All receives of one worker, in the order they were submitted as far as slots go."""

    def __init__(
        self,
        transport: Transport,
        slots: SlotPool,
        copier: Copier,
        *,
        window: int,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._slots = slots
        self._copier = copier
        self._clock = clock
        self._events: Untold[DataEvent] = Untold()
        self._records: Untold[TransferRecord] = Untold()
        self._warm_ups = WarmUps(transport, self._events)
        self._queue: AdmissionQueue[BoundProgram] = AdmissionQueue(
            window=window, events=self._events
        )
        self._active: dict[int, _Receive] = {}
        self._tickets: dict[int, tuple[_Receive, int, int]] = {}

    def expect_warm_up(self, link: LinkId) -> tuple[int, int]:
        """See `DataPath.expect_warm_up`."""
        return self._warm_ups.expect(link, self._slots.scratch(WARM_UP_BYTES))

    def forget_warm_up(self, link: LinkId) -> None:
        """See `DataPath.forget_warm_up`."""
        self._warm_ups.forget(link)

    def submit(self, read_id: int, program: Program) -> None:
        """See `DataPath.submit_receive`."""
        try:
            bound = self._copier.bind(program)
        except RelayoutError as error:
            self._queue.refuse(read_id, as_ours(error))
            return
        self._queue.submit(read_id, bound, len(program.chunks))

    def stop(self, read_id: int) -> None:
        """See `DataPath.stop_receive`."""
        found = self._active.get(read_id)
        if not self._queue.stop(read_id) and found is not None:
            found.is_stopped = True

    def drain(self, read_id: int, sent_chunks: int | None) -> None:
        """See `DataPath.drain_receive`."""
        receive = self._active.get(read_id)
        if receive is None:
            return
        receive.limit = min(receive.limit, sent_chunks or 0)
        for ticket, chunk in list(receive.posted.items()):
            if chunk >= receive.limit:
                self._transport.cancel(ticket)

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is not ours."""
        if self._warm_ups.complete(completion):
            return True
        if completion.ticket not in self._tickets:
            return False
        receive, chunk, slot = self._tickets.pop(completion.ticket)
        del receive.posted[completion.ticket]
        if completion.error is None and not receive.is_stopped:
            self._unpack(receive, chunk, slot)
            return True
        if completion.error is not None and chunk < receive.limit:
            self._fail(receive, completion.error)
        self._post_or_free(receive, slot)
        return True

    def step(self) -> list[DataEvent]:
        """Admit what fits, retire what is unpacked, end what is over."""
        for receive in list(self._active.values()):
            self._retire_unpacked(receive)
            self._tell(receive)
            if receive.told and not receive.posted:
                del self._active[receive.read_id]
                if receive.unpacked < receive.num_chunks:
                    self._events.append(ev.ReceiveDrained(receive.read_id))
        for waiting, num_slots in self._queue.admit(self._slots.num_free):
            self._begin(waiting, num_slots)
        return self._events.take()

    def take_records(self) -> list[TransferRecord]:
        """See `DataPath.take_records`."""
        return self._records.take()

    def is_waiting_for_device(self) -> bool:
        """Whether an unpack is under way on a GPU."""
        return any(receive.unpacking for receive in self._active.values())

    def _begin(self, waiting: Waiting[BoundProgram], num_slots: int) -> None:
        receive = _Receive(waiting.read_id, waiting.read, waiting.first_tag, self._clock())
        self._active[receive.read_id] = receive
        for _ in range(num_slots):
            slot = self._slots.take()
            assert slot is not None  # these were free
            self._post_or_free(receive, slot)

    def _post_or_free(self, receive: _Receive, slot: int) -> None:
        """Await the next chunk in `slot`, if there is one."""
        chunk = receive.next_chunk
        if chunk >= receive.limit:
            self._slots.give_back(slot)
            return
        receive.next_chunk += 1
        nbytes = receive.bound.program.chunk_nbytes(chunk)
        ticket = self._transport.recv(receive.first_tag + chunk, self._slots.buffer(slot, nbytes))
        receive.posted[ticket] = chunk
        self._tickets[ticket] = (receive, chunk, slot)

    def _unpack(self, receive: _Receive, chunk: int, slot: int) -> None:
        nbytes = receive.bound.program.chunk_nbytes(chunk)
        try:
            fence = self._copier.unpack(receive.bound, chunk, self._slots.address(slot), nbytes)
        except RelayoutError as error:
            self._fail(receive, TransportError(f"cannot unpack a chunk: {error}", chunk=chunk))
            self._post_or_free(receive, slot)
            return
        receive.unpacking.append((slot, fence))
        self._retire_unpacked(receive)

    def _retire_unpacked(self, receive: _Receive) -> None:
        while receive.unpacking and receive.unpacking[0][1].query():
            slot, _ = receive.unpacking.popleft()
            receive.unpacked += 1
            self._post_or_free(receive, slot)
            if not receive.is_stopped:
                self._events.append(ev.ReceiveAdvanced(receive.read_id))

    def _fail(self, receive: _Receive, error: KVConnectorError) -> None:
        """Unpack no more; `_tell` reports it once the unpacks under way are through. What the peer still sends is
        awaited as before.
        """
        receive.is_stopped = True
        receive.error = receive.error or error

    def _tell(self, receive: _Receive) -> None:
        """Report, once, that nothing writes the read's blocks any more."""
        if receive.told or receive.unpacking:
            return
        if receive.unpacked == receive.num_chunks:
            receive.told = True
            seconds = self._clock() - receive.started_s
            self._records.append(
                TransferRecord.of(receive.read_id, receive.bound.program, seconds, "packed")
            )
            self._events.append(ev.ReceiveFinished(receive.read_id))
        elif receive.error is not None:
            receive.told = True
            self._events.append(ev.ReceiveFailed(receive.read_id, receive.error))
        elif receive.is_stopped:
            receive.told = True
            self._events.append(ev.ReceiveStopped(receive.read_id))
