"""The consumer's packed half of the data path: reads that wait for slots, and reads that are received."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from secrets import randbits

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.event_queue import as_connector_error
from kvconnector.datapath.pump.copies import Jobs
from kvconnector.datapath.pump.loop import Loop
from kvconnector.datapath.pump.pacing import NS_PER_S
from kvconnector.datapath.pump.programs import Program, Programs
from kvconnector.datapath.pump.state import error_of
from kvconnector.datapath.staging import WARM_UP_BYTES, SlotPool
from kvconnector.errors import KVConnectorError
from kvconnector.folded_log import Refusals
from kvconnector.planning import MAX_CHUNKS
from kvconnector.session import Phase
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.session.load import RankRead
from kvconnector.transport import MessageSizeError
from kvconnector.wire.messages import CHUNK_TAG_BITS, TAG_BITS
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)

_BLOCK_BITS = TAG_BITS - CHUNK_TAG_BITS


def new_tags() -> int:
    """Return the first of `MAX_CHUNKS` tags for one read or for warm-up messages, which no stranger can guess.

    Anyone who reaches the transport's port can send to it, but the tags of receives travel in authenticated messages
    only. That a block of tags is drawn twice is equally unlikely.
    """
    return randbits(_BLOCK_BITS) << CHUNK_TAG_BITS


class Receive(Program, eq=False, kw_only=True):
    """A packed `read`, which has slots once its window is above 0. The producer sends the first `limit` of its chunks,
    of which `num_unpacked` had arrived when the loop was last polled. `is_quiet`: its end was reported. `cancelled_s`
    is when its receives were first cancelled.
    """

    read: RankRead
    num_unpacked: int = 0
    is_quiet: bool = False
    limit: int = MAX_CHUNKS
    cancelled_s: float | None = None


class Receives(Programs[Receive]):
    """All receives of one worker. They get slots in the order in which they were submitted.

    A receive gets its slots, at most `window`, when it begins, and keeps them. So a receive is posted for every chunk
    that its producer may send, and no two workers can wait for each other's slots. It begins in two phases, since the
    producer needs only slots and tags: `admit` promises these, and `begin` makes the copies while the producer is
    already at work. A message that arrives before its receive is posted waits in UCX, mostly as just a header.

    The network writes slots only: once a receive is stopped and its copies have ended, its blocks are free, even if
    chunks still arrive. A cancelled operation that does not end within `peer.timeout_s` loses its slot: the network
    keeps the memory for as long as it may write there, and the slot gets other memory.
    """

    def __init__(self, loop: Loop, config: ConnectorConfig, slots: SlotPool) -> None:
        super().__init__(loop, "receives")
        self.slots = slots
        slots.attach(loop.state.record, "recv_slots", loop.copies.make_fences(len(slots.rows)))
        self._transport = loop.transport
        self._quarantine_s = config.peer.timeout_s
        self._window = config.staging.window
        self._by_read: dict[RankRead, Receive] = {}
        self.waiting: OrderedDict[Receive, None] = OrderedDict()
        """Receives that wait for their first slots, the oldest first."""
        self.promised: list[Receive] = []
        """Receives with slots that the loop does not have yet."""
        self._endpoints: dict[Link, int] = {}
        self._tcp_fallbacks: set[Link] = set()
        self._warm_ups: dict[Link, set[int]] = {}
        self.refusals = Refusals(logger)

    def __repr__(self) -> str:
        active = [receive.read.read_id for receive in self._with_slots()]
        waiting = [receive.read.read_id for receive in self.waiting]
        return f"<Receives active {active}, waiting for slots {waiting}, {self.slots!r}>"

    # -- greetings --

    def connect_back(self, link: Link, address: bytes) -> int:
        """Open an endpoint to a producer worker, for messages, and to learn of its loss. Returns the endpoint.

        Raises:
            IncompatiblePeerError, RemoteProtocolError, TransportError: see `UcxTransport.connect`.
        """
        endpoint = self._endpoints[link] = self._transport.connect(address)
        if self._transport.falls_back_to_tcp(endpoint):
            self._tcp_fallbacks.add(link)
        return endpoint

    def disconnect(self, link: Link) -> None:
        """Close the endpoint to a producer worker, and stop waiting for its warm-up messages. Idempotent."""
        for ticket in self._warm_ups.pop(link, ()):
            self._transport.cancel(ticket)
        self._tcp_fallbacks.discard(link)
        endpoint = self._endpoints.pop(link, 0)
        if endpoint:
            self._transport.disconnect(endpoint)

    def lanes(self, link: Link) -> str:
        """Return the lanes to a producer worker, see `UcxTransport.lanes`."""
        return self._transport.lanes(self._endpoints.get(link, 0))

    def expect_warm_up(
        self, link: Link, nbytes: int = WARM_UP_BYTES, count: int = 1
    ) -> tuple[int, int]:
        """Post receives for `count` warm-up messages of a link, whose content is meaningless. `WarmedUp` follows the
        last.

        Returns:
            The tag of the first message, one less than that of the next; and the bytes of each, at most `nbytes`.
        """
        tag, buffer = new_tags(), self.slots.scratch(nbytes)
        tickets = {self._transport.recv(tag + index, buffer) for index in range(count)}
        self._warm_ups[link] = tickets
        for ticket in tickets:
            self.loop.warm_ups[ticket] = partial(self._warmed_up, link, ticket)
        self.loop.lock.is_greeting = True
        return tag, buffer.nbytes

    def _warmed_up(self, link: Link, ticket: int, error: KVConnectorError | None) -> None:
        tickets = self._warm_ups.get(link, set())
        if ticket not in tickets:
            return  # it was forgotten
        # a producer with smaller slots sends a shorter message, which warms up the lanes just as well
        error = None if isinstance(error, MessageSizeError) else error
        tickets.remove(ticket)
        if error is not None or not tickets:
            del self._warm_ups[link]
            self.loop.events.append(ev.WarmedUp(link, error))

    # -- reads --

    def submit(self, read: RankRead) -> None:
        """Receive a read. `ReceivePosted` follows once there are slots, then `ReceiveFinished`; or `ReceiveFailed` or
        `ReceiveStopped` once nothing writes its blocks any more, and `ReceiveDrained` once its slots are free.
        """
        self.loop.stay_awake()
        read.first_tag = new_tags()
        receive = self._by_read[read] = Receive(read=read)
        self.waiting[receive] = None
        self.admit()

    def stop(self, read: RankRead) -> None:
        """Write no further chunk into the blocks of a read that `is_stopped`. `ReceiveStopped` follows, unless the read
        has ended.
        """
        receive = self._by_read.get(read)
        if receive is None:
            return
        if receive in self.waiting:
            del self.waiting[receive]
            del self._by_read[read]
            self.loop.events.stopped(read)
        elif receive.row >= 0:
            self.set(receive, "stopped", 1)

    def drain(self, read: RankRead, sent_chunks: int | None) -> None:
        """Free the slots in which no chunk will arrive: the peer sends exactly the first `sent_chunks` chunks of this
        stopped or failed read (None: the peer is gone).
        """
        receive = self._by_read.get(read)
        if receive is None:
            return  # the read is over
        receive.limit = min(receive.limit, sent_chunks or 0)
        if receive.row < 0:
            return  # it has no row yet
        row = self.rows[receive.row]
        row["limit"] = min(int(row["limit"]), receive.limit)
        for slot in self._posted(receive):
            if receive.cancelled_s is None:
                receive.cancelled_s = self.loop.clock()
            self._cancel(slot)

    def _with_slots(self) -> Iterator[Receive]:
        """Yield the receives with slots or promised ones. There are no more than slots, unlike reads that wait."""
        yield from self.active.values()
        yield from self.promised

    def admit(self) -> None:
        """Promise free slots to waiting reads, in order. The loop gives a receive its slots in the next run."""
        num_free = self.slots.num_free
        for receive in self._with_slots():
            if receive.row < 0 or not self.rows[receive.row]["started_ns"]:
                num_free -= receive.read.window
        while self.waiting and num_free:
            receive, _ = self.waiting.popitem(last=False)
            read = receive.read
            read.window = min(self._window, read.source.num_chunks, num_free)
            num_free -= read.window
            self.promised.append(receive)
            self.loop.events.append(ev.ReceivePosted(read))

    def begin(self) -> None:
        """Give the reads with promised slots to the loop, before each of its runs. A read whose copies cannot be made
        receives and drops its chunks.
        """
        promised, self.promised = self.promised, []
        for receive in promised:
            read, source = receive.read, receive.read.source
            jobs = None if read.is_stopped else self._jobs_of(receive)
            is_stopped = jobs is None
            if jobs is None:
                jobs = self.loop.copies.unread_jobs_of(source, self.slots.slot_bytes)
            read.is_moving = True
            self.run(
                receive,
                jobs,
                first_tag=read.first_tag,
                num_chunks=source.num_chunks,
                window=read.window,
                limit=min(receive.limit, source.num_chunks),
                stopped=is_stopped,
            )

    def _jobs_of(self, receive: Receive) -> Jobs | None:
        """Return the copies of a receive, or None if they cannot be made; the receive then has the reason."""
        read = receive.read
        try:
            return self.loop.copies.make_jobs(read.source, read.blocks, packing=False)
        except (RelayoutError, KVConnectorError) as error:
            receive.error = as_connector_error(error)
            return None

    def poll(self) -> None:
        """Report the receives' progress."""
        for receive in list(self.active.values()):
            read, row = receive.read, self.values(receive)
            unpacked, num_chunks, phase = row["num_unpacked"], row["num_chunks"], row["phase"]
            if receive.num_unpacked < unpacked < num_chunks and not row["stopped"]:
                read.share = unpacked / num_chunks
                self.loop.events.append(ev.ReceiveAdvanced(read))
            receive.num_unpacked = unpacked
            if phase != r.RUNNING and not receive.is_quiet:
                receive.is_quiet = True
                self.loop.events.append(self._ended(receive, row))
            if phase == r.OVER:
                if unpacked < num_chunks:
                    self.loop.events.append(ev.ReceiveDrained(read))
                self.forget(receive)
                del self._by_read[read]

    def refresh(self) -> None:
        """Take the slots from cancelled operations that do not end. Drop messages that belong to no read: UCX would
        keep all of them for a receive, no matter how many.
        """
        awaited = {receive.read.first_tag for receive in self._with_slots()}
        count = self._transport.discard_unexpected(awaited, -MAX_CHUNKS)
        if count:
            details = f"{count} messages of no read, or late ones of a read that was given up"
            self.refusals.note("messages over UCX", "unknown tag", details, count)
        self.slots.end_quarantines()
        latest_s = self.loop.clock() - self._quarantine_s
        for receive in self.active.values():
            if receive.cancelled_s is not None and receive.cancelled_s <= latest_s:
                for slot in self._posted(receive):
                    self.rows[receive.row]["num_posted"] -= 1
                    self.slots.quarantine(slot, self._adopt(slot, receive.read))

    def release(self) -> None:
        """Receive nothing more, and leave operations under way to the transport."""
        self.promised.clear()
        for receive in self.active.values():
            receive.limit = 0
            for slot in self._posted(receive):
                self._cancel(slot)
                self._adopt(slot, receive.read)
                self.slots.rows[slot]["state"] = r.ARRIVED

    def _cancel(self, slot: int) -> None:
        """End the receive of a slot, if its message is not arriving."""
        self._transport.libucp.request_cancel(int(self.slots.rows[slot]["request"]))

    def _adopt(self, slot: int, read: RankRead) -> Callable[[], bool]:
        """Leave a slot's operation and its memory to the transport. See `UcxTransport.adopt`."""
        request = int(self.slots.rows[slot]["request"])
        return self._transport.adopt(request, read.first_tag, self.slots.buffer(slot), None)

    def _posted(self, receive: Receive) -> list[int]:
        """Return the slots in which a receive awaits a chunk that its peer will not send."""
        slots = self.slots.rows
        posted = (
            (slots["state"] == r.POSTED)
            & (slots["program"] == receive.row)
            & (slots["chunk"] >= receive.limit)
        )
        found: list[int] = posted.nonzero()[0].tolist()
        return found

    def _ended(self, receive: Receive, row: dict[str, int]) -> object:
        """Return the event that ends a read which no longer writes to its blocks."""
        read = receive.read
        if row["num_unpacked"] < row["num_chunks"]:
            error = receive.error or error_of(row, self._transport)
            return ev.ReceiveFailed(read, error) if error else ev.ReceiveStopped(read)
        times = ("started_ns", "arriving_ns", "arrived_ns", "ended_ns")
        started_s, arriving_s, arrived_s, ended_s = [row[each] / NS_PER_S for each in times]
        phases = Phase("wire", arriving_s, arrived_s), Phase("unpack", arriving_s, ended_s)
        is_fallback = read.worker.link in self._tcp_fallbacks
        path = ev.PACKED_PATH + ev.TCP_FALLBACK * is_fallback
        return ev.ReceiveFinished(read, ended_s - started_s, path, phases)
