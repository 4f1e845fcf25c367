"""Deadlines of many things, with O(log n) per change. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

ThingT = TypeVar("ThingT", bound=Hashable)

NEVER = float("inf")
"""The deadline of a thing that waits for nothing."""

AT_ONCE = 0.0
"""The deadline of a thing that the next tick must handle."""

MAX_AT_ONCE = 16
"""The most things that one event handles, starts or ends. The next tick is then due at once and continues. So no event
keeps the engine's thread waiting for long, no matter how many requests it concerns.
"""


class Agenda(Generic[ThingT]):
    """The deadlines of all records of one session, or of the connections of one control channel.

    To extend a deadline, change only the record: `due` then returns it too early, and the caller plans it again. So a
    deadline that every message extends costs nothing. A forgotten thing is released at once, though it leaves two
    numbers on the heap until its time: a request may end minutes before its deadline. A thing with more work than
    `MAX_AT_ONCE` is planned for `AT_ONCE`.
    """

    def __init__(self) -> None:
        self._planned: dict[ThingT, tuple[float, int]] = {}
        self._things: dict[int, ThingT] = {}
        self._heap: list[tuple[float, int]] = []
        self._new: list[tuple[float, int]] = []
        """Planned since the last call of `next_deadline`, and not on the heap yet."""
        self._numbers = count()

    def plan(self, thing: ThingT, at: float) -> None:
        """Have `due` return `thing` no later than `at`."""
        known = self._planned.get(thing)
        if at < (NEVER if known is None else known[0]):
            if known is not None:
                self.forget(thing)
            number = next(self._numbers)
            self._planned[thing] = at, number
            self._things[number] = thing
            self._new.append((at, number))

    def forget(self, thing: ThingT) -> None:
        """Remove `thing`, if it is planned."""
        _, number = self._planned.pop(thing, (NEVER, None))
        if number is not None:
            del self._things[number]

    def next_deadline(self) -> float:
        """Return the earliest deadline; infinity if there is none."""
        while self._new:
            heappush(self._heap, self._new.pop())
        return self._first()

    def due(self, now: float) -> Iterator[ThingT]:
        """Remove and yield the things due by `now`, earliest first, at most `MAX_AT_ONCE` of them. Things planned
        meanwhile come in the next call, and so do the others if the caller stops early.
        """
        first = self.next_deadline()
        for _ in range(MAX_AT_ONCE):
            if first > now:
                break
            thing = self._things[heappop(self._heap)[1]]
            self.forget(thing)
            yield thing
            first = self._first()

    def _first(self) -> float:
        while self._heap and self._heap[0][1] not in self._things:
            heappop(self._heap)  # forgotten, or planned for an earlier time since
        return self._heap[0][0] if self._heap else NEVER
