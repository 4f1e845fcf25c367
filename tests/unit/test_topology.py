from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest

from kvconnector.cache.slot_mapping import ContextParallel
from kvconnector.errors import GeometryError, IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.topology import (
    EngineGeometry,
    FlashAttentionBackend,
    GroupGeometry,
    PartGeometry,
    RankGeometry,
    Rectangle,
    TargetRank,
    TpKVTopology,
    check_compatible,
    expected_confirmations,
    fingerprint,
    owned_heads,
    partition_layers,
    probe_layout,
    release_targets,
    source_rectangles,
)
from tests.support.strategies import GroupShape, ModelShape, PartShape, cut_engine

LAYERS = (0, 1, 2, 3)


def engine(*, tp_size=1, stages=(LAYERS,), heads=4, parts=("k", "v"), block_size=16, name="e"):
    shape = ModelShape(4, (GroupShape(LAYERS, tuple(PartShape(p, heads, 8, 2) for p in parts)),))
    return cut_engine(
        shape, engine_id=name, stages=stages, block_sizes=[block_size], tp_size=tp_size
    )


def mla(tp_size, stages=(LAYERS,)):
    return engine(tp_size=tp_size, stages=stages, heads=1, parts=("latent",))


def part(**changes):
    fields = {"name": "k", "total_heads": 4, "head_start": 0, "head_stop": 2}
    return PartGeometry(**fields | {"head_dim": 8, "item_size_bytes": 2} | changes)


def test_heads_where_sizes_do_not_divide():
    assert [owned_heads(3, r, 2) for r in range(2)] == [range(1), range(1, 3)]
    assert [owned_heads(3, r, 4).start for r in range(4)] == [0, 0, 1, 2]
    for wrong in ((0, 0, 1), (4, 0, 0), (4, 2, 2), (4, -1, 2)):
        with pytest.raises(GeometryError, match="tp_rank"):
            owned_heads(*wrong)


def test_layers_where_sizes_do_not_divide():
    assert partition_layers(5, 2) == (range(3), range(3, 5))
    assert partition_layers(5, 2, [1, 4]) == (range(1), range(1, 5))
    for wrong in ((5, 0), (1, 2), (5, 2, [5]), (5, 2, [2, 2]), (5, 2, [5, 0]), (5, 2, [6, -1])):
        with pytest.raises(GeometryError, match=r"stage"):
            partition_layers(*wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"head_start": -1},
        {"head_start": 2},
        {"head_stop": 5},
        {"head_dim": 0},
        {"item_size_bytes": 0},
    ],
)
def test_an_impossible_part_is_refused(wrong):
    with pytest.raises(GeometryError, match="a part needs"):
        part(**wrong)


@pytest.mark.parametrize(
    "wrong,complaint",
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1 << 21}, "block_size"),
        ({"layers": (1, 0)}, "ascend"),
        ({"layers": (1, 1)}, "ascend"),
        ({"layers": (-1, 1)}, "out of range"),
        ({"layers": (1 << 16,)}, "out of range"),
        ({"dcp_size": 0}, "none of its context parallel group"),
        ({"dcp_size": 2, "dcp_rank": 2}, "none of its context parallel group"),
        ({"dcp_size": 2, "interleave_tokens": 0}, "at least 1"),
        ({"dcp_size": 2, "interleave_tokens": 5}, "does not divide the block"),
        ({"parts": ()}, "distinct names"),
        ({"parts": (part(), part())}, "distinct names"),
        ({"parts": (part(), part(name="v", head_stop=1))}, "same heads"),
    ],
)
def test_an_impossible_group_is_refused(wrong, complaint):
    fields = {"block_size": 16, "layers": (0,), "parts": (part(),)}
    GroupGeometry(**fields)
    with pytest.raises(GeometryError, match=complaint):
        GroupGeometry(**fields | wrong)


def test_parts_of_one_shape_are_a_family():
    group = GroupGeometry(
        block_size=16, layers=(0, 5), parts=(part(), part(name="state", head_dim=3), part(name="v"))
    )
    assert [family.part_indices for family in group.families] == [(0, 2), (1,)]
    assert [family.head_token_bytes for family in group.families] == [16, 6]
    assert group.token_bytes == 2 * (2 * 2 * 16 + 2 * 6)


def relisted(base: EngineGeometry, ranks, **changes):
    return msgspec.structs.replace(base, ranks=tuple(ranks), **changes)


