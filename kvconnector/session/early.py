"""Messages about a transfer that came before our engine's next step brings its lease: kept for a time."""

from __future__ import annotations

from itertools import count, islice
from typing import TypeAlias, TypeVar

from kvconnector.session import events as ev
from kvconnector.session.agenda import MAX_AT_ONCE, Agenda
from kvconnector.session.commands import LinkId
from kvconnector.wire import messages as m

MAX_EARLY_BYTES = 64 << 20
EVENT_BYTES = 512
"""Bytes that an event takes, besides a read's ranges and blocks: there is room for 131,072 followed prompts."""

EarlyEvent: TypeAlias = ev.FromPeer[m.Read | m.TransferKey]
KeyT = TypeVar("KeyT", LinkId, str)


class EarlyEvents:
    """Events of peers, in their order, each until its deadline: at most `MAX_EARLY_BYTES`. A link follows a transfer
    once, however often it says so.
    """

    def __init__(self) -> None:
        self._kept: dict[int, EarlyEvent] = {}
        self._by_transfer: dict[str, dict[int, None]] = {}
        self._by_link: dict[LinkId, dict[int, None]] = {}
        self._lost: dict[LinkId, None] = {}
        """Links that are gone and whose events are still to be removed, some at each tick."""
        self._singular: dict[object, int] = {}
        self._agenda: Agenda[int] = Agenda()
        """When the time of each is over."""
        self._numbers = count()
        self._nbytes = 0

    def __repr__(self) -> str:
        return f"<{len(self._kept)} early events of {len(self._by_transfer)} transfers>"

    def keep(self, event: EarlyEvent, until: float) -> bool:
        """Keep an event. Returns False if there is no room."""
        name = _singular(event)
        if name in self._singular:
            return True
        nbytes = _nbytes(event)
        if self._nbytes + nbytes > MAX_EARLY_BYTES:
            return False
        number = next(self._numbers)
        self._nbytes += nbytes
        self._kept[number] = event
        self._by_transfer.setdefault(event.message.transfer_id, {})[number] = None
        self._by_link.setdefault(event.link, {})[number] = None
        if name is not None:
            self._singular[name] = number
        self._agenda.plan(number, until)
        return True

    def take(self, transfer_id: str) -> list[EarlyEvent]:
        """Those of a transfer whose lease is here."""
        taken = [self._remove(number) for number in [*self._by_transfer.get(transfer_id, ())]]
        return [event for event in taken if event.link not in self._lost]

    def cancel_read(self, link: LinkId, read_id: int) -> bool:
        """Forget a read. Returns False if it was not among them."""
        number = self._singular.get((link, read_id))
        if number is not None:
            self._remove(number)
        return number is not None

    def drop_link(self, link: LinkId) -> None:
        """The peer is gone. Its events are never taken; `take_late` removes them."""
        if link in self._by_link:
            self._lost[link] = None

    def next_deadline(self) -> float:
        """The time of the next `take_late`; infinite if there is none."""
        return 0.0 if self._lost else self._agenda.next_deadline()

    def take_late(self, now: float) -> list[EarlyEvent]:
        """Some of those whose time is over. Also removes some of those of links that are gone."""
        late = [self._remove(number) for number in self._agenda.due(now)]
        kept = [event for event in late if event.link not in self._lost]
        if self._lost:
            link = next(iter(self._lost))
            for number in [*islice(self._by_link.get(link, ()), MAX_AT_ONCE)]:
                self._remove(number)
            if link not in self._by_link:
                del self._lost[link]
        return kept

    def _remove(self, number: int) -> EarlyEvent:
        event = self._kept.pop(number)
        self._nbytes -= _nbytes(event)
        self._agenda.forget(number)
        name = _singular(event)
        if name is not None:
            del self._singular[name]
        _discard(self._by_transfer, event.message.transfer_id, number)
        _discard(self._by_link, event.link, number)
        return event


def _singular(event: EarlyEvent) -> object:
    """The name of an event that a link has once: of a read its number, of what it follows the transfer."""
    message = event.message
    if isinstance(message, m.Read):
        return event.link, message.read_id
    return (event.link, message) if isinstance(message, m.Follow) else None


def _nbytes(event: EarlyEvent) -> int:
    message = event.message
    if not isinstance(message, m.Read):
        return EVENT_BYTES
    blocks_bytes = sum(len(blocks.wire_ids) for blocks in message.blocks)
    return EVENT_BYTES + 64 * len(message.token_ranges) + blocks_bytes


def _discard(index: dict[KeyT, dict[int, None]], key: KeyT, number: int) -> None:
    numbers = index[key]
    del numbers[number]
    if not numbers:
        del index[key]
