"""Stripes: the tokens that two ranks of different context parallel groups have in common.

The `n` ranks of a group take a request's tokens in turns of `i` (which divides the block size). Two ranks of groups
with different `n` and `i` have a few stripes in common, each of which is evenly spaced in either rank's own tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnector.errors import GeometryError, require_at_least

MAX_TURNS = 1024
"""The most turns of one rank until the common pattern of two groups repeats. Real engines need one or a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """A rank's place in the group that shares a request's tokens. Raises GeometryError: a field is out of range."""

    world_size: int = 1
    rank: int = 0
    interleave_tokens: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, GeometryError, interleave_tokens=self.interleave_tokens)
        if not 0 <= self.rank < self.world_size:
            raise GeometryError("the rank is outside its context parallel group", place=self)


NO_CONTEXT_PARALLEL = ContextParallel()
"""A group of one rank, which holds every token."""


_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Stripe(msgspec.Struct, frozen=True, array_like=True):
    """Evenly spaced runs of tokens: `run` tokens from `first` on, and again every `period` tokens.

    These tokens, its members, are numbered from 0 in ascending order. Raises GeometryError: a run is empty or crosses
    the end of its period.
    """

    first: _Count = 0
    run: _Count = 1
    period: _Count = 1

    def __post_init__(self) -> None:
        if self.first < 0 or self.run < 1 or self.first + self.run > self.period:
            raise GeometryError("a stripe's run must lie inside its period", stripe=self)

    @property
    def is_dense(self) -> bool:
        """True if every token is a member."""
        return self.run == self.period

    def token(self, member: int) -> int:
        """Return the token with member number `member`."""
        turn, place = divmod(member, self.run)
        return self.first + turn * self.period + place

    def count_below(self, token: int) -> int:
        """Return the number of members below a token."""
        turn, place = divmod(token, self.period)
        return turn * self.run + min(max(place - self.first, 0), self.run)

    def members(self, tokens: range) -> range:
        """Return the numbers of the members in a range of tokens."""
        start, stop = tokens.start, max(tokens.stop, tokens.start)
        if self.run == self.period:
            return range(start, stop)
        return range(self.count_below(start), self.count_below(stop))


ALL_TOKENS = Stripe()


def own_stripe(group: ContextParallel) -> Stripe:
    """Return the tokens that a rank holds."""
    if group.world_size == 1:
        return ALL_TOKENS
    turn = group.interleave_tokens
    return Stripe(group.rank * turn, turn, group.world_size * turn)


@lru_cache(maxsize=4096)
def common_stripes(ours: ContextParallel, theirs: ContextParallel) -> tuple[Stripe, ...]:
    """Return the tokens that both ranks hold, as disjoint stripes in ascending order of their first tokens. Raises
    GeometryError: the common pattern of the two groups repeats only after more than `MAX_TURNS` turns.
    """
    mine, other = own_stripe(ours), own_stripe(theirs)
    if other.is_dense:
        return (mine,)
    if mine.is_dense:
        return (other,)
    period = lcm(mine.period, other.period)
    if max(period // mine.period, period // other.period) > MAX_TURNS:
        raise GeometryError(
            "the interleaves of two context parallel groups have too long a common period",
            ours=(ours.world_size, ours.interleave_tokens),
            theirs=(theirs.world_size, theirs.interleave_tokens),
            period_tokens=period,
            max_turns=MAX_TURNS,
        )
    found = []
    for start in range(mine.first, period, mine.period):
        stop = start + mine.run
        turn = max(0, start - other.first - other.run + 1) // other.period
        while (their_start := other.first + turn * other.period) < stop:
            first, last = max(start, their_start), min(stop, their_start + other.run)
            if first < last:
                found.append(Stripe(first, last - first, period))
            turn += 1
    return tuple(found)


def is_held(stripe: Stripe, group: ContextParallel) -> bool:
    """Return True if a rank holds every token of a stripe."""
    own = own_stripe(group)
    start = stripe.first % own.period
    return own.is_dense or (
        stripe.period % own.period == 0
        and own.first <= start
        and start + stripe.run <= own.first + own.run
    )


def local_stripe(stripe: Stripe, group: ContextParallel) -> Stripe:
    """Return a stripe that a rank holds, counted in the tokens of that rank alone."""
    own = own_stripe(group)
    if own.is_dense:
        return stripe
    return Stripe(own.count_below(stripe.first), stripe.run, own.count_below(stripe.period))
