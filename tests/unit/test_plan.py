"""Plans at the limits of what may be asked; tests/property/test_plan.py has plans of random engines."""

import pytest

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.planning import plan_transfer
from kvconnector.topology import TpKVTopology
from tests.support.fakes import FakeEngine, attention_model


def planned(ranges):
    """Return the reads of one rank from an engine like its own."""
    engine = FakeEngine("e", attention_model(num_layers=1)).geometry()
    return plan_transfer(TpKVTopology(engine, Rank(0, 0)), engine, ranges, chunk_bytes=1 << 20)


@pytest.mark.parametrize(
    "ranges",
    [[], [range(1), range(1)], [range(-1, 3)], [range(0, 9, 2)], [range((1 << 31) - 2, 1 << 31)]],
)
def test_impossible_token_ranges_are_refused(ranges):
    with pytest.raises(GeometryError, match="token range"):
        planned(ranges)


def test_a_tiny_chunk_does_not_make_anybody_cut_more_than_the_read_is_worth():
    """A peer names the size of its chunks: each of them costs a producer far more than a token."""
    engine = FakeEngine("e", attention_model(num_layers=1)).geometry()
    topology = TpKVTopology(engine, Rank(0, 0))
    with pytest.raises(GeometryError, match="chunk_bytes is too small"):
        plan_transfer(topology, engine, [range(1 << 15)], chunk_bytes=16)
    for chunk_bytes in (16, 1 << 13):  # few chunks, or chunks of a sensible size, are cut
        num_tokens = 1 << 10 if chunk_bytes == 16 else 1 << 20
        (read,) = plan_transfer(topology, engine, [range(num_tokens)], chunk_bytes=chunk_bytes)
        assert read.num_chunks >= read.total_bytes // chunk_bytes


def test_short_chunks_that_many_segments_end_with_are_not_too_many():
    """Each of 512 segments has one token in 128 rows, so its eleventh chunk is short."""
    model = attention_model(num_layers=64, total_heads=2)
    ours, theirs = (
        FakeEngine(
            name,
            model,
            tp_size=2,
            dcp_size=2,
            interleave_tokens=interleave_tokens,
            block_sizes=(1024,),
        ).geometry()
        for name, interleave_tokens in (("a", 1), ("b", 1024))
    )
    topology = TpKVTopology(ours, Rank(0, 0))
    (read,) = plan_transfer(topology, theirs, [range(1024)], chunk_bytes=12 * 16)
    assert read.num_chunks == 512 * 11


def test_chunks_hold_the_highest_token_numbers():
    last = (1 << 31) - 1
    (read,) = planned([range(last - 3, last)])
    assert read.chunks.tolist() == [(0, 0, 2, last - 3, 3)]
