"""What consumers say of a transfer before our engine's next step brings its lease: kept for a time."""

from __future__ import annotations

from typing import TypeAlias

from kvconnector.ids import TransferId
from kvconnector.session import events as ev
from kvconnector.session.commands import NEVER, LinkId

MAX_EARLY_EVENTS = 1024

EarlyEvent: TypeAlias = ev.ReadAsked | ev.Followed | ev.Confirmed | ev.GivenUp


class EarlyEvents:
    """Events of peers, in their order, each until its deadline: at most `MAX_EARLY_EVENTS`."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, EarlyEvent]] = []

    def keep(self, event: EarlyEvent, until: float) -> bool:
        """Whether there was room."""
        has_room = len(self._kept) < MAX_EARLY_EVENTS
        if has_room:
            self._kept.append((until, event))
        return has_room

    def take(self, transfer_id: TransferId) -> list[EarlyEvent]:
        """Those of a transfer whose lease is here."""
        return self._remove(
            [event for _, event in self._kept if _transfer_of(event) == transfer_id]
        )

    def cancel_read(self, link: LinkId, read_id: int) -> bool:
        """Whether the read was among them."""
        return bool(
            self._remove(
                [
                    event
                    for _, event in self._kept
                    if isinstance(event, ev.ReadAsked)
                    and (event.link, event.read.read_id) == (link, read_id)
                ]
            )
        )

    def drop_link(self, link: LinkId) -> None:
        """The peer is gone."""
        self._remove([event for _, event in self._kept if event.link == link])

    def take_late(self, now: float) -> list[EarlyEvent]:
        """Those whose time is over."""
        return self._remove([event for until, event in self._kept if until <= now])

    def next_deadline(self) -> float:
        """When the first one's time is over."""
        return min((until for until, _ in self._kept), default=NEVER)

    def _remove(self, events: list[EarlyEvent]) -> list[EarlyEvent]:
        if events:
            self._kept = [pair for pair in self._kept if not any(pair[1] is e for e in events)]
        return events


def _transfer_of(event: EarlyEvent) -> TransferId:
    if isinstance(event, ev.ReadAsked):
        return TransferId(event.read.transfer_id)
    if isinstance(event, ev.Followed):
        return TransferId(event.follow.transfer_id)
    ending = event.done if isinstance(event, ev.Confirmed) else event.abort
    return TransferId(ending.transfer_id)
