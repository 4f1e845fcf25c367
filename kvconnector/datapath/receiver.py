"""The consumer's half of the packed path: receive a chunk into a slot, unpack it, reuse the slot.

A read gets its slots when it starts and keeps them: what the producer may send is always awaited, so no two workers can
wait for each other's slots. The network writes slots only; once a read is stopped and its unpack kernels are through,
its blocks are free, whatever still arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count

from kvconnector.datapath.base import DataEvent, Program, TransferRecord
from kvconnector.datapath.copier import BoundProgram, Copier, Fence
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Completion, MessageSizeError, Transport
from kvconnector.wire.messages import CHUNK_TAG_BITS, MAX_CHUNKS
from kvconnector_kernels.relayout import RelayoutError

WARM_UP_BYTES = 1 << 20


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

    def __init__(self, read_id: int, bound: BoundProgram, first_tag: int) -> None:
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
        self.started_s = 0.0

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
        self._window = window
        self._clock = clock
        self._queue: deque[_Receive] = deque()
        self._active: dict[int, _Receive] = {}
        self._tickets: dict[int, tuple[_Receive, int, int]] = {}
        self._warm_ups: dict[LinkId, int] = {}
        self._warm_up_tickets: dict[int, LinkId] = {}
        self._tag_blocks = count(1)
        self._events: list[DataEvent] = []
        self._records: list[TransferRecord] = []

    def expect_warm_up(self, link: LinkId) -> tuple[int, int]:
        """See `DataPath.expect_warm_up`."""
        tag = self._new_tags()
        nbytes = min(WARM_UP_BYTES, self._slots.slot_bytes)
        ticket = self._transport.recv(tag, self._slots.buffer(self._slots.scratch, nbytes))
        self._warm_ups[link] = ticket
        self._warm_up_tickets[ticket] = link
        return tag, nbytes

    def forget_warm_up(self, link: LinkId) -> None:
        """See `DataPath.forget_warm_up`."""
        ticket = self._warm_ups.pop(link, None)
        if ticket is not None:
            self._transport.cancel(ticket)

    def submit(self, read_id: int, program: Program) -> None:
        """See `DataPath.submit_receive`."""
        try:
            if len(program.chunks) > MAX_CHUNKS:
                raise TransportError("a read has too many chunks", chunks=len(program.chunks))
            bound = self._copier.bind(program)
        except (RelayoutError, TransportError) as error:
            failure = error if isinstance(error, TransportError) else TransportError(str(error))
            self._events += [ev.ReceiveFailed(read_id, failure), ev.ReceiveDrained(read_id)]
            return
        self._queue.append(_Receive(read_id, bound, self._new_tags()))

    def stop(self, read_id: int) -> None:
        """See `DataPath.stop_receive`."""
        for receive in self._queue:
            if receive.read_id == read_id:
                self._queue.remove(receive)
                self._events += [ev.ReceiveStopped(read_id), ev.ReceiveDrained(read_id)]
                return
        found = self._active.get(read_id)
        if found is not None:
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
        if completion.ticket in self._warm_up_tickets:
            link = self._warm_up_tickets.pop(completion.ticket)
            # a producer with smaller slots sends a shorter message, which warms the lanes as well
            error = None if isinstance(completion.error, MessageSizeError) else completion.error
            if self._warm_ups.pop(link, None) is not None:
                self._events.append(ev.WarmedUp(link, error))
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
        while self._queue and self._slots.num_free:
            self._admit(self._queue.popleft())
        events, self._events = self._events, []
        return events

    def take_records(self) -> list[TransferRecord]:
        """See `DataPath.take_records`."""
        records, self._records = self._records, []
        return records

    def is_waiting_for_device(self) -> bool:
        """Whether an unpack is under way on a GPU."""
        return any(receive.unpacking for receive in self._active.values())

    def _new_tags(self) -> int:
        return next(self._tag_blocks) << CHUNK_TAG_BITS

    def _admit(self, receive: _Receive) -> None:
        self._active[receive.read_id] = receive
        receive.started_s = self._clock()
        window = min(self._window, receive.num_chunks, self._slots.num_free)
        self._events.append(ev.ReceivePosted(receive.read_id, window, receive.first_tag))
        for _ in range(window):
            slot = self._slots.take()
            assert slot is not None  # counted above
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
            program = receive.bound.program
            self._records.append(
                TransferRecord(
                    read_id=receive.read_id,
                    nbytes=program.total_bytes,
                    seconds=self._clock() - receive.started_s,
                    chunks=receive.num_chunks,
                    path="packed",
                )
            )
            self._events.append(ev.ReceiveFinished(receive.read_id))
        elif receive.error is not None:
            receive.told = True
            self._events.append(ev.ReceiveFailed(receive.read_id, receive.error))
        elif receive.is_stopped:
            receive.told = True
            self._events.append(ev.ReceiveStopped(receive.read_id))
