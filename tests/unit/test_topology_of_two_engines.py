"""A topology's view of another engine: source ranks, ratios, replicas and layouts."""

from fractions import Fraction

import msgspec
import pytest

from kvconnector.errors import GeometryError, IncompatiblePeerError, LocalError
from kvconnector.topology import TpKVTopology, tp_kv
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine
from tests.unit.topologies import LAYERS, engine, mla, relisted, sharing, topology


def stored(order, **cut):
    """Make an engine whose parts have this memory order."""

    def rank_of(rank):
        (group,) = rank.groups
        parts = tuple(msgspec.structs.replace(p, memory_order=order) for p in group.parts)
        return msgspec.structs.replace(rank, groups=(msgspec.structs.replace(group, parts=parts),))

    whole = engine(**cut)
    return relisted(whole, map(rank_of, whole.ranks))


def test_the_modules_example_holds():
    def cut(name, tp_size, stages):
        shape = FakeModel(6, (FakeGroup(tuple(range(6)), (FakePart("k", 2, 8, 2),)),))
        return cut_engine(shape, engine_id=name, stages=stages, block_sizes=[16], tp_size=tp_size)

    prefill = cut("prefill", 4, [range(6)])
    decode = cut("decode", 3, [range(3), range(3, 6)])
    first, second = (0, 1, 2), (3, 4, 5)
    held = [(rank.groups[0].layers, rank.groups[0].parts[0].head_start) for rank in decode.ranks]
    assert held == [(first, 0), (first, 0), (first, 1), (second, 0), (second, 0), (second, 1)]
    assert [rank.groups[0].parts[0].head_start for rank in prefill.ranks] == [0, 0, 1, 1]
    read = {
        str(rank.rank): [
            (target.rank.tp_rank, segment.layers, segment.head_start)
            for target in topology(decode, rank.rank).get_target_remote_ranks(prefill)
            for segment in target.segments
        ]
        for rank in decode.ranks
    }
    assert read == {
        "pp0tp0": [(0, first, 0)],
        "pp0tp1": [(1, first, 0)],
        "pp0tp2": [(2, first, 1)],
        "pp1tp0": [(0, second, 0)],
        "pp1tp1": [(1, second, 0)],
        "pp1tp2": [(3, second, 1)],
    }
    ours = topology(decode)
    assert (ours.tp_ratio(prefill), ours.pp_ratio(prefill)) == (Fraction(3, 4), 2)
    assert ours.is_kv_replicated(prefill)
    assert ours.is_kv_replicated(decode)


@pytest.mark.parametrize("takes_draft", [True, False])
@pytest.mark.parametrize("num_optional", [0, 1, 2])
def test_one_engine_may_lack_the_other_ones_last_groups(takes_draft, num_optional):
    """One engine has a draft model's cache, a group of its own after the model's."""
    kv = FakeGroup(LAYERS, (FakePart("k", 4, 8, 2),))
    draft = FakeGroup((4,), (FakePart("k", 2, 8, 2),))

    def cut(name, *groups, num_optional=0):
        shape = FakeModel(5, groups)
        sizes = {"block_sizes": [16] * len(groups), "tp_size": 1, "num_optional": num_optional}
        return cut_engine(shape, engine_id=name, stages=[range(5)], **sizes)

    pair = cut("longer", kv, draft, num_optional=num_optional), cut("shorter", kv)
    consumer, producer = pair if takes_draft else pair[::-1]
    ours = topology(consumer)
    if not num_optional:
        with pytest.raises(IncompatiblePeerError, match="differ in cache_groups"):
            ours.check_compatible(producer)
        with pytest.raises(IncompatiblePeerError, match="same cache groups"):
            ours.get_target_remote_ranks(producer)
        return
    ours.check_compatible(producer)
    (target,) = ours.get_target_remote_ranks(producer)
    assert {segment.group for segment in target.segments} == {0}
    # where both have it, it is no more optional than others
    other = cut("other", kv, FakeGroup((4,), (FakePart("k", 4, 8, 2),)), num_optional=1)
    both = cut("both", kv, draft, num_optional=1)
    with pytest.raises(IncompatiblePeerError, match="differ in kv_heads_1"):
        topology(both).check_compatible(other)
    (target,) = topology(both).get_target_remote_ranks(cut("same", kv, draft, num_optional=2))
    assert {segment.group for segment in target.segments} == {0, 1}


