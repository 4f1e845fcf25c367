"""The consumer's packed half of the data path: reads that wait for slots, and reads that are received."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from secrets import randbits
from typing import TYPE_CHECKING

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.base import as_connector_error
from kvconnector.datapath.pump.pacing import NS_PER_S
from kvconnector.datapath.pump.programs import Programs
from kvconnector.datapath.pump.state import error_of
from kvconnector.datapath.staging import WARM_UP_BYTES, SlotPool
from kvconnector.errors import KVConnectorError
from kvconnector.folded_log import Refusals
from kvconnector.planning import MAX_CHUNKS
from kvconnector.session import Phase
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.session.reads import RankRead
from kvconnector.transport import MessageSizeError
from kvconnector.wire.messages import CHUNK_TAG_BITS, TAG_BITS
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.relayout import RelayoutError

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath

logger = logging.getLogger(__name__)

_BLOCK_BITS = TAG_BITS - CHUNK_TAG_BITS


def new_tags() -> int:
    """Return the first of `MAX_CHUNKS` tags for one read or for warm-up messages, which no stranger can guess.

    Anyone who reaches the transport's port can send to it, but the tags of receives travel in authenticated messages
    only. It is as unlikely that a block of tags is drawn twice.
    """
    return randbits(_BLOCK_BITS) << CHUNK_TAG_BITS


class Receives(Programs[RankRead]):
    """All receives of one worker. They get slots in the order in which they were submitted.

    A receive gets its slots, at most `window`, when it begins, and keeps them. So a receive is posted for every chunk
    that its producer may send, and no two workers can wait for each other's slots. It begins in two phases, since the
    producer needs only slots and tags: `admit` promises these, and `begin` makes the copies while the producer is
    already at work. A message that arrives before its receive is posted waits in UCX, mostly as just a header.

    The network writes slots only: once a receive is stopped and its copies have ended, its blocks are free, even if
    chunks still arrive. A cancelled operation that does not end within `peer.timeout_s` loses its slot: the network
    keeps the memory for as long as it may write there, and the slot gets other memory.
    """

    def __init__(self, path: DataPath, config: ConnectorConfig, slots: SlotPool) -> None:
        super().__init__(path, "receives")
        self.slots = slots
        slots.attach(path.state.record, "recv_slots", path.copies.make_fences(len(slots.rows)))
        self._transport = path.transport
        self._quarantine_s = config.peer.timeout_s
        self._window = config.staging.window
        self.waiting: OrderedDict[RankRead, None] = OrderedDict()
        """Reads that wait for their first slots, the oldest first."""
        self.promised: list[RankRead] = []
        """Reads with slots that the loop does not have yet."""
        self.refusals = Refusals(logger)

    def __repr__(self) -> str:
        active = [read.read_id for read in self._with_slots()]
        waiting = [read.read_id for read in self.waiting]
        return f"<Receives active {active}, waiting for slots {waiting}, {self.slots!r}>"

    def expect_warm_up(
        self, link: Link, nbytes: int = WARM_UP_BYTES, count: int = 1
    ) -> tuple[int, int]:
        """Post receives for `count` warm-up messages of a link, whose bytes mean nothing. `WarmedUp` follows the last.

        Returns:
            The tag of the first message, one less than that of the next; and the bytes of each, at most `nbytes`.
        """
        tag, buffer = new_tags(), self.slots.scratch(nbytes)
        link.warm_ups = {self._transport.recv(tag + index, buffer) for index in range(count)}
        for ticket in link.warm_ups:
            self.path.warm_ups[ticket] = partial(self._warmed_up, link, ticket)
        self.path.lock.is_handshaking = True
        return tag, buffer.nbytes

    def forget_warm_ups(self, link: Link) -> None:
        """Stop waiting for the warm-up messages of a link. Idempotent."""
        while link.warm_ups:
            self._transport.cancel(link.warm_ups.pop())

    def _warmed_up(self, link: Link, ticket: int, error: KVConnectorError | None) -> None:
        if ticket not in link.warm_ups:
            return  # it was forgotten
        # a producer with smaller slots sends a shorter message, which warms the lanes as well
        error = None if isinstance(error, MessageSizeError) else error
        link.warm_ups.remove(ticket)
        if error is not None or not link.warm_ups:
            link.warm_ups.clear()
            self.path.events.append(ev.WarmedUp(link, error))

    def submit(self, read: RankRead) -> None:
        """Receive a read. `ReceivePosted` follows once there are slots, then `ReceiveFinished`; or `ReceiveFailed` or
        `ReceiveStopped` once nothing writes its blocks any more, and `ReceiveDrained` once its slots are free.
        """
        self.path.stay_awake()
        read.first_tag = new_tags()
        self.waiting[read] = None
        self.admit()

    def stop(self, read: RankRead) -> None:
        """Write no further chunk into the blocks of a read that `is_stopped`. `ReceiveStopped` follows, unless the read
        has ended.
        """
        if read in self.waiting:
            del self.waiting[read]
            self.path.events.stopped(read)
        elif read in self:
            self.set(read, "stopped", 1)

    def drain(self, read: RankRead, sent_chunks: int | None) -> None:
        """Free the slots in which no chunk will arrive: the peer sends exactly the first `sent_chunks` chunks of this
        stopped or failed read (None: the peer is gone).
        """
        read.limit = min(read.limit, sent_chunks or 0)
        if read not in self:
            return  # the read is over, or has no row yet
        row = self.rows[read.row]
        row["limit"] = min(int(row["limit"]), read.limit)
        for slot in self._posted(read):
            if read.cancelled_s is None:
                read.cancelled_s = self.path.clock()
            self._cancel(slot)

    def _with_slots(self) -> Iterator[RankRead]:
        """Yield the reads with slots or promised ones. There are no more than slots, unlike reads that wait."""
        yield from self.active.values()
        yield from self.promised

    def admit(self) -> None:
        """Promise free slots to waiting reads, in order. The loop gives a receive its slots in the next run."""
        num_free = self.slots.num_free
        for read in self._with_slots():
            if read.row < 0 or not self.rows[read.row]["started_ns"]:
                num_free -= read.window
        while self.waiting and num_free:
            read, _ = self.waiting.popitem(last=False)
            read.window = min(self._window, read.source.num_chunks, num_free)
            num_free -= read.window
            self.promised.append(read)
            self.path.events.append(ev.ReceivePosted(read))

    def begin(self) -> None:
        """Give the reads with promised slots to the loop, before each of its runs. A read whose copies cannot be made
        receives and drops its chunks.
        """
        promised, self.promised = self.promised, []
        copies, slots = self.path.copies, self.slots
        for read in promised:
            source, is_stopped = read.source, read.is_stopped
            if not is_stopped:
                try:
                    read.jobs = copies.make_jobs(source, read.blocks, packing=False)
                except (RelayoutError, KVConnectorError) as error:
                    read.error, is_stopped = as_connector_error(error), True
            if is_stopped:
                read.jobs = copies.unread_jobs_of(source, slots.slot_bytes)
            self.run(
                read,
                first_tag=read.first_tag,
                num_chunks=source.num_chunks,
                window=read.window,
                limit=min(read.limit, source.num_chunks),
                stopped=is_stopped,
            )

    def poll(self) -> None:
        """Report the receives' progress."""
        for read in list(self.active.values()):
            row = self.values(read)
            unpacked, num_chunks, phase = row["num_unpacked"], row["num_chunks"], row["phase"]
            if read.num_moved < unpacked < num_chunks and not row["stopped"]:
                read.share = unpacked / num_chunks
                self.path.events.append(ev.ReceiveAdvanced(read))
            read.num_moved = unpacked
            if phase != r.RUNNING and not read.is_quiet:
                read.is_quiet = True
                self.path.events.append(self._ended(read, row))
            if phase == r.OVER:
                if unpacked < num_chunks:
                    self.path.events.append(ev.ReceiveDrained(read))
                self.forget(read)

    def refresh(self) -> None:
        """Take the slots from cancelled operations that do not end. Drop messages that belong to no read: UCX would
        keep all of them for a receive, no matter how many.
        """
        awaited = {read.first_tag for read in self._with_slots()}
        count = self._transport.discard_unexpected(awaited, -MAX_CHUNKS)
        if count:
            details = f"{count} messages of no read, or late ones of a read that was given up"
            self.refusals.note("messages over UCX", "unknown tag", details, count)
        self.slots.end_quarantines()
        latest_s = self.path.clock() - self._quarantine_s
        for read in self.active.values():
            if read.cancelled_s is not None and read.cancelled_s <= latest_s:
                for slot in self._posted(read):
                    self.rows[read.row]["num_posted"] -= 1
                    self.slots.quarantine(slot, self._adopt(slot, read))

    def release(self) -> None:
        """Receive nothing more, and leave operations under way to the transport."""
        self.promised.clear()
        for read in self.active.values():
            read.limit = 0
            for slot in self._posted(read):
                self._cancel(slot)
                self._adopt(slot, read)
                self.slots.rows[slot]["state"] = r.ARRIVED

    def _cancel(self, slot: int) -> None:
        """End the receive of a slot, if its message is not arriving."""
        self._transport.libucp.request_cancel(int(self.slots.rows[slot]["request"]))

    def _adopt(self, slot: int, read: RankRead) -> Callable[[], bool]:
        """Leave a slot's operation and its memory to the transport. See `UcxTransport.adopt`."""
        request = int(self.slots.rows[slot]["request"])
        return self._transport.adopt(request, read.first_tag, self.slots.buffer(slot), None)

    def _posted(self, read: RankRead) -> list[int]:
        """Return the slots in which a read awaits a chunk that its peer will not send."""
        slots = self.slots.rows
        posted = (
            (slots["state"] == r.POSTED)
            & (slots["program"] == read.row)
            & (slots["chunk"] >= read.limit)
        )
        found: list[int] = posted.nonzero()[0].tolist()
        return found

    def _ended(self, read: RankRead, row: dict[str, int]) -> object:
        """Return the event that ends a read, which writes its blocks no more."""
        if row["num_unpacked"] < row["num_chunks"]:
            error = read.error or error_of(row, self._transport)
            return ev.ReceiveFailed(read, error) if error else ev.ReceiveStopped(read)
        times = ("started_ns", "arriving_ns", "arrived_ns", "ended_ns")
        started_s, arriving_s, arrived_s, ended_s = [row[each] / NS_PER_S for each in times]
        phases = Phase("wire", arriving_s, arrived_s), Phase("unpack", arriving_s, ended_s)
        path = ev.PACKED_PATH + ev.TCP_FALLBACK * read.worker.link.is_tcp_fallback
        return ev.ReceiveFinished(read, ended_s - started_s, path, phases)
