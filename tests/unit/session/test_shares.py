"""Who pays when a shared memory is full."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.session.shares import Shares

LIMIT = 1000
CHANGES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(-300, 400)), max_size=60
)


@given(CHANGES)
def test_of_the_origin_with_most_the_holder_with_most_pays(changes):
    shares, used = Shares(LIMIT), Counter()
    for origin, number, change in changes:
        holder = (origin, number)
        nbytes = max(change, -used[holder])
        shares.add(origin, holder, nbytes)
        used[holder] += nbytes
        origins = Counter()
        for (each, _), held in used.items():
            origins[each] += held
        assert shares.used_bytes == sum(used.values())
        debtor = shares.debtor()
        if sum(used.values()) <= LIMIT:
            assert debtor is None
        else:
            assert 2 * origins[debtor[0]] >= max(origins.values())
            others = [held for (each, _), held in used.items() if each == debtor[0]]
            assert 2 * used[debtor] >= max(others)


def test_nothing_is_kept_of_who_has_nothing():
    shares = Shares(LIMIT)
    for number in range(100):
        shares.add(f"origin {number}", number, 7)
        shares.add(f"origin {number}", number, -7)
    assert repr(shares) == "<Shares 0 of 1000 bytes, 0 origins>"
    assert not shares._origins
    assert not shares._origins._by_power
