"""How a receive begins: its tags, the warm-up message of its producer, and the queue for slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from secrets import randbits
from typing import Generic, TypeVar

from kvconnector.datapath.base import DataEvent, Untold
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Buffer, Completion, MessageSizeError, Transport
from kvconnector.wire.messages import CHUNK_TAG_BITS, MAX_CHUNKS, TAG_BITS

WARM_UP_BYTES = 1 << 20

ReadT = TypeVar("ReadT")


_BLOCK_BITS = TAG_BITS - CHUNK_TAG_BITS


def new_tags() -> int:
    """The first of `MAX_CHUNKS` tags for one read or warm-up message: a block that nobody can guess.

    Whoever reaches the transport's port can send to it, but only who was told in an authenticated message knows a tag
    that a receive is posted for. A block that was drawn before is as unlikely to come again.
    """
    return randbits(_BLOCK_BITS) << CHUNK_TAG_BITS


class WarmUps:
    """The warm-up messages that one worker awaits from producers. That one has come goes to `events`."""

    def __init__(self, transport: Transport, events: Untold[DataEvent]) -> None:
        self._transport = transport
        self._events = events
        self._by_link: dict[LinkId, int] = {}
        self._by_ticket: dict[int, LinkId] = {}

    def expect(self, link: LinkId, buffer: Buffer) -> tuple[int, int]:
        """See `DataPath.expect_warm_up`. `buffer` is for bytes without meaning."""
        tag = new_tags()
        ticket = self._transport.recv(tag, buffer)
        self._by_link[link] = ticket
        self._by_ticket[ticket] = link
        return tag, buffer.nbytes

    def forget(self, link: LinkId) -> None:
        """See `DataPath.forget_warm_up`."""
        ticket = self._by_link.pop(link, None)
        if ticket is not None:
            self._transport.cancel(ticket)

    def forget_all(self) -> None:
        """Await none of them any more."""
        for link in list(self._by_link):
            self.forget(link)

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is no warm-up's."""
        link = self._by_ticket.pop(completion.ticket, None)
        if link is None:
            return False
        # a producer with smaller slots sends a shorter message, which warms the lanes as well
        error = None if isinstance(completion.error, MessageSizeError) else completion.error
        if self._by_link.get(link) == completion.ticket:
            del self._by_link[link]
            self._events.append(ev.WarmedUp(link, error))
        return True

    @property
    def is_awaited(self) -> bool:
        """Whether a warm-up message is awaited, or a receive of one not over yet."""
        return bool(self._by_ticket)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting(Generic[ReadT]):
    """A receive in front of its first slot. `read` is what its data path wants to know of it."""

    read_id: int
    read: ReadT
    num_chunks: int
    first_tag: int


class AdmissionQueue(Generic[ReadT]):
    """The receives of one worker that wait for slots, in the order they were submitted.

    A read gets its slots when it starts, at most `window`, and keeps them: what the producer may send is always
    awaited, so no two workers can wait for each other's slots. What becomes of those that wait goes to `events`.
    """

    def __init__(self, *, window: int, events: Untold[DataEvent]) -> None:
        self._window = window
        self._events = events
        self._queue: deque[Waiting[ReadT]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, read_id: int, read: ReadT, num_chunks: int) -> None:
        """See `DataPath.submit_receive`, and `Waiting`."""
        if num_chunks > MAX_CHUNKS:
            self.refuse(read_id, TransportError("a read has too many chunks", chunks=num_chunks))
            return
        self._queue.append(Waiting(read_id, read, num_chunks, new_tags()))

    def refuse(self, read_id: int, error: KVConnectorError) -> None:
        """End a receive that cannot be, and of which the producer has not been told."""
        self._events += [ev.ReceiveFailed(read_id, error), ev.ReceiveDrained(read_id)]

    def stop(self, read_id: int) -> bool:
        """End a receive that waits; False if it does not."""
        for waiting in self._queue:
            if waiting.read_id == read_id:
                self._queue.remove(waiting)
                self._events += [ev.ReceiveStopped(read_id), ev.ReceiveDrained(read_id)]
                return True
        return False

    def admit(self, num_free: int) -> Iterator[tuple[Waiting[ReadT], int]]:
        """The receives that begin now, and how many of `num_free` slots each gets, which its producer will be told."""
        while self._queue and num_free:
            waiting = self._queue.popleft()
            num_slots = min(self._window, waiting.num_chunks, num_free)
            num_free -= num_slots
            self._events.append(ev.ReceivePosted(waiting.read_id, num_slots, waiting.first_tag))
            yield waiting, num_slots
