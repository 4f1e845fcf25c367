"""What consumers say of a transfer before our engine's next step brings its lease: kept for a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvconnector.session import events as ev
from kvconnector.session.commands import NEVER, LinkId
from kvconnector.wire import messages as m

MAX_EARLY_EVENTS = 1024

EarlyEvent: TypeAlias = ev.FromPeer[m.Read | m.TransferKey]


class EarlyEvents:
    """Events of peers, in their order, each until its deadline: at most `MAX_EARLY_EVENTS`."""

    def __init__(self) -> None:
        self._kept: list[tuple[EarlyEvent, float]] = []

    def keep(self, event: EarlyEvent, until: float) -> bool:
        """Whether there was room."""
        has_room = len(self._kept) < MAX_EARLY_EVENTS
        if has_room:
            self._kept.append((event, until))
        return has_room

    def take(self, transfer_id: str) -> list[EarlyEvent]:
        """Those of a transfer whose lease is here."""
        return self._remove(lambda event, _: event.message.transfer_id == transfer_id)

    def cancel_read(self, link: LinkId, read_id: int) -> bool:
        """Whether the read was among them."""
        return bool(
            self._remove(
                lambda event, _: (
                    event.link == link
                    and isinstance(event.message, m.Read)
                    and event.message.read_id == read_id
                )
            )
        )

    def drop_link(self, link: LinkId) -> None:
        """The peer is gone."""
        self._remove(lambda event, _: event.link == link)

    def take_late(self, now: float) -> list[EarlyEvent]:
        """Those whose time is over."""
        return self._remove(lambda _, until: until <= now)

    def next_deadline(self) -> float:
        """When the first one's time is over."""
        return min((until for _, until in self._kept), default=NEVER)

    def _remove(self, is_meant: Callable[[EarlyEvent, float], bool]) -> list[EarlyEvent]:
        removed = [event for event, until in self._kept if is_meant(event, until)]
        self._kept = [kept for kept in self._kept if not is_meant(*kept)]
        return removed
