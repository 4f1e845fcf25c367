"""The loads of one consumer worker, found by request, by engine and transfer, and in the order of heartbeats. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from kvconnector.ids import EngineAddress
from kvconnector.session import events as ev
from kvconnector.session.agenda import MAX_AT_ONCE
from kvconnector.session.commands import NEVER, LinkId
from kvconnector.session.load import Load
from kvconnector.wire import messages as m


class Named(NamedTuple):
    """What one heartbeat names: `renewed` are wanted, of those `followed` the progress is not known yet."""

    renewed: tuple[m.TransferKey, ...]
    followed: tuple[m.Follow, ...]


OfEngine: TypeAlias = ev.EngineReady | ev.EngineLost


class Backlog:
    """Loads that are to know of an event of their engine, `MAX_AT_ONCE` at a time."""

    def __init__(self) -> None:
        self._queue: deque[tuple[OfEngine, Iterator[Load]]] = deque()

    def next_deadline(self) -> float:
        """At once, if `take` has more."""
        return 0.0 if self._queue else NEVER

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


class _OfEngine:
    """The loads from one engine.

    `turns` has the ids of those that heartbeats name, the next one first: whoever was named goes to the end, and who is
    over is left out when it is its turn. The first `num_unnamed` should be named at once. `depending` fail with the
    engine; of these, `connecting` begin with it.
    """

    __slots__ = ("by_transfer", "connecting", "depending", "num_unnamed", "turns")

    def __init__(self) -> None:
        self.by_transfer: dict[str, dict[str, Load]] = {}
        self.turns: deque[str] = deque()
        self.num_unnamed = 0
        self.depending: dict[str, Load] = {}
        self.connecting: dict[str, Load] = {}


class Loads(dict[str, Load]):
    """All loads by their requests' ids. Those of them that were `asked` for have blocks.

    No method but `start_over` takes longer where more loads are open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Load] = {}
        self._engines: dict[EngineAddress, _OfEngine] = {}

    def add(self, load: Load) -> None:
        """A new load. One that is followed is named by the next heartbeat, which is due at once."""
        self[load.request_id] = load
        engine = self._engines.setdefault(load.engine, _OfEngine())
        engine.by_transfer.setdefault(load.key.transfer_id, {})[load.request_id] = load
        if load.is_followed:
            engine.depending[load.request_id] = load
            engine.turns.appendleft(load.request_id)
            engine.num_unnamed += 1
        else:
            engine.turns.append(load.request_id)

    def depend(self, load: Load, *, is_connecting: bool) -> None:
        """The load was asked for: the loss of its engine ends it. One that `is_connecting` begins with the engine."""
        self.asked[load.request_id] = load
        engine = self._engines[load.engine]
        engine.depending[load.request_id] = load
        if is_connecting:
            engine.connecting[load.request_id] = load

    def give_up(self, load: Load) -> None:
        """The load failed: heartbeats do not name it any more, and no news of its prompt or its engine matter."""
        engine = self._engines.get(load.engine)
        same = engine.by_transfer.get(load.key.transfer_id, {}) if engine is not None else {}
        if engine is None or same.pop(load.request_id, None) is None:
            return  # it had failed before
        engine.depending.pop(load.request_id, None)
        engine.connecting.pop(load.request_id, None)
        if not same:
            del engine.by_transfer[load.key.transfer_id]
        if not engine.by_transfer:
            del self._engines[load.engine]

    def close(self, load: Load) -> None:
        """The load is over."""
        self.give_up(load)
        self.asked.pop(load.request_id, None)
        del self[load.request_id]

    def of_transfer(self, engine: EngineAddress, transfer_id: str) -> Sequence[Load]:
        """The loads of one transfer that have not failed."""
        loads = self._engines.get(engine)
        return [*loads.by_transfer.get(transfer_id, {}).values()] if loads is not None else ()

    def take_connecting(self, engine: EngineAddress) -> Iterable[Load]:
        """Those that were to begin with the engine."""
        loads = self._engines.get(engine)
        if loads is None:
            return ()
        taken, loads.connecting = loads.connecting, {}
        return taken.values()

    def take_depending(self, engine: EngineAddress) -> Iterable[Load]:
        """Those that fail with the engine. Ones that come later may succeed with its next greeting."""
        loads = self._engines.get(engine)
        if loads is None:
            return ()
        taken, loads.depending = loads.depending, {}
        return taken.values()

    # What heartbeats name.

    def num_wanted(self, engine: EngineAddress) -> int:
        """Loads that heartbeats to this engine name, and maybe some that are over; 0 if there is none."""
        loads = self._engines.get(engine)
        return 0 if loads is None else len(loads.turns)

    def num_unnamed(self, engine: EngineAddress) -> int:
        """Those of them that heartbeats should name at once."""
        loads = self._engines.get(engine)
        return 0 if loads is None else loads.num_unnamed

    def start_over(self, engine: EngineAddress) -> None:
        """The engine knows none of them yet."""
        if engine in self._engines:
            self._engines[engine].num_unnamed = len(self._engines[engine].turns)

    def take_turn(self, engine: EngineAddress, limit: int, links: Collection[LinkId]) -> Named:
        """Name the next loads, at most `limit`. The workers at `links` are asked how far those are that are followed,
        until all have answered.
        """
        loads = self._engines.get(engine)
        if loads is None:
            return Named((), ())
        renewed: list[m.TransferKey] = []
        followed: list[m.Follow] = []
        for _ in range(min(limit, len(loads.turns))):
            load = self.get(loads.turns.popleft())
            loads.num_unnamed = max(0, loads.num_unnamed - 1)
            if load is None or load.error is not None or load.engine != engine:
                continue
            loads.turns.append(load.request_id)
            key = load.key
            if not load.is_followed or load.is_answered(links):
                renewed.append(key)
            else:
                followed.append(m.Follow(transfer_id=key.transfer_id, secret=key.secret))
        return Named(tuple(renewed), tuple(followed))
