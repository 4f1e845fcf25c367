"""Transition tables: which event may happen in which state, and where it may lead.

A machine's table is data: `{state: {event type: allowed next states}}`. An event that the table does not list for the
present state raises `LocalProtocolError` with the story of what happened before, and changes nothing. The diagrams in
docs/protocol.md show these tables.
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
        self._cause: tuple[float, type] | None = None
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
        self._cause = now, kind

    def move(self, target: StateT) -> None:
        """Go to `target`."""
        # our own invariants: handlers and table are written together
        assert self._cause is not None, self._label
        now, kind = self._cause
        assert target in self._table.rows[self.state].get(kind, ()), (self._label, kind, target)
        if target is not self.state:
            if self._steps is None:  # thousands that are queued have made no step yet
                self._steps = deque(maxlen=STORY_LENGTH)
            self._steps.append((now, self.state, target, kind))
        self.state = target
