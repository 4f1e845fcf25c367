"""The warm-up messages that are awaited from producers, and tags for what else is."""

from __future__ import annotations

from secrets import randbits

from kvconnector.datapath.base import EventQueue
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.transport import Buffer, Completion, MessageSizeError
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire.messages import CHUNK_TAG_BITS, TAG_BITS

_BLOCK_BITS = TAG_BITS - CHUNK_TAG_BITS


def new_tags() -> int:
    """The first of `MAX_CHUNKS` tags for one read or warm-up message: a block that nobody can guess.

    Whoever reaches the transport's port can send to it, but the tags of receives travel in authenticated messages only.
    A block that was drawn before is as unlikely to come again.
    """
    return randbits(_BLOCK_BITS) << CHUNK_TAG_BITS


class WarmUps:
    """The warm-up messages that one worker awaits from producers. That one has come goes to `events`."""

    def __init__(self, transport: UcxTransport, events: EventQueue) -> None:
        self._transport = transport
        self._events = events
        self._by_ticket: dict[int, Link] = {}

    def expect(self, link: Link, buffer: Buffer, count: int = 1) -> tuple[int, int]:
        """See `Receives.expect_warm_up`. `buffer` is for bytes without meaning, of `count` messages with tags from the
        one returned on: `WarmedUp` follows the last of them.
        """
        tag = new_tags()
        link.warm_ups = {self._transport.recv(tag + index, buffer) for index in range(count)}
        self._by_ticket |= dict.fromkeys(link.warm_ups, link)
        return tag, buffer.nbytes

    def forget(self, link: Link) -> None:
        """Await those of a link no more. Idempotent."""
        while link.warm_ups:
            self._transport.cancel(link.warm_ups.pop())

    def forget_all(self) -> None:
        """Await none of them any more."""
        for link in self._by_ticket.values():
            self.forget(link)

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is no warm-up's."""
        link = self._by_ticket.pop(completion.ticket, None)
        if link is None:
            return False
        # a producer with smaller slots sends a shorter message, which warms the lanes as well
        error = None if isinstance(completion.error, MessageSizeError) else completion.error
        if completion.ticket in link.warm_ups:
            link.warm_ups.remove(completion.ticket)
            if error is not None or not link.warm_ups:
                link.warm_ups.clear()
                self._events.append(ev.WarmedUp(link, error))
        return True

    @property
    def is_awaited(self) -> bool:
        """Returns True if a warm-up message is awaited, or a receive of one is not over yet."""
        return bool(self._by_ticket)
