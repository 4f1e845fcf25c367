"""Heads, layers and source ranks, over random pairs of engines."""

from collections import Counter, defaultdict
from itertools import islice, product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import GeometryError
from kvconnector.topology import TpKVTopology
from tests.support.strategies import engine_pairs


@given(total=st.integers(1, 40), tp_size=st.integers(1, 40))
def test_ranks_own_all_heads_in_even_runs(total, tp_size):
    owned = [TpKVTopology.heads_of(total, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]
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
def test_stages_get_contiguous_layers_longest_first(num_layers, pp_size):
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


@given(engine_pairs())
def test_the_readers_of_a_rank_confirm_or_one_other_if_none(pair):
    consumer, producer = pair
    sources = {
        rank.rank: {
            t.rank for t in TpKVTopology(consumer, rank.rank).get_target_remote_ranks(producer)
        }
        for rank in consumer.ranks
    }
    for holder in producer.ranks:
        reading = {rank for rank, read in sources.items() if holder.rank in read}
        readers = TpKVTopology(producer, holder.rank).readers(consumer)
        assert readers == reading or (not reading and len(readers) == 1)


@given(engine_pairs())
def test_a_rank_greets_the_ranks_it_confirms_to(pair):
    consumer, producer = pair
    for rank in consumer.ranks:
        awaiting = [
            holder.rank
            for holder in producer.ranks
            if rank.rank in TpKVTopology(producer, holder.rank).readers(consumer)
        ]
        assert TpKVTopology(consumer, rank.rank).holders(producer) == tuple(awaiting)


@given(total=st.integers(1, 40), shares=st.integers(1, 10), dcp_size=st.integers(1, 4))
def test_ranks_that_share_tokens_hold_the_same_heads(total, shares, dcp_size):
    for rank in range(tp_size := shares * dcp_size):
        shared = TpKVTopology.heads_of(total, tp_rank=rank, tp_size=tp_size, dcp_size=dcp_size)
        assert shared == TpKVTopology.heads_of(total, tp_rank=rank // dcp_size, tp_size=shares)


@given(engine_pairs())
def test_a_cache_is_replicated_if_two_ranks_hold_one_token(pair):
    for engine in pair:
        held = Counter(
            (layer, index, part.name, head, token)
            for rank in engine.ranks
            for index, group in enumerate(rank.groups)
            for layer in group.layers
            for part in group.parts
            for head in range(part.head_start, part.head_stop)
            for token in range(group.interleave_tokens * group.dcp_size)
            if token // group.interleave_tokens == group.dcp_rank
        )
        assert TpKVTopology.replicates_kv_cache(engine) == (max(held.values()) > 1)


def readers_by_replica(consumer, producer):
    """Count, for each (group, layer, family, head, token), the consumer ranks that read it from each holder."""
    readers = defaultdict(Counter)
    for rank in consumer.ranks:
        for target in TpKVTopology(consumer, rank.rank).get_target_remote_ranks(producer):
            for s in target.segments:
                for layer in s.layers:
                    for head in range(s.head_start, s.head_stop):
                        readers[s.group, layer, s.family, head, s.stripe.first][target.rank] += 1
    for (index, layer, family, head, token), counts in readers.items():
        yield [
            counts[rank.rank]
            for rank in producer.ranks
            for group in [rank.groups[index]]
            if layer in group.layers
            and head in group.families[family].head_range
            and token // group.interleave_tokens % group.dcp_size == group.dcp_rank
        ]


@given(engine_pairs(even_heads=True))
def test_readers_spread_evenly_over_replicas(pair):
    for counts in readers_by_replica(*pair):
        assert max(counts) - min(counts) <= 1


def sources(consumer, producer):
    return [
        [(target.rank, target.segments) for target in targets]
        for rank in consumer.ranks
        for targets in [TpKVTopology(consumer, rank.rank).get_target_remote_ranks(producer)]
    ]


@given(engine_pairs())
def test_between_engines_of_one_shape_each_rank_reads_its_own_number(pair):
    for engine in pair:
        equal_engine = msgspec.structs.replace(engine, engine_id="equal")
        for rank, targets in zip(engine.ranks, sources(engine, equal_engine), strict=True):
            assert {source for source, _ in targets} <= {rank.rank}


@given(engine_pairs(), st.text(max_size=8))
def test_ids_matter_only_where_replicas_outnumber_the_ranks_that_read_them(pair, name):
    consumer, producer = pair
    renamed = msgspec.structs.replace(consumer, engine_id=name)
    elsewhere = msgspec.structs.replace(producer, engine_id="elsewhere")
    assert sources(consumer, producer) == sources(consumer, elsewhere)
    if all(min(counts) for counts in readers_by_replica(consumer, producer)):
        assert sources(renamed, producer) == sources(consumer, producer)


@given(engine_pairs())
def test_both_engines_use_the_older_rule(pair):
    consumer, producer = pair
    earlier = [msgspec.structs.replace(engine, replica_rule=0) for engine in pair]
    expected = sources(*earlier)
    assert sources(consumer, earlier[1]) == sources(earlier[0], producer) == expected
    for ours, theirs in ((consumer, earlier[1]), (earlier[0], producer)):
        for holder, rank in product(theirs.ranks, ours.ranks):
            greets = holder.rank in TpKVTopology(ours, rank.rank).holders(theirs)
            awaits = rank.rank in TpKVTopology(theirs, holder.rank).readers(ours)
            assert greets is awaits


def in_memory(engine, order):
    """Return the engine with its caches stored as "HND" or "NHD"."""

    def stored(group):
        counts = {"N": group.block_size}
        parts = [
            msgspec.structs.replace(
                part,
                memory_order="B"
                + "".join(
                    axis
                    for axis in order
                    if (counts | {"H": part.num_heads, "D": part.head_dim})[axis] > 1
                ),
            )
            for part in group.parts
        ]
        return msgspec.structs.replace(group, parts=tuple(parts))

    ranks = [
        msgspec.structs.replace(rank, groups=tuple(map(stored, rank.groups)))
        for rank in engine.ranks
    ]
    return msgspec.structs.replace(engine, ranks=tuple(ranks))


def first_blocks(group, part, order):
    """Return the (head, token) pairs of a rank's first blocks, in memory order."""
    own = (
        t for t in range(10_000) if t // group.interleave_tokens % group.dcp_size == group.dcp_rank
    )
    heads = range(part.head_start, part.head_stop)
    blocks = []
    for _ in range(24):
        tokens = list(islice(own, group.block_size))
        by_head = product(heads, tokens)
        by_token = [(head, token) for token in tokens for head in heads]
        blocks.append(list(by_head) if order == "HND" else by_token)
    return blocks


@given(engine_pairs(), st.sampled_from(["HND", "NHD"]), st.sampled_from(["HND", "NHD"]))
def test_equal_blocks_need_no_relayout(pair, here, there):
    consumer, producer = in_memory(pair[0], here), in_memory(pair[1], there)
    for rank in consumer.ranks:
        topology = TpKVTopology(consumer, rank.rank)
        differs = False
        for target in topology.get_target_remote_ranks(producer):
            for segment in target.segments:
                ours = rank.groups[segment.group]
                theirs = producer.rank_geometry(target.rank).groups[segment.group]
                part = ours.families[segment.family].part_indices[0]
                differs |= first_blocks(ours, ours.parts[part], here) != first_blocks(
                    theirs, theirs.parts[part], there
                )
        assert topology.needs_relayout(producer) is differs