def test_an_engine_lists_every_rank_once_in_order():
    base = engine(tp_size=2, stages=((0, 1), (2, 3)))
    a, b, c, d = base.ranks
    for ranks in ((a, b, c), (a, b, c, d, d), (b, a, c, d), (a, a, c, d), ()):
        with pytest.raises(GeometryError, match="in order"):
            relisted(base, ranks)
    for sizes in ({"tp_size": 4, "pp_size": 1}, {"tp_size": 1, "pp_size": 4}, {"tp_size": 1 << 40}):
        with pytest.raises(GeometryError, match="in order"):
            relisted(base, base.ranks, **sizes)
    for sizes in ({"tp_size": 0}, {"pp_size": -1}):
        with pytest.raises(GeometryError, match="positive"):
            relisted(base, base.ranks, **sizes)


def test_the_ranks_of_an_engine_agree_with_each_other():
    base = engine(tp_size=2, stages=((0, 1), (2, 3)))

    def with_third_rank(**changes):
        group = msgspec.structs.replace(base.ranks[2].groups[0], **changes)
        third = msgspec.structs.replace(base.ranks[2], groups=(group,))
        return relisted(base, (*base.ranks[:2], third, base.ranks[3]))

    with pytest.raises(GeometryError, match="same groups"):
        with_third_rank(block_size=32)
    with pytest.raises(GeometryError, match="same groups"):
        with_third_rank(parts=(part(),))
    with pytest.raises(GeometryError, match="same layers"):
        with_third_rank(layers=(2,))
    with pytest.raises(GeometryError, match="one pipeline stage"):
        engine(stages=((0, 1), (1, 2, 3)))


def test_ranks_by_position():
    base = engine(tp_size=2, stages=((0, 1), (2, 3)))
    assert base.rank_geometry(Rank(1, 0)) is base.ranks[2]
    assert [rank.rank for rank in base.stage(1)] == [(1, 0), (1, 1)]
    assert base.ranks[2].layers == (2, 3)
    assert (base.world_size, base.num_groups) == (4, 1)
    for wrong in (Rank(0, 2), Rank(2, 0), Rank(0, -1), Rank(-1, 0)):
        with pytest.raises(GeometryError, match="no such rank"):
            base.rank_geometry(wrong)


def test_engines_that_differ_only_in_how_they_are_cut_are_compatible():
    ours = engine()
    theirs = engine(tp_size=3, stages=((0, 2), (1, 3)), block_size=64, name="other")
    check_compatible(ours, theirs)
    assert fingerprint(ours) == fingerprint(theirs)


def test_engines_that_differ_in_what_the_cache_means_are_not():
    ours = engine()
    model = ours.model
    assert fingerprint(engine(heads=2)) != fingerprint(engine(stages=((0, 1, 2),), heads=2))
    with pytest.raises(IncompatiblePeerError, match="disagree in groups"):
        check_compatible(ours, engine(stages=((0, 1, 2),)))
    differing = {
        "groups": engine(heads=2),
        "model": relisted(ours, ours.ranks, model=msgspec.structs.replace(model, model="x")),
        "dtype": relisted(ours, ours.ranks, model=msgspec.structs.replace(model, dtype="fp8")),
        "quantization": relisted(
            ours, ours.ranks, model=msgspec.structs.replace(model, quantization="q")
        ),
        "num_layers": relisted(
            ours, ours.ranks, model=msgspec.structs.replace(model, num_layers=5)
        ),
    }
    for name, theirs in differing.items():
        assert fingerprint(theirs) != fingerprint(ours)
        with pytest.raises(IncompatiblePeerError, match=f"disagree in {name}") as refused:
            check_compatible(ours, theirs)
        named = refused.value.context[f"{name}_ours_theirs"]
        assert isinstance(named, tuple)
        assert named[0] != named[1]


def rectangle(source, layers, heads):
    return Rectangle(
        source=Rank(*source),
        group=0,
        family=0,
        layers=layers,
        head_start=heads[0],
        head_stop=heads[1],
    )


def test_two_ranks_read_three_over_two_stages():
    consumer = engine(tp_size=2)
    producer = engine(tp_size=3, stages=((0, 1, 2), (3,)))
    assert source_rectangles(consumer.ranks[0], 0, producer) == (
        rectangle((0, 0), (0, 1, 2), (0, 1)),
        rectangle((0, 1), (0, 1, 2), (1, 2)),
        rectangle((1, 0), (3,), (0, 1)),
        rectangle((1, 1), (3,), (1, 2)),
    )
    assert source_rectangles(consumer.ranks[1], 1, producer) == (
        rectangle((0, 2), (0, 1, 2), (2, 4)),
        rectangle((1, 2), (3,), (2, 4)),
    )


def test_layers_that_are_no_neighbours_at_the_producer_are_read_apart():
    producer = engine(stages=((0, 2), (1, 3)))
    assert source_rectangles(engine().ranks[0], 0, producer) == (
        rectangle((0, 0), (0,), (0, 4)),
        rectangle((0, 0), (2,), (0, 4)),
        rectangle((1, 0), (1,), (0, 4)),
        rectangle((1, 0), (3,), (0, 4)),
    )