@pytest.mark.parametrize("takes_draft", [True, False])
@pytest.mark.parametrize("is_stated", [True, False])
def test_one_engine_may_lack_the_other_ones_optional_layers(takes_draft, is_stated):
    """One engine has a draft model's layer in the model's own group, with a scale that the other does not state."""

    def cut(name, *drafts, optional=()):
        parts = (FakePart("k", 4, 8, 1),)
        shape = FakeModel(6, (FakeGroup((*LAYERS, *drafts), parts, optional_layers=optional),))
        whole = cut_engine(shape, engine_id=name, stages=[range(6)], block_sizes=[16], tp_size=1)
        (rank,) = whole.ranks
        scales = tuple(((0.5 + layer,),) for layer in rank.groups[0].layers)
        groups = tuple(msgspec.structs.replace(each, scales=scales) for each in rank.groups)
        return relisted(whole, [msgspec.structs.replace(rank, groups=groups)])

    pair = cut("longer", 4, 5, optional=(4, 5) if is_stated else (4,)), cut("shorter")
    consumer, producer = pair if takes_draft else pair[::-1]
    ours = topology(consumer)
    if not is_stated:
        with pytest.raises(IncompatiblePeerError, match="differ in layers") as refused:
            ours.check_compatible(producer)
        assert refused.value.context["layers"] == {"longer": "0,1,2,3,5", "shorter": "0-3"}
        if takes_draft:
            with pytest.raises(IncompatiblePeerError, match="no rank of the other engine holds"):
                ours.get_target_remote_ranks(producer)
        return
    ours.check_compatible(producer)
    (target,) = ours.get_target_remote_ranks(producer)
    assert [segment.layers for segment in target.segments] == [LAYERS]
    # where both have them, they are read like others
    both = cut("both", 4, 5, optional=(4, 5)), cut("same", 4, 5, optional=(5,))
    topology(both[0]).check_compatible(both[1])
    (target,) = topology(both[0]).get_target_remote_ranks(both[1])
    assert [segment.layers for segment in target.segments] == [(*LAYERS, 4, 5)]


def test_layers_that_are_grouped_otherwise_are_refused_with_the_likely_cause():
    """As vLLM does for a hybrid model whose draft layers outnumber one of its kinds."""

    def cut(name, *groups):
        parts = (FakePart("state", 1, 8, 2),)
        shape = FakeModel(6, tuple(FakeGroup(layers, parts) for layers in groups))
        sizes = {"block_sizes": [1] * len(groups), "tp_size": 1}
        return cut_engine(shape, engine_id=name, stages=[range(6)], **sizes)

    ours, theirs = cut("three", (0, 3), (1, 4), (2, 5)), cut("same", (0, 2, 4), (1, 3, 5), (0,))
    with pytest.raises(IncompatiblePeerError, match="the same speculative configuration"):
        topology(ours).check_compatible(theirs)


def test_an_optional_layer_is_one_of_a_groups_layers():
    (rank,) = engine().ranks[:1]
    with pytest.raises(GeometryError, match="optional layers are some of its layers"):
        msgspec.structs.replace(rank.groups[0], optional_layers=(99,))


def test_rows_of_unequal_tokens_are_refused():
    def cut(m):
        shape = FakeModel(4, (FakeGroup(LAYERS, (FakePart("k", 4, 8, 2),), m),))
        return cut_engine(shape, engine_id=f"m{m}", stages=[LAYERS], block_sizes=[16], tp_size=1)

    for ours, theirs in ((1, 4), (4, 1), (4, 128)):
        with pytest.raises(IncompatiblePeerError, match="differ in row_tokens"):
            topology(cut(ours)).check_compatible(cut(theirs))
    topology(cut(4)).check_compatible(cut(4))
    with pytest.raises(GeometryError, match="row_tokens=0"):
        cut(0)


def test_an_engine_has_no_more_optional_groups_than_groups():
    for count in (-1, 2):
        with pytest.raises(GeometryError, match=f"num_optional={count}, groups=1"):
            relisted(engine(), engine().ranks, num_optional=count)


def two_groups(name, tp_size, stages, block_sizes):
    groups = [FakeGroup(LAYERS, (FakePart(kind, 4, 8, 2),)) for kind in ("full", "window")]
    shape = FakeModel(4, tuple(groups))
    return cut_engine(
        shape, engine_id=name, stages=stages, block_sizes=block_sizes, tp_size=tp_size
    )


def test_ratios_are_ours_over_theirs():
    ours = topology(two_groups("ours", 2, [(0, 1), (2, 3)], [16, 64]))
    theirs = two_groups("theirs", 3, [LAYERS], [24, 16])
    assert (ours.tp_ratio(theirs), ours.pp_ratio(theirs)) == (Fraction(2, 3), 2)
    assert [ours.block_size_ratio(theirs, group) for group in (0, 1)] == [Fraction(2, 3), 4]
    assert ours.describe(theirs) == "tp 2/3, pp 2, block size 2/3, 4; blocks change their layout"
    same = topology(engine()).describe(engine())
    assert same == "tp 1, pp 1, block size 1; blocks are copied as they are"


