"""Messages about a transfer that came before our engine's next step brings its lease: kept for a time."""

from __future__ import annotations

from itertools import islice
from typing import Any, TypeAlias, TypeVar

from kvconnector.session import events as ev
from kvconnector.session.agenda import AT_ONCE, MAX_AT_ONCE, Agenda
from kvconnector.session.commands import LinkId
from kvconnector.wire import messages as m

MAX_EARLY_BYTES = 64 << 20
EVENT_BYTES = 512
"""Bytes that an event takes, besides a read's ranges and blocks: there is room for 131,072 followed prompts."""

EarlyEvent: TypeAlias = ev.FromPeer[m.Read | m.TransferKey]
Name: TypeAlias = tuple[LinkId, int | m.TransferKey]
"""What a link has once: a read by its number, or that it follows, or is done with, a transfer."""
KeyT = TypeVar("KeyT", LinkId, str)


class EarlyEvents:
    """Events of peers, in their order, each once and until its deadline: at most `MAX_EARLY_BYTES`.

    In the `agenda` are the names of events, and this object itself while it has more of lost links to remove.
    """

    def __init__(self, agenda: Agenda[Any]) -> None:
        self._kept: dict[Name, EarlyEvent] = {}
        self._by_transfer: dict[str, dict[Name, None]] = {}
        self._by_link: dict[LinkId, dict[Name, None]] = {}
        self._lost: dict[LinkId, None] = {}
        """Links that are gone and whose events are still to be removed, some at each tick."""
        self._agenda = agenda
        self._nbytes = 0

    def __repr__(self) -> str:
        return f"<{len(self._kept)} early events of {len(self._by_transfer)} transfers>"

    def keep(self, event: EarlyEvent, until: float) -> bool:
        """Keep an event. Returns False if there is no room."""
        name = _name_of(event.link, event.message)
        if name in self._kept:
            return True
        nbytes = _nbytes(event)
        if self._nbytes + nbytes > MAX_EARLY_BYTES:
            return False
        self._nbytes += nbytes
        self._kept[name] = event
        self._by_transfer.setdefault(event.message.transfer_id, {})[name] = None
        self._by_link.setdefault(event.link, {})[name] = None
        self._agenda.plan(name, until)
        return True

    def take(self, transfer_id: str) -> list[EarlyEvent]:
        """Those of a transfer whose lease is here."""
        taken = [self._remove(name) for name in [*self._by_transfer.get(transfer_id, ())]]
        return [event for event in taken if event.link not in self._lost]

    def cancel_read(self, link: LinkId, read_id: int) -> bool:
        """Forget a read. Returns False if it was not among them."""
        if (link, read_id) not in self._kept:
            return False
        self._remove((link, read_id))
        return True

    def drop_link(self, link: LinkId) -> None:
        """The peer is gone. Its events are never taken; `remove_lost` removes them."""
        if link in self._by_link:
            self._lost[link] = None
            self._agenda.plan(self, AT_ONCE)

    def remove_lost(self) -> None:
        """Remove some of the events of links that are gone."""
        link = next(iter(self._lost))
        for name in [*islice(self._by_link.get(link, ()), MAX_AT_ONCE)]:
            self._remove(name)
        if link not in self._by_link:
            del self._lost[link]
        if self._lost:
            self._agenda.plan(self, AT_ONCE)

    def take_late(self, name: Name) -> EarlyEvent | None:
        """The event of this name, whose time is over; None if its link is gone."""
        event = self._remove(name)
        return None if event.link in self._lost else event

    def _remove(self, name: Name) -> EarlyEvent:
        event = self._kept.pop(name)
        self._nbytes -= _nbytes(event)
        self._agenda.forget(name)
        _discard(self._by_transfer, event.message.transfer_id, name)
        _discard(self._by_link, event.link, name)
        return event


def _name_of(link: LinkId, message: m.Read | m.TransferKey) -> Name:
    return link, message.read_id if isinstance(message, m.Read) else message


def _nbytes(event: EarlyEvent) -> int:
    message = event.message
    if not isinstance(message, m.Read):
        return EVENT_BYTES
    blocks_bytes = sum(len(blocks.wire_ids) for blocks in message.blocks)
    return EVENT_BYTES + 64 * len(message.token_ranges) + blocks_bytes


def _discard(index: dict[KeyT, dict[Name, None]], key: KeyT, name: Name) -> None:
    names = index[key]
    del names[name]
    if not names:
        del index[key]
