"""The loads from one engine: in the order of heartbeats, by transfer, and those that are to learn of its events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from kvconnector.session.commands import LinkId
from kvconnector.session.load import Load
from kvconnector.wire import messages as m


class EngineLoads:
    """The loads from one engine that are not over and have not failed. No method takes longer where there are more.

    `turns` has each that heartbeats name, the next one first; the first `num_unnamed` should be named at once.
    `depending` fail with the engine; of these, `connecting` begin with it.
    """

    def __init__(self) -> None:
        self.turns: OrderedDict[Load, None] = OrderedDict()
        self.num_unnamed = 0
        self.depending: dict[Load, None] = {}
        self.connecting: dict[Load, None] = {}
        self._followed: dict[str, dict[Load, None]] = {}

    def add(self, load: Load) -> None:
        """A new load. One that is followed is named by the next heartbeat, which is due at once."""
        self.turns[load] = None
        if load.is_followed:
            self.turns.move_to_end(load, last=False)
            self.num_unnamed += 1
            self.depending[load] = None
            self._followed.setdefault(load.key.transfer_id, {})[load] = None

    def give_up(self, load: Load) -> None:
        """The load is over: heartbeats do not name it any more, and no progress of its prompt or its engine matters."""
        if load not in self.turns:
            return  # it had failed before
        del self.turns[load]
        self.num_unnamed = min(self.num_unnamed, len(self.turns))
        self.depending.pop(load, None)
        self.connecting.pop(load, None)
        if load.is_followed:
            same = self._followed[load.key.transfer_id]
            del same[load]
            if not same:
                del self._followed[load.key.transfer_id]

    def following(self, transfer_id: str) -> list[Load]:
        """The loads that follow one transfer."""
        return [*self._followed.get(transfer_id, ())]

    def take_turn(
        self, limit: int, links: Collection[LinkId]
    ) -> tuple[tuple[m.TransferKey, ...], tuple[m.Follow, ...]]:
        """Return the next ones that a heartbeat names, at most `limit`: those that are only renewed, and those whose
        progress the workers at `links` are asked for, until all have answered.
        """
        renewed: list[m.TransferKey] = []
        followed: list[m.Follow] = []
        for _ in range(min(limit, len(self.turns))):
            load = next(iter(self.turns))
            self.turns.move_to_end(load)
            self.num_unnamed = max(0, self.num_unnamed - 1)
            key = load.key
            if not load.is_followed or load.is_answered(links):
                renewed.append(key)
            else:
                followed.append(m.Follow(transfer_id=key.transfer_id, secret=key.secret))
        return tuple(renewed), tuple(followed)
