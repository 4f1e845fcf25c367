import pytest

from kvconnector.errors import BlockIdError, GeometryError
from kvconnector.ids import Rank
from kvconnector.planning import GroupBlocks, plan_transfer
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


def test_many_segments_of_a_short_prompt_are_not_too_many_chunks():
    model = attention_model(num_layers=64, total_heads=2)
    shapes = [
        FakeEngine(
            name, model, tp_size=2, dcp_size=2, interleave_tokens=interleave, block_sizes=(64,)
        )
        for name, interleave in (("a", 1), ("b", 64))
    ]
    ours, theirs = (shape.geometry() for shape in shapes)
    reads = plan_transfer(TpKVTopology(ours, Rank(0, 0)), theirs, [range(200)], chunk_bytes=1 << 18)
    assert sum(read.num_chunks for read in reads) > 0


def test_chunks_hold_the_highest_token_numbers():
    last = (1 << 31) - 1
    (read,) = planned([range(last - 3, last)])
    assert read.chunks.tolist() == [(0, 0, 2, last - 3, 3)]


@pytest.mark.parametrize(
    "tokens,ids,first",
    [
        (range(33, 48), [7], 2),
        (range(47, 49), [7, 3], 2),
        (range(48, 49), [3], 3),
        (range(48, 48), [], 2),
    ],
)
def test_covering_keeps_the_blocks_of_the_tokens(tokens, ids, first):
    covering = GroupBlocks.of([7, 3, 9], first_block=2).covering(tokens, 16, what="blocks")
    assert covering.block_ids.tolist() == ids
    assert covering.first_block == first


@pytest.mark.parametrize("tokens", [range(31, 40), range(40, 81), range(5), range(80, 81)])
def test_tokens_outside_the_blocks_are_refused(tokens):
    with pytest.raises(BlockIdError, match="my blocks do not hold") as refused:
        GroupBlocks.of([7, 3, 9], first_block=2).covering(tokens, 16, what="my blocks")
    assert refused.value.context["blocks_hold"] == (32, 80)


def test_group_blocks_check_their_values():
    for wrong in ([1 << 31], [1 << 70], [None]):
        with pytest.raises(BlockIdError):
            GroupBlocks.of(wrong)
    with pytest.raises(BlockIdError, match=r"from 0 to 2\^31 - 1 \[lowest=-1, highest=3\]"):
        GroupBlocks.of([3, -1])
    for values in ((b"123", 0), (b"", -1), (b"", 1 << 31)):
        with pytest.raises(BlockIdError, match="first_block"):
            GroupBlocks(wire_ids=values[0], first_block=values[1])
