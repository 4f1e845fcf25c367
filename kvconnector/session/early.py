"""Messages about a transfer that came before our engine's next step brings its lease: kept for a time."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from kvconnector.session import events as ev
from kvconnector.session.agenda import AT_ONCE, MAX_AT_ONCE, Agenda
from kvconnector.wire import messages as m

if TYPE_CHECKING:
    from kvconnector.session.peers import Peer

MAX_EARLY_BYTES = 64 << 20
EVENT_BYTES = 512
"""Bytes that an event takes, besides a read's ranges and blocks: there is room for 131,072 followed prompts."""

EarlyEvent: TypeAlias = ev.FromPeer[m.Read | m.TransferKey]


class EarlyEvents:
    """Events of peers, in their order, each once and until its deadline: at most `MAX_EARLY_BYTES`. A peer has its own
    by name. In the `agenda` is each, and this object itself while it has more of lost peers to remove.
    """

    def __init__(self, agenda: Agenda[Any]) -> None:
        self._by_transfer: dict[str, dict[EarlyEvent, Peer]] = {}
        self._lost: deque[Peer] = deque()
        self._agenda = agenda
        self._nbytes = 0

    def __repr__(self) -> str:
        return f"<early events of {len(self._by_transfer)} transfers, {self._nbytes} bytes>"

    def keep(self, peer: Peer, event: EarlyEvent, until: float) -> bool:
        """Keep an event. Returns False if there is no room."""
        name, nbytes = _name_of(event), _nbytes(event)
        if name in peer.early:
            return True
        if self._nbytes + nbytes > MAX_EARLY_BYTES:
            return False
        self._nbytes += nbytes
        peer.early[name] = event
        self._by_transfer.setdefault(event.message.transfer_id, {})[event] = peer
        self._agenda.plan(event, until)
        return True

    def take(self, transfer_id: str) -> list[EarlyEvent]:
        """Those of a transfer whose lease is here."""
        events = [*self._by_transfer.get(transfer_id, ())]
        return [event for event in events if not self.remove(event).is_lost]

    def remove(self, event: EarlyEvent) -> Peer:
        """Forget an event. Returns whose it is."""
        same = self._by_transfer[event.message.transfer_id]
        peer = same.pop(event)
        if not same:
            del self._by_transfer[event.message.transfer_id]
        del peer.early[_name_of(event)]
        self._nbytes -= _nbytes(event)
        self._agenda.forget(event)
        return peer

    def drop(self, peer: Peer) -> None:
        """The peer is gone. Its events are never taken; `remove_lost` removes them."""
        if peer.early:
            self._lost.append(peer)
            self._agenda.plan(self, AT_ONCE)

    def remove_lost(self) -> None:
        """Remove some of the events of peers that are gone."""
        peer = self._lost[0]
        for event in [*islice(peer.early.values(), MAX_AT_ONCE)]:
            self.remove(event)
        if not peer.early:
            self._lost.popleft()
        if self._lost:
            self._agenda.plan(self, AT_ONCE)


def _name_of(event: EarlyEvent) -> int | m.TransferKey:
    """What a peer has once: a read by its number, or that it follows, or is done with, a transfer."""
    return event.message.read_id if isinstance(event.message, m.Read) else event.message


def _nbytes(event: EarlyEvent) -> int:
    message = event.message
    if not isinstance(message, m.Read):
        return EVENT_BYTES
    blocks_bytes = sum(len(blocks.wire_ids) for blocks in message.blocks)
    return EVENT_BYTES + 64 * len(message.token_ranges) + blocks_bytes
