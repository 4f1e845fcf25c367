from __future__ import annotations

import numpy as np
import pytest

from kvconnector.errors import BlockIdError, GeometryError
from kvconnector.ids import Rank
from kvconnector.planning import GroupBlocks, plan_peer, plan_transfer
from kvconnector.topology import TpKVTopology
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine


def engine(*, tp_size=1, stages=((0, 1),), block_size=16, heads=2, layers=(0, 1), parts="kv"):
    shape = FakeModel(
        num_layers=8,
        groups=(FakeGroup(layers, tuple(FakePart(name, heads, 4, 2) for name in parts)),),
    )
    return cut_engine(
        shape, engine_id="e", stages=stages, block_sizes=[block_size], tp_size=tp_size
    )


def topology(engine):
    return TpKVTopology(engine, Rank(0, 0))


def chunks_of(consumer, producer, tokens, chunk_bytes):
    [read] = plan_transfer(topology(consumer), producer, [tokens], chunk_bytes=chunk_bytes).reads
    return [list(chunk.tolist()[1:]) for chunk in read.chunks]


TOKEN_BYTES = 2 * 4 * 2  # of one part: heads, head dim, item size


@pytest.mark.parametrize(
    "ranges",
    [[], [range(1), range(1)], [range(-1, 3)], [range(0, 9, 2)], [range((1 << 31) - 2, 1 << 31)]],
)
def test_token_ranges_that_make_no_sense_are_refused(ranges):
    one = engine()
    with pytest.raises(GeometryError, match="token range"):
        plan_peer(topology(one), one).plan(ranges, chunk_bytes=1 << 20)


def test_the_last_tokens_that_fit_a_chunk_record():
    one = engine(layers=(0,), stages=((0,),), parts="k")
    last = (1 << 31) - 1
    assert chunks_of(one, one, range(last - 3, last), 1 << 20) == [[0, 1, last - 3, 3]]


@pytest.mark.parametrize(
    "tokens,ids,first",
    [
        (range(32, 80), [7, 3, 9], 2),
        (range(33, 48), [7], 2),
        (range(47, 49), [7, 3], 2),
        (range(48, 49), [3], 3),
        (range(79, 80), [9], 4),
        (range(48, 48), [], 2),
    ],
)
def test_only_the_blocks_that_hold_the_tokens(tokens, ids, first):
    covering = GroupBlocks.of([7, 3, 9], first_block=2).covering(tokens, 16, what="blocks")
    assert covering.block_ids.tolist() == ids
    assert covering.first_block == first


@pytest.mark.parametrize("tokens", [range(31, 40), range(40, 81), range(5), range(80, 81)])
def test_tokens_outside_the_blocks_are_refused(tokens):
    with pytest.raises(BlockIdError, match="my blocks do not hold") as refused:
        GroupBlocks.of([7, 3, 9], first_block=2).covering(tokens, 16, what="my blocks")
    assert refused.value.context["blocks_hold"] == (32, 80)


@pytest.mark.parametrize("ids", [[-1], [1 << 31], [1 << 70], [1.5], ["1"], [[1]], [None]])
def test_what_is_no_block_id_is_refused(ids):
    with pytest.raises(BlockIdError):
        GroupBlocks.of(ids)


def test_block_tables_are_checked_however_they_are_made():
    for wrong in (np.zeros(2, dtype=np.int64), np.zeros(2), np.zeros((1, 2), dtype=np.int32)):
        with pytest.raises(BlockIdError):
            GroupBlocks(wrong)
    with pytest.raises(BlockIdError, match="first_block"):
        GroupBlocks(np.zeros(2, dtype=np.int32), first_block=-1)
