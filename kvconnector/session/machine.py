"""Transition tables: which event may happen in which state, and where it may lead.

Theory of operation of this room
--------------------------------

*What a session is.* A worker has up to two, `ProducerSession` and `ConsumerSession`. `handle(event, now)` takes an
event and calls a `Port`; `next_deadline()` says when to send the next `Tick`. Nothing else goes in or out. Events are
the engine's orders, messages of peers, reports of the data path and of links, and ticks. What the port's methods do is
out of the session's sight: they return nothing, never call it back, and what comes of them is a later event.

*Threads and time.* A session has no thread, lock or clock. One thread at a time calls it: the one that has the driver
lock. `now` is the driver's monotonic clock and never goes back. Only `in_flight` may be called by any thread.

*What may block.* Nothing. What an event costs does not grow with what is queued: records are found in dictionaries and
deadlines in an `Agenda`, and what one event means for very many records is left to the next ticks (`MAX_AT_ONCE` each),
which are due at once. A deadline may only be moved through the agenda: a record with a deadline that is not planned is
never looked at again, and its request waits for ever.

*Records.* A request is one record a side, a `Lease` or a `Load`; a peer is a `Peer` or a `RemoteEngine`. Each has a
state that moves along a table. A table is data: `{state: {event type: allowed next states}}`. `accept` checks that an
event may happen now, before anything is changed; `move` goes to a state that the accepted event allows. An event that
the table does not list raises `LocalProtocolError` with the story of what happened before. The diagrams in
docs/protocol.md show these tables, and a test keeps them current.

*Messages.* A link keeps their order and loses none without being lost itself, so nothing is repeated on it. What was
sent on a lost link counts for nothing on the next one: a new link begins with a greeting, and heartbeats name all
transfers again. Messages may come late, twice (from a producer's earlier link) or about what is over: they change
nothing then.

*What breaks if this is changed.* Releasing blocks before `ReceiveStopped`, or before the last `SendOver`, lets
a copy write or read memory that is another request's. Reporting a load twice kills an engine.
Forgetting a read before `ReceiveDrained` leaves its slots taken for good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from kvconnector.errors import LocalProtocolError
from kvconnector.session.events import kind_of

StateT = TypeVar("StateT", bound=Enum)

STORY_LENGTH = 24


class Table(Generic[StateT]):
    """An immutable transition table with a name for messages and diagrams."""

    def __init__(
        self, name: str, start: StateT, rows: Mapping[StateT, Mapping[type, frozenset[StateT]]]
    ) -> None:
        self.name = name
        self.start = start
        self.rows = rows


def staying(state: StateT, *events: type) -> dict[type, frozenset[StateT]]:
    """A part of a table's row: what may happen in a state, and leaves it as it is."""
    return dict.fromkeys(events, frozenset({state}))


class Tracked(Generic[StateT]):
    """A record with a state that only moves along its table, and remembers how it got there."""

    def __init__(self, table: Table[StateT], label: str) -> None:
        self._table = table
        self._label = label
        self.state = table.start
        self._now = 0.0
        self._kind: type | None = None
        self._steps: deque[tuple[float, StateT, StateT, type]] | None = None

    @property
    def story(self) -> list[str]:
        """The latest moves: when, from where to where, and why."""
        return [
            f"{now:.3f} {state.value} -> {target.value} ({event.__name__})"
            for now, state, target, event in self._steps or ()
        ]

    def accept(self, event: object, now: float) -> None:
        """Check that `event` may happen now, before anything is changed: it is what the next moves are due to.

        Raises:
            LocalProtocolError: it may not; the text tells the record's story.
        """
        kind = kind_of(event)
        if kind not in self._table.rows[self.state]:
            raise LocalProtocolError(
                f"{kind.__name__} is not possible for a {self._table.name} that is {self.state.value}",
                subject=self._label,
                story=self.story,
            )
        self._now, self._kind = now, kind

    def move(self, target: StateT) -> None:
        """Go to `target`."""
        # our own invariants: handlers and table are written together
        kind = self._kind
        assert kind is not None, self._label
        assert target in self._table.rows[self.state].get(kind, ()), (self._label, kind, target)
        if target is not self.state:
            if self._steps is None:  # thousands that are queued have made no step yet
                self._steps = deque(maxlen=STORY_LENGTH)
            self._steps.append((self._now, self.state, target, kind))
        self.state = target
