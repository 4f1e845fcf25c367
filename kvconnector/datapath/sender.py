"""The producer's half of the packed path: pack a chunk into a slot, send it, reuse the slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvconnector.datapath.base import DataEvent, Program, Untold, as_ours
from kvconnector.datapath.copier import BoundProgram, Copier, Fence
from kvconnector.datapath.endpoints import Endpoints
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import KVConnectorError, PeerLostError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Completion, Transport
from kvconnector_kernels.relayout import RelayoutError


class _Send:
    """One read being streamed."""

    __slots__ = (
        "bound",
        "error",
        "first_tag",
        "in_flight",
        "link",
        "next_chunk",
        "packing",
        "posted",
        "read_id",
        "stopping",
        "window",
    )

    def __init__(
        self, link: LinkId, read_id: int, bound: BoundProgram, first_tag: int, window: int
    ):
        self.link = link
        self.read_id = read_id
        self.bound = bound
        self.first_tag = first_tag
        self.window = window
        self.next_chunk = 0
        self.posted = 0
        self.packing: deque[tuple[int, int, Fence]] = deque()
        self.in_flight = 0
        self.stopping = False
        self.error: KVConnectorError | None = None

    @property
    def num_chunks(self) -> int:
        return len(self.bound.program.chunks)

    @property
    def wants_slot(self) -> bool:
        return (
            not self.stopping
            and self.next_chunk < self.num_chunks
            and len(self.packing) + self.in_flight < self.window
        )


class Sender:
    """All sends of one worker. Slots go round between the reads, one chunk each, so that a long read delays a short one
    by a few chunks only.

    A send that was cancelled may still take its bytes from the slot, at a consumer that does not know yet that it was
    given up. Such a slot rests for `quarantine_s`, as long as a consumer believes in a silent producer.
    """

    def __init__(
        self,
        transport: Transport,
        slots: SlotPool,
        copier: Copier,
        *,
        quarantine_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._slots = slots
        self._copier = copier
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._events: Untold[DataEvent] = Untold()
        self._endpoints = Endpoints(transport, self._events)
        self._sends: dict[tuple[LinkId, int], _Send] = {}
        self._turn: deque[tuple[LinkId, int]] = deque()
        self._tickets: dict[int, tuple[_Send, int]] = {}

    def open_endpoint(self, link: LinkId, address: bytes, warm_up_tag: int, nbytes: int) -> None:
        """See `DataPath.open_endpoint`."""
        self._endpoints.open(link, address, warm_up_tag, self._slots.scratch(nbytes))

    def close_endpoint(self, link: LinkId) -> None:
        """See `DataPath.close_endpoint`."""
        for key, send in self._sends.items():
            if key[0] == link:
                send.error = send.error or PeerLostError("the consumer's endpoint was closed")
                send.stopping = True
        self._endpoints.close(link)

    def endpoint(self, link: LinkId) -> int | None:
        """See `DataPath.endpoint`."""
        return self._endpoints.get(link)

    def submit(
        self, link: LinkId, read_id: int, program: Program, *, first_tag: int, window: int
    ) -> None:
        """See `DataPath.submit_send`."""
        try:
            bound = self._copier.bind(program)
        except RelayoutError as error:
            self._events.append(ev.SendStopped(link, read_id, 0, as_ours(error)))
            return
        self._sends[link, read_id] = _Send(link, read_id, bound, first_tag, window)
        self._turn.append((link, read_id))

    def stop(self, link: LinkId, read_id: int) -> None:
        """See `DataPath.stop_send`."""
        send = self._sends.get((link, read_id))
        if send is not None:
            send.stopping = True

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is not ours."""
        if self._endpoints.complete(completion):
            return True
        if completion.ticket not in self._tickets:
            return False
        send, slot = self._tickets.pop(completion.ticket)
        send.in_flight -= 1
        if completion.error is None:
            self._slots.give_back(slot)
            return True
        until_s = self._clock() + self._quarantine_s
        self._slots.quarantine(slot, lambda: self._clock() >= until_s)
        self._fail(send, completion.error)
        return True

    def step(self) -> list[DataEvent]:
        """Post what is packed, pack what fits, end what is over."""
        self._slots.end_quarantines()
        for send in self._sends.values():
            self._post_packed(send)
        self._pack_in_turn()
        for key, send in list(self._sends.items()):
            if self._is_over(send):
                del self._sends[key]
                self._turn.remove(key)
        return self._events.take()

    def is_waiting_for_device(self) -> bool:
        """Whether a pack is under way on a GPU."""
        return any(send.packing for send in self._sends.values())

    def _post_packed(self, send: _Send) -> None:
        while send.packing and send.packing[0][2].query():
            index, slot, _ = send.packing.popleft()
            endpoint = self._endpoints.get(send.link)
            if endpoint is None:
                send.stopping = True
            if send.stopping or endpoint is None:
                self._slots.give_back(slot)
                continue
            buffer = self._slots.buffer(slot, send.bound.program.chunk_nbytes(index))
            try:
                ticket = self._transport.send(endpoint, send.first_tag + index, buffer)
            except KVConnectorError as error:
                self._slots.give_back(slot)
                self._fail(send, error)
                continue
            send.posted += 1
            send.in_flight += 1
            self._tickets[ticket] = (send, slot)

    def _fail(self, send: _Send, error: KVConnectorError) -> None:
        """The data plane failed a send."""
        send.error = send.error or error
        send.stopping = True
        self._endpoints.fail(send.link, error)

    def _pack_in_turn(self) -> None:
        idle = 0
        while idle < len(self._turn) and self._slots.num_free:
            send = self._sends[self._turn[0]]
            self._turn.rotate(-1)
            if not send.wants_slot:
                idle += 1
                continue
            idle = 0
            self._pack(send)
            self._post_packed(send)

    def _pack(self, send: _Send) -> None:
        slot = self._slots.take()
        if slot is None:
            return
        index = send.next_chunk
        try:
            fence = self._copier.pack(
                send.bound,
                index,
                self._slots.address(slot),
                send.bound.program.chunk_nbytes(index),
            )
        except RelayoutError as error:
            self._slots.give_back(slot)
            send.error = TransportError(f"cannot pack a chunk: {error}", chunk=index)
            send.stopping = True
            return
        send.next_chunk += 1
        send.packing.append((index, slot, fence))

    def _is_over(self, send: _Send) -> bool:
        """Report the end of a read once nothing reads its blocks: the slots of a stopped one may still be in flight."""
        if send.packing:
            return False
        is_complete = send.posted == send.num_chunks and send.error is None
        if is_complete and (send.stopping or not send.in_flight):
            self._events.append(ev.SendFinished(send.link, send.read_id))
            return True
        if send.stopping:
            self._events.append(ev.SendStopped(send.link, send.read_id, send.posted, send.error))
            return True
        return False
