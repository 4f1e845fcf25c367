from __future__ import annotations

import msgspec
import pytest

from kvconnector.errors import GeometryError, IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.topology import (
    EngineGeometry,
    GroupGeometry,
    PartGeometry,
    RankGeometry,
    TpKVTopology,
)
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine

LAYERS = (0, 1, 2, 3)


def engine(
    *, tp_size=1, stages=(LAYERS,), heads=4, parts=("k", "v"), block_size=16, name="e", dcp=(1, 1)
):
    shape = FakeModel(4, (FakeGroup(LAYERS, tuple(FakePart(p, heads, 8, 2) for p in parts)),))
    return cut_engine(
        shape,
        engine_id=name,
        stages=stages,
        block_sizes=[block_size],
        tp_size=tp_size,
        dcp=[dcp],
    )


def mla(tp_size):
    return engine(tp_size=tp_size, heads=1, parts=("latent",))


def sharing(dcp_size, interleave_tokens, block_size=16):
    """An engine whose ranks hold all heads and share the tokens."""
    return engine(
        tp_size=dcp_size, heads=1, block_size=block_size, dcp=(dcp_size, interleave_tokens)
    )


def relisted(base: EngineGeometry, ranks, **changes):
    return msgspec.structs.replace(base, ranks=tuple(ranks), **changes)


def part(**changes):
    fields = {"name": "k", "total_heads": 4, "head_start": 0, "head_stop": 2}
    return PartGeometry(**fields | {"head_dim": 8, "item_size_bytes": 2} | changes)


def topology(whole, rank=(0, 0)):
    """A rank that reads the replica of its own number."""
    rank = Rank(*rank)
    return TpKVTopology(whole, rank, replica_index=rank.global_rank(whole.tp_size))


def heads(total, tp_rank, tp_size, dcp_size=1):
    return TpKVTopology.heads_of(total, tp_rank=tp_rank, tp_size=tp_size, dcp_size=dcp_size)


def layers(num_layers, pp_size, sizes=None, pp_rank=0):
    return TpKVTopology.layers_of(
        num_layers, pp_rank=pp_rank, pp_size=pp_size, layers_per_stage=sizes
    )


def test_heads_where_sizes_do_not_divide():
    assert [heads(3, r, 2) for r in range(2)] == [range(1), range(1, 3)]
    assert [heads(3, r, 4).start for r in range(4)] == [0, 0, 1, 2]
    assert [heads(3, r, 4, dcp_size=2) for r in range(4)] == [range(1)] * 2 + [range(1, 3)] * 2
    for wrong in ((0, 0, 1), (4, 0, 0), (4, 2, 2), (4, -1, 2), (4, 0, 4, 3), (4, 0, 4, 0)):
        with pytest.raises(GeometryError, match="tp_rank"):
            heads(*wrong)


def test_layers_where_sizes_do_not_divide():
    assert [layers(5, 2, pp_rank=r) for r in range(2)] == [range(3), range(3, 5)]
    assert [layers(5, 2, [1, 4], r) for r in range(2)] == [range(1), range(1, 5)]
    for wrong in ((5, 0), (1, 2), (5, 2, [5]), (5, 2, [2, 2]), (5, 2, [5, 0]), (5, 2, [6, -1])):
        with pytest.raises(GeometryError, match="stage"):
            layers(*wrong)
    with pytest.raises(GeometryError, match="stage"):
        layers(5, 2, pp_rank=2)


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


def test_engines_that_differ_in_what_the_cache_means_are_not():
    ours = engine(name="ours")
    model = ours.model
    differing = {
        "kv_heads": engine(heads=2),
        "layers": engine(stages=((0, 1, 2),)),
        "verify": relisted(ours, ours.ranks, verify="checksum"),
        "model": relisted(ours, ours.ranks, model=msgspec.structs.replace(model, model="x")),
        "dtype": relisted(ours, ours.ranks, model=msgspec.structs.replace(model, dtype="fp8")),
        "quantization": relisted(
            ours, ours.ranks, model=msgspec.structs.replace(model, quantization="q")
        ),
        "num_layers": relisted(
            ours, ours.ranks, model=msgspec.structs.replace(model, num_layers=5)
        ),
    }
    for name, other in differing.items():
        theirs = relisted(other, other.ranks, engine_id="theirs")
        with pytest.raises(IncompatiblePeerError, match=f"disagree in {name}") as refused:
            topology(ours).check_compatible(theirs)
        named = refused.value.context[name]
        assert named["ours"] != named["theirs"]


def test_the_first_ranks_of_many_engines_do_not_all_read_the_first_replica():
    engines = [relisted(mla(1), mla(1).ranks, engine_id=f"decode-{n}") for n in range(32)]
    read = {
        target.rank for one in engines for target in TpKVTopology(one, Rank(0, 0)).targets(mla(4))
    }
    assert len(read) == 4


def test_what_the_producer_lacks_is_named():
    whole = engine()
    half = relisted(
        whole, [RankGeometry(pp_rank=0, tp_rank=0, groups=engine(tp_size=2).ranks[0].groups)]
    )
    with pytest.raises(IncompatiblePeerError, match="heads"):
        topology(whole).targets(half)
    short = cut_engine(
        FakeModel(4, (FakeGroup((0, 3), (FakePart("k", 4, 8, 2), FakePart("v", 4, 8, 2))),)),
        engine_id="short",
        stages=(LAYERS,),
        block_sizes=[16],
        tp_size=1,
    )
    with pytest.raises(IncompatiblePeerError, match="layers") as refused:
        topology(whole).targets(short)
    assert refused.value.context == {"layers": [1, 2], "group": 0, "peer": "short"}
    with pytest.raises(IncompatiblePeerError, match="same parts"):
        topology(whole).targets(mla(1))


def test_a_rank_that_its_engine_does_not_have_is_refused():
    with pytest.raises(GeometryError, match="no such rank"):
        TpKVTopology(engine(), Rank(0, 1))


def test_every_rank_of_a_context_parallel_group_is_there_and_takes_the_same_turns():
    base, other = sharing(2, 4), sharing(2, 8)
    second = msgspec.structs.replace(
        base.ranks[1], groups=(msgspec.structs.replace(base.ranks[1].groups[0], dcp_rank=0),)
    )
    with pytest.raises(GeometryError, match="every rank of a context parallel group") as refused:
        relisted(base, (base.ranks[0], second))
    assert refused.value.context["dcp_ranks"] == [0]
    with pytest.raises(GeometryError, match="same groups"):
        relisted(base, (base.ranks[0], other.ranks[1]))


def test_engines_whose_turns_hardly_ever_coincide_are_not_compatible():
    topology(sharing(2, 4)).check_compatible(sharing(3, 16))
    ours = sharing(2, 4096, block_size=4096)
    with pytest.raises(IncompatiblePeerError, match="too long a period") as refused:
        topology(ours).check_compatible(sharing(2, 4095, block_size=4095))
    assert refused.value.context["ours"] == (2, 4096)
