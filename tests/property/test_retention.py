"""The missing tokens of a cache group, compared one by one with the tokens that a query sees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import GeometryError
from kvconnector.planning import (
    KeepsAll,
    KeepsChunk,
    KeepsEncoder,
    KeepsState,
    KeepsWindow,
    from_whole_block,
    retention_named,
)

TOKENS = st.integers(0, 60)
EXTENT = st.integers(1, 20)


@given(TOKENS, TOKENS, EXTENT)
def test_attention_misses_the_uncomputed_tokens_that_it_sees(computed, stop, extent):
    sees = {
        KeepsAll(): lambda token: True,
        KeepsEncoder(): lambda token: True,
        KeepsWindow(extent): lambda token: stop - token < extent,
        KeepsChunk(extent): lambda token: token // extent == stop // extent,
    }
    for retention, is_seen in sees.items():
        expected = [token for token in range(stop) if is_seen(token) and token >= computed]
        missing = retention.missing(computed, stop)
        assert list(missing) == expected
        assert missing.stop == stop


@given(TOKENS, TOKENS, st.sampled_from([1, 4, 16]))
def test_compressed_groups_miss_the_rows_whose_last_token_was_not_there(computed, stop, m):
    rows = [row for row in range(stop // m) if (row + 1) * m > computed]
    assert list(KeepsAll(m).missing(computed, stop)) == rows


@pytest.mark.parametrize("keeps", ["window", "chunk", "state", "encoder"])
def test_groups_that_forget_have_rows_of_one_token(keeps):
    with pytest.raises(GeometryError, match="row_tokens=4"):
        retention_named(keeps, 8, 4)
    with pytest.raises(GeometryError, match="row_tokens=0"):
        KeepsAll(0)


@given(TOKENS, TOKENS)
def test_a_state_is_missing_unless_it_is_of_the_position(computed, stop):
    missing = KeepsState().missing(computed, stop)
    is_needed = stop > 0 and computed != stop
    assert list(missing) == ([stop - 1] if is_needed else [])


@pytest.mark.parametrize("kind", [KeepsWindow, KeepsChunk])
def test_an_extent_is_at_least_one_token(kind):
    with pytest.raises(GeometryError, match="at least 1"):
        kind(0)


@pytest.mark.parametrize(
    "keeps, retention",
    [
        (("all",), KeepsAll()),
        (("window", 3), KeepsWindow(3)),
        (("chunk", 3), KeepsChunk(3)),
        (("encoder",), KeepsEncoder()),
        (("state",), KeepsState()),
        (("all", 0, 4), KeepsAll(4)),
    ],
)
def test_a_retention_has_a_name(keeps, retention):
    assert retention_named(*keeps) == retention


@given(st.data())
def test_a_range_begins_with_a_whole_block_only_where_the_producer_has_it(data):
    """Token by token: of the block in which the range begins, in blocks of the consumer's length alone."""
    size, cached, theirs = (data.draw(st.integers(1, 6)) for _ in range(3))
    stop = data.draw(TOKENS)
    tokens = range(data.draw(st.integers(0, stop)), stop)
    held = range(data.draw(st.integers(0, tokens.start // theirs)), -(-stop // theirs))
    found = from_whole_block(tokens, cached, held, size)
    whole = [token for token in range(stop) if tokens and token // cached >= tokens.start // cached]
    # the producer's blocks, taken for blocks of the consumer's length, as their numbers alone are known
    is_held = held.stop == -(-stop // size) and all(token >= held.start * size for token in whole)
    assert list(found) == (whole if is_held and whole else list(tokens))
    assert found.stop == stop