def test_met_engines_are_known_by_id():
    ours = topology(two_groups("ours", 2, [(0, 1), (2, 3)], [16, 64]))
    theirs = two_groups("theirs", 3, [LAYERS], [24, 16])
    with pytest.raises(LocalError, match="has not been greeted") as unknown:
        ours.tp_ratio_from_engine_id("theirs")
    assert unknown.value.context == {"engine": "theirs", "met": []}
    with pytest.raises(IncompatiblePeerError):
        ours.check_compatible(engine(name="other"))
    ours.check_compatible(theirs)
    assert ours.tp_ratio_from_engine_id("theirs") == Fraction(2, 3)
    assert ours.pp_ratio_from_engine_id("theirs") == 2
    assert ours.block_size_ratio_from_engine_id("theirs", 1) == 4
    targets = ours.get_target_remote_ranks_from_engine_id("theirs")
    assert targets == ours.get_target_remote_ranks(theirs)
    with pytest.raises(LocalError):
        ours.pp_ratio_from_engine_id("other")


def test_the_oldest_met_engines_are_forgotten(monkeypatch):
    monkeypatch.setattr(tp_kv, "MAX_REMOTES", 2)
    ours = topology(engine(name="ours"))
    for name in ("a", "b", "a", "c"):
        ours.check_compatible(engine(name=name))
    for name in ("a", "c"):
        assert ours.tp_ratio_from_engine_id(name) == 1
    with pytest.raises(LocalError) as forgotten:
        ours.tp_ratio_from_engine_id("b")
    assert forgotten.value.context["met"] == ["a", "c"]


def test_a_segments_layers_are_adjacent_on_both_sides():
    def read(ours, theirs):
        targets = topology(engine(stages=ours)).get_target_remote_ranks(engine(stages=theirs))
        return [segment.layers for target in targets for segment in target.segments]

    whole, dealt = [LAYERS], [(0, 2), (1, 3)]
    assert read(whole, dealt) == [(0,), (2,), (1,), (3,)]
    assert read(dealt, whole) == [(0,), (2,)]
    assert read(dealt, dealt) == [(0, 2)]
    assert read(whole, [(0, 3), (1, 2)]) == [(0,), (3,), (1, 2)]


def overlapping():
    """Make an engine of which one rank has all heads, and the other the last two."""
    whole, halves = engine(tp_size=1), engine(tp_size=2)
    return relisted(halves, [whole.ranks[0], halves.ranks[1]])


@pytest.mark.parametrize(
    "whole, by_heads, in_any_way",
    [
        (engine(tp_size=4), False, False),
        (mla(2), True, True),
        # eight ranks, of which pairs share the tokens
        (engine(tp_size=8, dcp=(2, 1)), False, False),
        (engine(tp_size=8, heads=2, dcp=(2, 1)), True, True),
        (sharing(4, 1), False, False),
        (overlapping(), False, True),
    ],
)
def test_replication_by_heads_and_in_any_way(whole, by_heads, in_any_way):
    assert TpKVTopology.is_kv_replicated(whole) is by_heads
    assert TpKVTopology.replicates_kv_cache(whole) is in_any_way


@pytest.mark.parametrize(
    "ours, theirs, needed",
    [
        (engine(), engine(tp_size=2), True),
        (engine(), engine(block_size=32), True),
        (engine(), engine(name="another"), False),
        (sharing(2, 4), sharing(2, 8), True),
        (stored("2BHND"), stored("2BNHD"), True),
        # the order of blocks, parts and layers does not change a block
        (stored("2BHND"), stored("BL2HND"), False),
        (stored("2BHND"), engine(), False),
        # with one head both orders are the same
        (stored("2BND", tp_size=4), stored("B2ND", tp_size=4), False),
    ],
)
def test_unequal_blocks_need_a_relayout(ours, theirs, needed):
    assert topology(ours).needs_relayout(theirs) is needed
    assert topology(theirs).needs_relayout(ours) is needed


@pytest.mark.parametrize(
    "order, blocks_first, split, cross_layers, position",
    [
        ("2BNHD", False, True, False, -3),
        ("2BHND", False, True, False, -2),
        ("B2NHD", True, False, False, -3),
        ("BHN2D", True, False, False, -2),
        ("2BHDN", False, True, False, -1),
        ("BND", True, False, False, -2),
        ("BL2HND", True, False, True, -2),
        ("BHL2ND", True, False, True, -2),
    ],
)
def test_layout_properties_follow_the_memory_order(
    order, blocks_first, split, cross_layers, position
):
    ours = topology(stored(order))
    assert ours.memory_order() == order
    assert ours.is_kv_layout_blocks_first() is blocks_first
    assert ours.split_k_and_v() is split
    assert ours.cross_layers_blocks() is cross_layers
    assert ours.block_size_position() == position


def test_an_unknown_layout_is_refused():
    with pytest.raises(GeometryError, match="memory order") as unknown:
        topology(engine()).split_k_and_v()
    assert unknown.value.context == {"engine": "e", "group": 0}
    with pytest.raises(GeometryError, match="no token axis"):
        topology(stored("BD")).block_size_position()
