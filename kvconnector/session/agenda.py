"""When to look at each of many things: O(log n) for each change, whatever waits. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from kvconnector.session.port import NEVER

ThingT = TypeVar("ThingT", bound=Hashable)

AT_ONCE = 0.0
"""The time of what is to be looked at by the next tick."""

MAX_AT_ONCE = 16
"""Things that one `Tick` looks at, and what one event starts or ends at once: the next tick, which is due at once, goes
on. So no event keeps the engine's thread waiting for long, however many requests it is about.
"""


class Agenda(Generic[ThingT]):
    """Things with a time at which they are to be looked at: the deadlines of one session, whatever has them.

    A thing whose deadline moves away stays where it is: it is found too early, and planned again by whoever looks. So
    a deadline that is extended with every message costs nothing. What is forgotten leaves two numbers until its time,
    and is not kept itself: a request may end minutes before its deadline. What has more work than one look allows is
    planned for `AT_ONCE`.
    """

    def __init__(self) -> None:
        self._planned: dict[ThingT, tuple[float, int]] = {}
        self._things: dict[int, ThingT] = {}
        self._heap: list[tuple[float, int]] = []
        self._new: list[tuple[float, int]] = []
        """Planned since the last look, and not on the heap yet."""
        self._numbers = count()

    def plan(self, thing: ThingT, at: float) -> None:
        """Look at `thing` no later than `at`."""
        if at < self._planned.get(thing, (NEVER,))[0]:
            self.forget(thing)
            number = next(self._numbers)
            self._planned[thing] = at, number
            self._things[number] = thing
            self._new.append((at, number))

    def forget(self, thing: ThingT) -> None:
        """Do not look at `thing` any more."""
        _, number = self._planned.pop(thing, (NEVER, None))
        if number is not None:
            del self._things[number]

    def next_deadline(self) -> float:
        """The time of the first look; infinite if there is none."""
        while self._new:
            heappush(self._heap, self._new.pop())
        return self._first()

    def due(self, now: float) -> Iterator[ThingT]:
        """Take what is to be looked at by `now`, soonest first, at most `MAX_AT_ONCE` things. What is planned meanwhile
        is for the next call, as is the rest if the caller stops.
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
