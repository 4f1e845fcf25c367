"""Which tokens two context parallel ranks share, counted token by token."""

from math import lcm

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.layout import ContextParallel, Stripe, common_stripes
from kvconnector.layout.stripes import is_held, local_stripe, own_stripe


@st.composite
def places(draw):
    world_size = draw(st.integers(1, 4))
    return ContextParallel(
        world_size=world_size,
        rank=draw(st.integers(0, world_size - 1)),
        interleave_tokens=draw(st.integers(1, 6)),
    )


@st.composite
def stripes(draw):
    period = draw(st.integers(1, 12))
    first = draw(st.integers(0, period - 1))
    return Stripe(first, draw(st.integers(1, period - first)), period)


def holds(place, token):
    return token // place.interleave_tokens % place.world_size == place.rank


def tokens_of(stripe, stop):
    return [t for t in range(stop) if 0 <= t % stripe.period - stripe.first < stripe.run]


@given(places(), places())
def test_stripes_in_common_have_every_token_of_both_ranks_once(ours, theirs):
    stop = 2 * lcm(own_stripe(ours).period, own_stripe(theirs).period)
    found = common_stripes(ours, theirs)
    tokens = sorted(token for stripe in found for token in tokens_of(stripe, stop))
    assert tokens == [t for t in range(stop) if holds(ours, t) and holds(theirs, t)]
    assert [stripe.first for stripe in found] == sorted(stripe.first for stripe in found)
    for place in (ours, theirs):
        own = tokens_of(own_stripe(place), stop)
        for stripe in found:
            assert is_held(stripe, place)
            local = local_stripe(stripe, place)
            assert [own.index(t) for t in tokens_of(stripe, stop)] == tokens_of(local, len(own))


@given(stripes(), places())
def test_a_stripe_is_held_if_every_token_of_it_is(stripe, place):
    stop = lcm(stripe.period, own_stripe(place).period)
    assert is_held(stripe, place) == all(holds(place, t) for t in tokens_of(stripe, stop))


@given(stripes(), st.integers(0, 40), st.integers(0, 40))
def test_members_are_numbered_in_ascending_order(stripe, start, stop):
    tokens = tokens_of(stripe, 80)
    members = stripe.members(range(start, stop))
    assert [stripe.token(m) for m in members] == [t for t in tokens if start <= t < stop]
    assert stripe.count_below(start) == sum(t < start for t in tokens)
