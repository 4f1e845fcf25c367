"""Heads, layers, and which rank answers to which, over random pairs of engines."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.topology import (
    EngineGeometry,
    TpKVTopology,
)
from tests.support.strategies import engine_pairs

# the longest two patterns of turns of 1 to 6 tokens on groups of 1 to 8 ranks, e.g. 8 x 5 and 7 x 6 tokens, need 840
PATTERN_TOKENS = 840


def heads_of(total, tp_rank, tp_size):
    return TpKVTopology.heads_of(total, tp_rank=tp_rank, tp_size=tp_size)


@given(total=st.integers(1, 40), tp_size=st.integers(1, 40))
def test_ranks_own_all_heads_in_even_runs(total, tp_size):
    owned = [heads_of(total, tp_rank, tp_size) for tp_rank in range(tp_size)]
    assert all(owned)
    assert owned == sorted(owned, key=lambda heads: heads.start)
    if tp_size > total:
        assert [len(heads) for heads in owned] == [1] * tp_size
        copies = Counter(heads.start for heads in owned)
        assert set(copies) == set(range(total))
        assert max(copies.values()) - min(copies.values()) <= 1
    else:
        assert [head for heads in owned for head in heads] == list(range(total))
        assert max(map(len, owned)) - min(map(len, owned)) <= 1


@given(num_layers=st.integers(1, 60), pp_size=st.integers(1, 60))
def test_stages_get_contiguous_layers_longer_stages_first(num_layers, pp_size):
    if pp_size > num_layers:
        with pytest.raises(GeometryError, match="stage"):
            TpKVTopology.layers_of(num_layers, pp_rank=0, pp_size=pp_size)
        return
    stages = [
        TpKVTopology.layers_of(num_layers, pp_rank=rank, pp_size=pp_size) for rank in range(pp_size)
    ]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def owned_tokens(group, tokens):
    return [t for t in tokens if t // group.interleave_tokens % group.dcp_size == group.dcp_rank]


def items_of(index, group):
    """Every (group, layer, part, head) that a rank holds of some tokens."""
    return {
        (index, layer, part.name, head)
        for layer in group.layers
        for part in group.parts
        for head in range(part.head_start, part.head_stop)
    }


@given(engine_pairs())
def test_those_who_read_from_a_rank_confirm_and_if_none_does_one_other(pair):
    consumer, producer = pair
    sources = {
        rank.rank: {t.rank for t in TpKVTopology(consumer, rank.rank).targets(producer)}
        for rank in consumer.ranks
    }
    for holder in producer.ranks:
        reading = {rank for rank, read in sources.items() if holder.rank in read}
        readers = TpKVTopology(producer, holder.rank).readers(consumer)
        assert readers == reading or (not reading and len(readers) == 1)


def readers_by_replica(consumer: EngineGeometry, producer: EngineGeometry):
    """How many consumer ranks of one stage read one (group, layer, family, head, token) from each of its holders."""
    readers: dict[tuple[int, ...], Counter[Rank]] = defaultdict(Counter)
    for rank in consumer.ranks:
        for target in TpKVTopology(consumer, rank.rank).targets(producer):
            for s in target.segments:
                for layer in s.layers:
                    for head in range(s.head_start, s.head_stop):
                        readers[s.group, layer, s.family, head, s.stripe.first][target.rank] += 1
    for (group, layer, family, head, token), counts in readers.items():
        holders = [
            rank.rank
            for rank in producer.ranks
            if layer in rank.groups[group].layers
            and head in rank.groups[group].families[family].head_range
            and owned_tokens(rank.groups[group], [token])
        ]
        yield [counts[holder] for holder in holders]


@given(engine_pairs(even_heads=True))
def test_readers_spread_evenly_over_replicas_one_each_where_the_numbers_match(pair):
    for counts in readers_by_replica(*pair):
        assert max(counts) - min(counts) <= 1


@given(engine_pairs())
def test_a_cache_is_replicated_where_two_ranks_hold_the_same_head_of_a_token(pair):
    for engine in pair:
        held = Counter(
            (*item, token)
            for rank in engine.ranks
            for index, group in enumerate(rank.groups)
            for item in items_of(index, group)
            for token in owned_tokens(group, range(PATTERN_TOKENS))[:1]
        )
        assert TpKVTopology.replicates_kv_cache(engine) == any(n > 1 for n in held.values())


@given(engine_pairs())
def test_relayout_is_needed_where_some_block_that_is_read_holds_something_else(pair):
    consumer, producer = pair
    for rank in consumer.ranks:
        topology = TpKVTopology(consumer, rank.rank)
        differs = False
        for target in topology.targets(producer):
            theirs = producer.rank_geometry(target.rank)
            for segment in target.segments:
                blocks = [
                    (
                        side.groups[segment.group].families[segment.family].head_range,
                        owned_tokens(side.groups[segment.group], range(PATTERN_TOKENS)),
                        side.groups[segment.group].block_size,
                    )
                    for side in (rank, theirs)
                ]
                differs |= blocks[0] != blocks[1]
        assert topology.needs_relayout(producer) == differs
