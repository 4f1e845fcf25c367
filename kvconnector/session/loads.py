"""The loads from one engine, by transfer and in the order of heartbeats, and those that are to learn of its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

from kvconnector.ids import EngineAddress
from kvconnector.session import events as ev
from kvconnector.session.agenda import AT_ONCE, MAX_AT_ONCE, Agenda
from kvconnector.session.commands import LinkId
from kvconnector.session.load import Load
from kvconnector.wire import messages as m

OfEngine: TypeAlias = ev.EngineReady | ev.EngineLost


class Backlog:
    """Loads that are to know of an event of their engine, `MAX_AT_ONCE` at a time. While there are more, it is in the
    `agenda`.
    """

    def __init__(self, agenda: Agenda[Any]) -> None:
        self._queue: deque[tuple[OfEngine, Iterator[Load]]] = deque()
        self._agenda = agenda

    def add(self, event: OfEngine, loads: Iterable[Load]) -> None:
        """These loads are to know of the event. Nobody may change the collection any more."""
        self._queue.append((event, iter(loads)))

    def loss_of(self, engine: EngineAddress) -> ev.EngineLost | None:
        """The latest loss of an engine of which some of these loads do not know yet."""
        lost = (event for event, _ in reversed(self._queue) if isinstance(event, ev.EngineLost))
        return next((event for event in lost if event.engine == engine), None)

    def take(self) -> Iterator[tuple[OfEngine, Load]]:
        """The next ones. They may have ended since."""
        left = MAX_AT_ONCE
        while self._queue and left:
            event, loads = self._queue[0]
            for load in islice(loads, left):
                left -= 1
                yield event, load
            if left:
                self._queue.popleft()
        if self._queue:
            self._agenda.plan(self, AT_ONCE)


class EngineLoads:
    """The loads from one engine that have not failed. No method takes longer where more of them are open, but for
    `start_over`.

    `turns` has transfer and id of each that heartbeats name, the next one first: a load that was named goes to the end,
    and one that is over is left out when it is its turn. The first `num_unnamed` should be named at once. `depending`
    fail with the engine; of these, `connecting` begin with it.
    """

    __slots__ = ("_by_transfer", "_connecting", "_depending", "num_unnamed", "turns")

    def __init__(self) -> None:
        self._by_transfer: dict[str, dict[str, Load]] = {}
        self.turns: deque[tuple[str, str]] = deque()
        self.num_unnamed = 0
        self._depending: dict[str, Load] = {}
        self._connecting: dict[str, Load] = {}

    def add(self, load: Load) -> None:
        """A new load. One that is followed is named by the next heartbeat, which is due at once."""
        turn = load.key.transfer_id, load.request_id
        self._by_transfer.setdefault(turn[0], {})[turn[1]] = load
        if load.is_followed:
            self._depending[load.request_id] = load
            self.turns.appendleft(turn)
            self.num_unnamed += 1
        else:
            self.turns.append(turn)

    def depend(self, load: Load, *, is_connecting: bool) -> None:
        """The load was asked for: the loss of its engine ends it. One that `is_connecting` begins with the engine."""
        self._depending[load.request_id] = load
        if is_connecting:
            self._connecting[load.request_id] = load

    def give_up(self, load: Load) -> None:
        """The load is over: heartbeats do not name it any more, and no progress of its prompt or its engine matters."""
        same = self._by_transfer.get(load.key.transfer_id, {})
        if same.pop(load.request_id, None) is None:
            return  # it had failed before
        self._depending.pop(load.request_id, None)
        self._connecting.pop(load.request_id, None)
        if not same:
            del self._by_transfer[load.key.transfer_id]
        if not self._by_transfer:
            # else an engine that is gone, to which no heartbeat goes, would be looked for as long as we run
            self.turns.clear()
            self.num_unnamed = 0

    def of_transfer(self, transfer_id: str) -> list[Load]:
        """The loads of one transfer."""
        return [*self._by_transfer.get(transfer_id, {}).values()]

    def take_connecting(self) -> Iterable[Load]:
        """Those that begin with the engine."""
        taken, self._connecting = self._connecting, {}
        return taken.values()

    def take_depending(self) -> Iterable[Load]:
        """Those that fail with the engine. Ones that come later may succeed with its next greeting."""
        taken, self._depending = self._depending, {}
        return taken.values()

    def start_over(self) -> None:
        """The engine knows none of them yet."""
        self.num_unnamed = len(self.turns)

    def take_turn(
        self, limit: int, links: Collection[LinkId]
    ) -> tuple[tuple[m.TransferKey, ...], tuple[m.Follow, ...]]:
        """Return the next ones that a heartbeat names, at most `limit`: those that are only renewed, and those whose
        progress the workers at `links` are asked for, until all have answered.
        """
        renewed: list[m.TransferKey] = []
        followed: list[m.Follow] = []
        for _ in range(min(limit, len(self.turns))):
            turn = self.turns.popleft()
            self.num_unnamed = max(0, self.num_unnamed - 1)
            load = self._by_transfer.get(turn[0], {}).get(turn[1])
            if load is None:
                continue
            self.turns.append(turn)
            key = load.key
            if not load.is_followed or load.is_answered(links):
                renewed.append(key)
            else:
                followed.append(m.Follow(transfer_id=key.transfer_id, secret=key.secret))
        return tuple(renewed), tuple(followed)
