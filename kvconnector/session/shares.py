"""How much of a shared memory budget each peer uses, and who must give some of it back when it is exhausted. Pure.

Peers are first grouped by `origin`: the key by which the control channel knows them or, without keys, the address of
their host. So nobody gets a larger share by opening many connections. Within the origin that uses most, the holder that
uses most pays. Each call takes as long with one holder as with thousands, since a stranger decides how many there are.
So weights are kept by their powers of two, and "most" means at least half as much as anybody else: an origin that uses
less than half of an equal share loses nothing, whatever others do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, TypeVar

HolderT = TypeVar("HolderT")


class Weights(Generic[HolderT]):
    """Weights of things; those that weigh nothing are forgotten."""

    def __init__(self) -> None:
        self._weights: dict[HolderT, int] = {}
        self._by_power: defaultdict[int, dict[HolderT, None]] = defaultdict(dict)
        """Things by the number of bits of their weights."""

    def __bool__(self) -> bool:
        return bool(self._weights)

    def add(self, thing: HolderT, weight: int) -> None:
        """Change a thing's weight by `weight`, which may be negative."""
        before = self._weights.get(thing, 0)
        after = before + weight
        old, new = before.bit_length(), after.bit_length()
        if after:
            self._weights[thing] = after
        else:
            self._weights.pop(thing, None)
        if old != new:
            if before:
                del self._by_power[old][thing]
                if not self._by_power[old]:
                    del self._by_power[old]
            if after:
                self._by_power[new][thing] = None

    def heavy(self) -> HolderT:
        """Return a thing that weighs at least half as much as the heaviest. There must be one."""
        return next(iter(self._by_power[max(self._by_power)]))


class Shares(Generic[HolderT]):
    """Bytes that holders use, of `limit_bytes` for all of them together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        self._origins: Weights[str] = Weights()
        self._holders: defaultdict[str, Weights[HolderT]] = defaultdict(Weights)

    def __repr__(self) -> str:
        return (
            f"<Shares {self.used_bytes} of {self._limit_bytes} bytes, {len(self._holders)} origins>"
        )

    def add(self, origin: str, holder: HolderT, nbytes: int) -> None:
        """Count bytes of a holder, or count them no more if `nbytes` is negative."""
        self.used_bytes += nbytes
        self._origins.add(origin, nbytes)
        self._holders[origin].add(holder, nbytes)
        if not self._holders[origin]:
            del self._holders[origin]

    def debtor(self) -> HolderT | None:
        """Return the holder that must give bytes back, None if there is room for all."""
        if self.used_bytes <= self._limit_bytes:
            return None
        return self._holders[self._origins.heavy()].heavy()