def test_each_latent_is_read_from_a_replica_of_its_own():
    consumer, producer = mla(4), mla(4)
    sources = [source_rectangles(rank, i, producer) for i, rank in enumerate(consumer.ranks)]
    assert [r.source.tp_rank for [r] in sources] == [0, 1, 2, 3]


def test_replicas_that_nobody_reads_are_released_too():
    consumer, producer = mla(1), mla(4)
    [read] = source_rectangles(consumer.ranks[0], 0, producer)
    assert read.source == Rank(0, 0)
    assert len(release_targets(consumer.ranks[0], consumer, producer)) == 4


def test_a_producer_rank_that_nobody_needs_is_released_by_one_consumer_rank():
    shape = ModelShape(4, (GroupShape((0, 1), (PartShape("latent", 1, 8, 2),)),))
    # no cache layer is on the producer's last stage
    producer = cut_engine(
        shape, engine_id="p", stages=((0, 1), (2, 3)), block_sizes=[16], tp_size=3
    )
    consumer = cut_engine(
        shape, engine_id="c", stages=((0, 1), (2, 3)), block_sizes=[16], tp_size=2
    )
    for holder, chosen in ((3, 3), (4, 0), (5, 1)):
        idle, confirms = producer.ranks[holder], consumer.ranks[chosen]
        assert expected_confirmations(idle, producer, consumer) == {confirms.rank}
        assert idle.rank in release_targets(confirms, consumer, producer)


def test_what_the_producer_lacks_is_named():
    whole = engine()
    half = relisted(
        whole, [RankGeometry(pp_rank=0, tp_rank=0, groups=engine(tp_size=2).ranks[0].groups)]
    )
    with pytest.raises(GeometryError, match="heads"):
        source_rectangles(whole.ranks[0], 0, half)
    short = cut_engine(
        ModelShape(4, (GroupShape((0, 3), (PartShape("k", 4, 8, 2), PartShape("v", 4, 8, 2))),)),
        engine_id="short",
        stages=(LAYERS,),
        block_sizes=[16],
        tp_size=1,
    )
    with pytest.raises(GeometryError, match="layers") as refused:
        source_rectangles(whole.ranks[0], 0, short)
    assert refused.value.context == {"layers": [1, 2], "peer": "short"}


def topology(**changes):
    fields = {
        "tp_rank": 1,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 1,
        "total_num_kv_heads": 4,
        "is_mla": False,
        "block_size": 64,
        "engine_id": "e",
        "layers": LAYERS,
        "layout": probe_layout(FlashAttentionBackend()),
    }
    return TpKVTopology(**fields | changes)


def test_a_rank_finds_its_remote_ranks():
    remote = engine(tp_size=3, stages=((0, 1, 2), (3,)))
    assert topology().get_target_remote_ranks(remote) == (
        TargetRank(
            global_rank=2, pp_rank=0, tp_rank=2, layers=(0, 1, 2), head_start=2, head_stop=4
        ),
        TargetRank(global_rank=5, pp_rank=1, tp_rank=2, layers=(3,), head_start=2, head_stop=4),
    )
    assert topology().tp_ratio(remote) == Fraction(2, 3)
    assert topology().pp_ratio(remote) == Fraction(1, 2)
    assert topology().block_size_ratio(remote) == 4
    with pytest.raises(GeometryError, match="layers"):
        topology(layers=(3, 4)).get_target_remote_ranks(remote)


@pytest.mark.parametrize(
    "heads,tp_size,is_mla,kv_replicated,cache_replicated",
    [
        (4, 2, False, False, False),
        (4, 4, False, False, False),
        (4, 8, False, True, True),
        (1, 1, True, False, False),
        (128, 2, True, False, True),
        (1, 2, True, True, True),
    ],
)
def test_what_is_replicated(heads, tp_size, is_mla, kv_replicated, cache_replicated):
    one = topology(total_num_kv_heads=heads, tp_size=tp_size, tp_rank=0, is_mla=is_mla)
    assert one.is_kv_replicated is kv_replicated
    assert one.replicates_kv_cache is cache_replicated


def test_a_topology_passes_on_what_its_layout_says():
    one = topology()
    assert one.split_k_and_v
    assert not one.is_kv_layout_blocks_first
    assert not one.cross_layers_blocks
    assert one.block_size_position == -3
    assert (one.global_rank, one.heads) == (1, range(2, 4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tp_rank": 2},
        {"pp_rank": -1},
        {"tp_size": 0},
        {"total_num_kv_heads": 0},
        {"block_size": 0},
        {"layers": ()},
        {"layers": (1, 0)},
        {"context_parallel": ContextParallel(world_size=3)},
    ],
)
def test_an_impossible_rank_is_refused(wrong):
    with pytest.raises(GeometryError):
        topology(**wrong)
