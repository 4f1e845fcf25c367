"""Meeting the workers on the other side: an endpoint to each consumer, opened with a message that warms its lanes up,
and the warm-up messages that are awaited from producers.
"""

from __future__ import annotations

from secrets import randbits

from kvconnector.datapath.base import EventQueue
from kvconnector.errors import KVConnectorError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Buffer, Completion, MessageSizeError, Transport
from kvconnector.wire.messages import CHUNK_TAG_BITS, TAG_BITS, Probe

_BLOCK_BITS = TAG_BITS - CHUNK_TAG_BITS


def new_tags() -> int:
    """The first of `MAX_CHUNKS` tags for one read or warm-up message: a block that nobody can guess.

    Whoever reaches the transport's port can send to it, but the tags of receives travel in authenticated messages only.
    A block that was drawn before is as unlikely to come again.
    """
    return randbits(_BLOCK_BITS) << CHUNK_TAG_BITS


class WarmUps:
    """The warm-up messages that one worker awaits from producers. That one has come goes to `events`."""

    def __init__(self, transport: Transport, events: EventQueue) -> None:
        self._transport = transport
        self._events = events
        self._by_link: dict[LinkId, set[int]] = {}
        self._by_ticket: dict[int, LinkId] = {}

    def expect(self, link: LinkId, buffer: Buffer, count: int = 1) -> tuple[int, int]:
        """See `Receives.expect_warm_up`. `buffer` is for bytes without meaning, of `count` messages with tags from the
        one returned on: `WarmedUp` follows the last of them.
        """
        tag = new_tags()
        tickets = {self._transport.recv(tag + index, buffer) for index in range(count)}
        self._by_link[link] = tickets
        self._by_ticket |= dict.fromkeys(tickets, link)
        return tag, buffer.nbytes

    def forget(self, link: LinkId) -> None:
        for ticket in self._by_link.pop(link, ()):
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
        awaited = self._by_link.get(link, set())
        if completion.ticket in awaited:
            awaited.remove(completion.ticket)
            if error is not None or not awaited:
                del self._by_link[link]
                self._events.append(ev.WarmedUp(link, error))
        return True

    @property
    def is_awaited(self) -> bool:
        """Returns True if a warm-up message is awaited, or a receive of one is not over yet."""
        return bool(self._by_ticket)


class Endpoints:
    """The endpoints of one worker by link. What becomes of them goes to `events`."""

    def __init__(self, transport: Transport, events: EventQueue) -> None:
        self._transport = transport
        self._events = events
        self._by_link: dict[LinkId, int] = {}
        self._warm_ups: dict[int, LinkId] = {}

    def __contains__(self, link: LinkId) -> bool:
        return link in self._by_link

    def get(self, link: LinkId) -> int | None:
        """The transport's endpoint, while it is open."""
        return self._by_link.get(link)

    def links(self) -> list[LinkId]:
        """Whom there is an endpoint to."""
        return list(self._by_link)

    def open(self, link: LinkId, address: bytes, warm_up_tag: int, warm_up: Buffer) -> None:
        """See `Sends.open_endpoint`. The bytes of `warm_up` mean nothing."""
        try:
            endpoint = self._transport.connect(address)
            self._by_link[link] = endpoint
            self._warm_ups[self._transport.send(endpoint, warm_up_tag, warm_up)] = link
        except KVConnectorError as error:
            self._events.append(ev.EndpointFailed(link, error))
            return
        self._events.append(ev.EndpointOpened(link))

    def probe(self, link: LinkId, probe: Probe, buffer: Buffer) -> None:
        """See `Sends.probe`. The bytes of `buffer` mean nothing."""
        endpoint = self._by_link.get(link)
        if endpoint is None:
            return
        for index in range(probe.count):
            ticket = self._transport.send(endpoint, probe.first_tag + index, buffer)
            self._warm_ups[ticket] = link

    def close(self, link: LinkId) -> None:
        """Forget a consumer. No effect if there is no endpoint to it."""
        endpoint = self._by_link.pop(link, None)
        if endpoint is not None:
            self._transport.disconnect(endpoint)

    def fail(self, link: LinkId, error: KVConnectorError) -> None:
        """The consumer cannot be reached, unless we closed the endpoint ourselves."""
        if link in self._by_link:
            self._events.append(ev.EndpointFailed(link, error))

    def complete(self, completion: Completion) -> LinkId | None:
        """Take a completion of the transport: whose warm-up ended; None if it is no warm-up's."""
        link = self._warm_ups.pop(completion.ticket, None)
        if link is not None and completion.error is not None:
            self.fail(link, completion.error)
        return link

    @property
    def is_warming_up(self) -> bool:
        """Returns True if a warm-up message is on its way."""
        return bool(self._warm_ups)
