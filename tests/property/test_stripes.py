"""Stripes of tokens against the definition of who holds which token."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.slot_mapping import BlockGeometry, ContextParallel, naive_slot
from kvconnector.errors import GeometryError
from kvconnector.topology.stripes import (
    ALL_TOKENS,
    MAX_TURNS,
    Stripe,
    common_stripes,
    is_held,
    local_stripe,
)


@st.composite
def groups(draw):
    world = draw(st.integers(1, 6))
    return ContextParallel(
        world_size=world,
        rank=draw(st.integers(0, world - 1)),
        interleave_tokens=draw(st.integers(1, 8)),
    )


@st.composite
def stripes(draw):
    first, run = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    return Stripe(first, run, first + run + draw(st.integers(0, 9)))


def holds(group, token):
    return token // group.interleave_tokens % group.world_size == group.rank


def members_of(stripe, num_tokens):
    return [stripe.token(member) for member in range(stripe.count_below(num_tokens))]


@given(stripes())
def test_members_are_numbered_in_ascending_order(stripe):
    tokens = [t for t in range(100) if 0 <= t % stripe.period - stripe.first < stripe.run]
    assert members_of(stripe, 100) == tokens
    for start, stop in ((0, 100), (13, 57), (40, 40), (41, 40)):
        inside = [stripe.token(member) for member in stripe.members(range(start, stop))]
        assert inside == [t for t in tokens if start <= t < stop]


@given(groups(), groups())
def test_common_stripes_hold_each_common_token_once(ours, theirs):
    period = lcm(*(g.world_size * g.interleave_tokens for g in (ours, theirs)))
    common = [t for t in range(2 * period) if holds(ours, t) and holds(theirs, t)]
    found = [members_of(stripe, 2 * period) for stripe in common_stripes(ours, theirs)]
    assert sorted(token for tokens in found for token in tokens) == common
    assert [tokens[0] for tokens in found] == sorted(tokens[0] for tokens in found)
    for stripe in common_stripes(ours, theirs):
        assert is_held(stripe, ours)
        assert is_held(stripe, theirs)


@given(groups(), groups())
def test_a_stripe_in_a_ranks_own_tokens_is_where_the_rank_stores_it(ours, theirs):
    geometry = BlockGeometry(
        block_size=8 * ours.interleave_tokens,
        kernel_block_size=8 * ours.interleave_tokens,
        context_parallel=ours,
    )
    for stripe in common_stripes(ours, theirs):
        own = local_stripe(stripe, ours)
        for member in range(12):
            slot = naive_slot(range(10**4), stripe.token(member), geometry)
            assert own.token(member) == slot
    if ours == theirs:
        assert own.is_dense


@given(stripes(), groups())
def test_a_stripe_is_held_by_who_holds_all_of_its_tokens(stripe, group):
    period = lcm(stripe.period, group.world_size * group.interleave_tokens)
    everything = all(holds(group, token) for token in members_of(stripe, period))
    # a rank's tokens may also be held by chance of a period that is none of its pattern's
    assert is_held(stripe, group) <= everything
    if stripe.period % (group.world_size * group.interleave_tokens) == 0:
        one_turn = stripe.run <= group.interleave_tokens or group.world_size == 1
        assert is_held(stripe, group) == (everything and one_turn)


@pytest.mark.parametrize("fields", [(-1, 1, 1), (0, 0, 1), (1, 1, 1), (0, 2, 1)])
def test_runs_outside_their_period_are_refused(fields):
    with pytest.raises(GeometryError, match="inside its period"):
        Stripe(*fields)


def test_patterns_that_hardly_ever_coincide_are_refused_by_their_numbers():
    ours = ContextParallel(world_size=2, interleave_tokens=MAX_TURNS * 2 + 1)
    theirs = ContextParallel(world_size=2, interleave_tokens=MAX_TURNS)
    with pytest.raises(GeometryError, match="too long a period") as refused:
        common_stripes(ours, theirs)
    assert refused.value.context["theirs"] == (2, MAX_TURNS)
    assert common_stripes(ours, ContextParallel()) == (
        Stripe(0, 2 * MAX_TURNS + 1, 4 * MAX_TURNS + 2),
    )
    assert common_stripes(ContextParallel(), ContextParallel()) == (ALL_TOKENS,)
