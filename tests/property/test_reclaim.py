"""Which offers a full producer takes back: the oldest unread ones, as a naive count of blocks says."""

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.planning import GroupBlocks
from kvconnector.runtime.offers import FullPools
from tests.support.examples import examples

NUM_BLOCKS = (12, 5)
OFFERS = st.tuples(*(st.lists(st.integers(0, n - 1), max_size=n) for n in NUM_BLOCKS))
STEPS = st.lists(st.tuples(st.booleans(), OFFERS, st.integers(0, 20)), max_size=40)


def naive(held, above):
    """Return the offers to take back, from all of them, and what is left."""
    left, taken = dict(held), []

    def is_full():
        groups = zip(*left.values(), strict=True)
        used = [len({block for ids in group for block in ids}) for group in groups]
        return any(u > int(n * above) for u, n in zip(used, NUM_BLOCKS, strict=True))

    while len(left) > 1 and is_full():
        taken.append(next(iter(left)))
        del left[taken[-1]]
    return taken, left


@examples(200)
@given(steps=STEPS, above=st.sampled_from([0.1, 0.5, 0.75, 0.99]))
def test_the_oldest_offers_go_while_the_pool_is_too_full(steps, above):
    pools, held = FullPools(NUM_BLOCKS, above), {}
    for number, (adds, blocks, pick) in enumerate(steps):
        if adds or not held:
            name = f"r{number}"
            held[name] = blocks
            pools.add(name, tuple(GroupBlocks.of(ids) for ids in blocks))
            taken, held = naive(held, above)
            assert pools.excess() == taken
            assert next(reversed(held)) == name, "the newest offer is never taken back"
        else:
            name = [*held][pick % len(held)]
            del held[name]
            pools.remove(name)
        pools.remove("unknown")
