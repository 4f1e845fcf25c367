"""The ring never lends a place twice, and lends all of it again once everything is back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.pump.id_ring import Ring

CAPACITY = 20


@given(st.lists(st.one_of(st.integers(1, 9), st.just(0)), max_size=60), st.randoms())
def test_loans_never_overlap(counts: list[int], random) -> None:
    """A count of 0 takes one of the loans back, whichever."""
    ring = Ring(CAPACITY)
    lent: dict[int, int] = {}
    for count in counts:
        if count == 0 and lent:
            start = random.choice(sorted(lent))
            del lent[start]
            ring.give_back(start)
        elif count:
            start = ring.take(count)
            if start is None:
                continue
            assert start >= 0
            assert start + count <= CAPACITY
            assert all(
                start + count <= other or other + size <= start for other, size in lent.items()
            )
            lent[start] = count
    for start in list(lent):
        ring.give_back(start)
    assert ring.take(CAPACITY) == 0


def test_full_ring_lends_nothing_until_the_oldest_is_back() -> None:
    ring = Ring(8)
    assert [ring.take(3), ring.take(3)] == [0, 3]
    assert ring.take(3) is None
    ring.give_back(3)
    assert ring.take(3) is None
    ring.give_back(0)
    assert ring.take(8) == 0


def test_ring_goes_round() -> None:
    ring = Ring(8)
    assert [ring.take(3), ring.take(3)] == [0, 3]
    ring.give_back(0)
    assert ring.take(3) == 0  # two places at the end stay unused
    assert ring.take(1) is None
