"""Transition tables: the events that may happen in each state, and the states to which they may lead.

Theory of operation of this room
--------------------------------

*Sessions.* A worker has up to two: a `ProducerSession` and a `ConsumerSession`. `handle(event, now)` takes an event and
calls methods of its `Ports`; `next_deadline()` returns the time of the next `Tick`. There is no other way in or out.
Events are orders of the engine, messages from peers, reports from the data path and from links, and ticks. The port's
methods return nothing and never call the session back. Their results arrive as later events. An exception that a
handler did not expect ends one request or one link: see `containment`.

*Threads and time.* A session has no thread, lock or clock. Only the thread that holds the driver lock calls it.
`now` is the driver's monotonic clock and never goes back. `in_flight` alone may be called from any thread.

*Blocking.* Nothing here blocks. The cost of an event does not grow with the number of queued requests: records are
found in dictionaries and deadlines in an `Agenda`. When one event concerns very many records, the session handles
`MAX_AT_ONCE` of them and leaves the rest to the next ticks, which are due at once. Change a deadline only through the
agenda: a record whose deadline is not planned is never looked at again, and its request waits forever.

*Records.* On each side a request is one record, a `Lease` or a `Load`, and a peer is a `Peer` or a `RemoteEngine`.
Each record has a state that moves along a table. A table is data: `{state: {event type: allowed next states}}`.
`accept` checks that an event may happen now, before anything changes; `move` goes to a state that the accepted event
allows. An event that the table does not list raises `LocalProtocolError` with the record's recent moves. The diagrams
in docs/protocol.md show these tables, and a test keeps them current.

*Messages.* A link delivers messages in order, and if it loses one, the link itself is lost. So nothing is repeated on
a link. Messages sent on a lost link have no effect on the next one: a new link begins with a greeting, and heartbeats
name all transfers again. A message may come late, twice (from a producer's earlier link), or about a request that is
over. Then it changes nothing.

*What breaks if this changes.* If blocks are released before `ReceiveStopped`, or before the last `SendOver`, a copy
reads or writes memory that already belongs to another request. If a load is reported twice, vLLM's scheduler fails an
assertion and its engine ends. If a read is forgotten before `ReceiveDrained`, its slots stay taken for good.

"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kvconnector.errors import InternalError, LocalProtocolError
from kvconnector.session.link import kind_of

StateT = TypeVar("StateT", bound=Enum)

STORY_LENGTH = 24


@dataclass(frozen=True)
class Table(Generic[StateT]):
    """A transition table with a name for messages and diagrams."""

    name: str
    start: StateT
    rows: Mapping[StateT, Mapping[type, frozenset[StateT]]]


def staying(state: StateT, *events: type) -> dict[type, frozenset[StateT]]:
    """Return the part of a table's row for `events` that leave `state` as it is."""
    return dict.fromkeys(events, frozenset({state}))


class Tracked(Generic[StateT]):
    """A record whose state moves only along its table, and which remembers its latest moves."""

    def __init__(self, table: Table[StateT], label: str) -> None:
        self._table = table
        self._label = label
        self.state = table.start
        self._now = 0.0
        self._kind: type | None = None
        self._steps: deque[tuple[float, StateT, StateT, type]] | None = None

    @property
    def story(self) -> list[str]:
        """The latest moves, oldest first: time in seconds, old state, new state and event."""
        return [
            f"{now:.3f} {state.value} -> {target.value} ({event.__name__})"
            for now, state, target, event in self._steps or ()
        ]

    def accept(self, event: object, now: float) -> None:
        """Check that `event` may happen now, before anything changes. The next moves are made because of it.

        Raises:
            LocalProtocolError: the table does not list it for the present state; the text has the latest moves.
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
        # no input of a user or a peer reaches these: handlers and table are written together
        kind = self._kind
        assert kind is not None, self._label
        assert target in self._table.rows[self.state].get(kind, ()), (self._label, kind, target)
        self._record(target, kind)

    def force(self, target: StateT, now: float) -> None:
        """Go to `target` from any state, after an unexpected exception: see `containment`."""
        self._now = now
        self._record(target, InternalError)

    def _record(self, target: StateT, kind: type) -> None:
        if target is not self.state:
            if self._steps is None:  # created late: thousands of queued records have not moved yet
                self._steps = deque(maxlen=STORY_LENGTH)
            self._steps.append((self._now, self.state, target, kind))
        self.state = target
