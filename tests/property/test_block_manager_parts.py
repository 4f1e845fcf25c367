"""The block manager's parts against naive versions of themselves."""

from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.block_manager import split_dependent_copies
from kvconnector.cache.block_manager.sequence import encode_extra_keys

extra_keys = st.lists(st.one_of(st.integers(), st.text(max_size=3), st.binary(max_size=3)))


@given(extra_keys, extra_keys)
def test_only_equal_extra_keys_encode_equally(first, second):
    assert (encode_extra_keys(first) == encode_extra_keys(second)) == (first == second)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda c: c[0] != c[1])),
    st.data(),
)
def test_batched_copies_equal_sequential_ones(copies, data):
    one_by_one, in_order, any_order, at_once = (list(range(7)) for _ in range(4))
    for source, destination in copies:
        one_by_one[destination] = one_by_one[source]
    batches = split_dependent_copies(copies)
    for batch in batches:
        for memory, order in ((in_order, batch), (any_order, data.draw(st.permutations(batch)))):
            for source, destination in order:
                memory[destination] = memory[source]
        read = [at_once[source] for source, _ in batch]
        for (_, destination), value in zip(batch, read, strict=True):
            at_once[destination] = value
    assert in_order == any_order == at_once == one_by_one
    assert [copy for batch in batches for copy in batch] == copies
