"""Heads, layers, and which rank answers to which, over random pairs of engines."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.topology import (
    EngineGeometry,
    FlashAttentionBackend,
    TpKVTopology,
    expected_confirmations,
    is_kv_replicated,
    owned_heads,
    partition_layers,
    probe_layout,
    release_targets,
    source_rectangles,
)
from kvconnector.topology.mapping import adjacent_runs, assign_heads
from tests.support.strategies import MAX_TP, engine_pairs

# the longest two patterns of turns of 1 to 6 tokens on groups of 1 to 8 ranks, e.g. 8 x 5 and 7 x 6 tokens, need 840
PATTERN_TOKENS = 840

ascending = st.lists(st.integers(0, 20), unique=True, max_size=12).map(sorted)


@given(total=st.integers(1, 40), tp_size=st.integers(1, 40))
def test_ranks_own_all_heads_in_even_runs(total, tp_size):
    owned = [owned_heads(total, tp_rank, tp_size) for tp_rank in range(tp_size)]
    assert all(owned)
    if is_kv_replicated(total, tp_size):
        assert [len(heads) for heads in owned] == [1] * tp_size
        assert owned == sorted(owned, key=lambda heads: heads.start)
        copies = Counter(heads.start for heads in owned)
        assert set(copies) == set(range(total))
        assert max(copies.values()) - min(copies.values()) <= 1
    else:
        assert [head for heads in owned for head in heads] == list(range(total))
        assert max(map(len, owned)) - min(map(len, owned)) <= 1


@given(tp_rank=st.integers(0, 63), smaller=st.integers(1, 8), factor=st.integers(1, 8))
def test_heads_are_split_as_megatron_does_where_the_numbers_divide(tp_rank, smaller, factor):
    larger = smaller * factor
    share = owned_heads(larger, tp_rank % smaller, smaller)
    assert share == range(tp_rank % smaller * factor, (tp_rank % smaller + 1) * factor)
    replica = owned_heads(smaller, tp_rank % larger, larger)
    assert replica == range(tp_rank % larger // factor, tp_rank % larger // factor + 1)


@given(heads=st.integers(1, 64))
def test_one_rank_a_head_is_no_replication(heads):
    assert not is_kv_replicated(heads, heads)
    assert is_kv_replicated(heads, heads + 1)


@given(num_layers=st.integers(1, 60), pp_size=st.integers(1, 60))
def test_stages_get_contiguous_layers_longer_stages_first(num_layers, pp_size):
    if pp_size > num_layers:
        with pytest.raises(GeometryError, match="stage"):
            partition_layers(num_layers, pp_size)
        return
    stages = partition_layers(num_layers, pp_size)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_uneven_stages_are_taken_as_given(sizes):
    stages = partition_layers(sum(sizes), len(sizes), sizes)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(sum(sizes)))


@given(ours=ascending, theirs=ascending)
def test_runs_hold_the_common_layers_neighbours_in_both_and_are_as_long_as_can_be(ours, theirs):
    runs = list(adjacent_runs(ours, theirs))
    assert [value for run in runs for value in run] == sorted(set(ours) & set(theirs))
    for run in runs:
        for values in (ours, theirs):
            first = values.index(run[0])
            assert tuple(values[first : first + len(run)]) == run
    for one, following in pairwise(runs):
        gaps = [values.index(following[0]) - values.index(one[-1]) for values in (ours, theirs)]
        assert gaps != [1, 1]


@given(data=st.data(), start=st.integers(0, 6), count=st.integers(1, 8), spread=st.integers(0, 9))
def test_wanted_heads_are_assigned_once_to_ranks_that_hold_them(data, start, count, spread):
    interval = st.tuples(st.integers(0, 14), st.integers(1, 8)).map(lambda x: range(x[0], sum(x)))
    held = [
        (Rank(0, tp), heads) for tp, heads in enumerate(data.draw(st.lists(interval, max_size=8)))
    ]
    wanted = range(start, start + count)
    if not set(wanted) <= {head for _, heads in held for head in heads}:
        with pytest.raises(GeometryError, match="heads"):
            assign_heads(wanted, held, spread)
        return
    assigned = assign_heads(wanted, held, spread)
    assert [head for _, heads in assigned for head in heads] == list(wanted)
    for rank, heads in assigned:
        assert set(heads) <= set(dict(held)[rank])
    assert all(one != following for (one, _), (following, _) in pairwise(assigned))


@given(engine_pairs())
def test_confirmations_mirror_release_targets_and_leave_no_producer_rank_waiting_for_nobody(pair):
    consumer, producer = pair
    targets = {rank.rank: release_targets(rank, consumer, producer) for rank in consumer.ranks}
    for holder in producer.ranks:
        expected = expected_confirmations(holder, producer, consumer)
        assert expected
        assert expected == {rank for rank, to in targets.items() if holder.rank in to}


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


def share_an_item(one, other):
    """Whether two ranks hold the same head of the same layer and part of the same token."""
    return any(
        items_of(index, ours) & items_of(index, theirs)
        and set(owned_tokens(ours, range(PATTERN_TOKENS)))
        & set(owned_tokens(theirs, range(PATTERN_TOKENS)))
        for index, (ours, theirs) in enumerate(zip(one.groups, other.groups, strict=True))
    )


@given(engine_pairs())
def test_those_who_hold_a_common_item_confirm_and_if_none_does_one_other(pair):
    consumer, producer = pair
    for holder in producer.ranks:
        sharing = {rank.rank for rank in consumer.ranks if share_an_item(rank, holder)}
        expected = expected_confirmations(holder, producer, consumer)
        assert expected == sharing or (not sharing and len(expected) == 1)


@given(engine_pairs())
def test_a_rank_releases_every_rank_that_it_reads_from(pair):
    consumer, producer = pair
    for rank in consumer.ranks:
        spread = rank.rank.global_rank(consumer.tp_size)
        sources = {r.source for r in source_rectangles(rank, spread, producer)}
        assert sources <= set(release_targets(rank, consumer, producer))


def readers_by_replica(consumer: EngineGeometry, producer: EngineGeometry):
    """How many consumer ranks of one stage read one (group, layer, family, head, token) from each of its holders."""
    readers: dict[tuple[int, ...], Counter[Rank]] = defaultdict(Counter)
    for rank in consumer.ranks:
        spread = rank.rank.global_rank(consumer.tp_size)
        for r in source_rectangles(rank, spread, producer):
            for layer in r.layers:
                for head in range(r.head_start, r.head_stop):
                    readers[r.group, layer, r.family, head, r.stripe.first][r.source] += 1
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


def topology_of(engine: EngineGeometry, rank: Rank) -> TpKVTopology:
    group = engine.rank_geometry(rank).groups[0]
    part = group.parts[0]
    return TpKVTopology(
        tp_rank=rank.tp_rank,
        tp_size=engine.tp_size,
        pp_rank=rank.pp_rank,
        pp_size=engine.pp_size,
        total_num_kv_heads=part.total_heads,
        is_mla=part.name == "latent",
        block_size=group.block_size,
        engine_id=engine.engine_id,
        layers=group.layers,
        layout=probe_layout(FlashAttentionBackend()),
        context_parallel=group.context_parallel,
    )


@given(engine_pairs(even_heads=True))
def test_target_ranks_agree_with_the_mapping_that_plans_use(pair):
    consumer, producer = pair
    for rank in consumer.ranks:
        if not rank.groups[0].layers:
            continue
        topology = topology_of(consumer, rank.rank)
        spread = rank.rank.global_rank(consumer.tp_size)
        assert topology.global_rank == spread
        assert topology.heads == rank.groups[0].families[0].head_range
        targets = [
            (Rank(t.pp_rank, t.tp_rank), t.layers, t.head_start, t.head_stop, t.stripe)
            for t in topology.get_target_remote_ranks(producer)
        ]
        assert targets == [
            (r.source, r.layers, r.head_start, r.head_stop, r.stripe)
            for r in source_rectangles(rank, spread, producer)
            if (r.group, r.family) == (0, 0)
        ]
        for target in topology.get_target_remote_ranks(producer):
            assert producer.ranks[target.global_rank].rank == (target.pp_rank, target.tp_rank)


@given(engine_pairs(even_heads=True))
def test_ratios_are_exact_and_ours_over_theirs(pair):
    consumer, producer = pair
    holder = next(rank for rank in consumer.ranks if rank.groups[0].layers)
    topology = topology_of(consumer, holder.rank)
    blocks = [engine.ranks[0].groups[0].block_size for engine in pair]
    assert topology.tp_ratio(producer) == Fraction(consumer.tp_size, producer.tp_size)
    assert topology.pp_ratio(producer) * producer.pp_size == consumer.pp_size
    assert topology.block_size_ratio(producer) * blocks[1] == blocks[0]


@given(heads=st.integers(1, MAX_TP), tp_size=st.integers(1, MAX_TP), is_mla=st.booleans())
def test_a_cache_is_replicated_when_two_ranks_hold_the_same_head(heads, tp_size, is_mla):
    ranks = [
        TpKVTopology(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=0,
            pp_size=1,
            total_num_kv_heads=heads,
            is_mla=is_mla,
            block_size=16,
            engine_id="e",
            layers=(0,),
            layout=probe_layout(FlashAttentionBackend()),
        )
        for tp_rank in range(tp_size)
    ]
    held = Counter(head for rank in ranks for head in rank.heads)
    assert ranks[0].replicates_kv_cache == (max(held.values()) > 1)
