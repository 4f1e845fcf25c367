import msgspec
import pytest
from msgspec.structs import replace

from kvconnector.errors import GeometryError, IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.layout import Stripe, common_stripes
from kvconnector.topology import GroupGeometry, PartGeometry, RankGeometry, TpKVTopology
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine
from tests.unit.topologies import LAYERS, engine, mla, relisted, sharing, topology


def part(**changes):
    fields = {"name": "k", "total_heads": 4, "head_start": 0, "head_stop": 2}
    return PartGeometry(**fields | {"head_dim": 8, "item_size_bytes": 2} | changes)


def heads(total, tp_rank, tp_size, dcp_size=1):
    return TpKVTopology.heads_of(total, tp_rank=tp_rank, tp_size=tp_size, dcp_size=dcp_size)


def layers(num_layers, pp_size, sizes=None, pp_rank=0):
    return TpKVTopology.layers_of(
        num_layers, pp_rank=pp_rank, pp_size=pp_size, layers_per_stage=sizes
    )


def group(**changes):
    return GroupGeometry(**{"block_size": 16, "layers": (0,), "parts": (part(),)} | changes)


def split(ranks=slice(None), order=(0, 1, 2, 3), **sizes):
    """Make an engine of two stages of two ranks each, or some of its ranks, in any order, with other sizes."""
    base = engine(tp_size=2, stages=((0, 1), (2, 3)))
    return relisted(base, [base.ranks[i] for i in order][ranks], **sizes)


def with_third_rank(**changes):
    base = split()
    changed = msgspec.structs.replace(base.ranks[2].groups[0], **changes)
    third = msgspec.structs.replace(base.ranks[2], groups=(changed,))
    return relisted(base, (*base.ranks[:2], third, base.ranks[3]))


REFUSED = [
    *(
        (lambda wrong=wrong: heads(*wrong), "tp_rank")
        for wrong in ((0, 0, 1), (4, 0, 0), (4, 2, 2), (4, -1, 2), (4, 0, 4, 3), (4, 0, 4, 0))
    ),
    *((lambda wrong=wrong: heads(*wrong), "an integer") for wrong in (("4", 0, 1), (4.0, 0, 1))),
    *((lambda wrong=wrong: layers(*wrong), "an integer") for wrong in (("4", 1), (4, 1, ["4"]))),
    *(
        (lambda wrong=wrong: layers(*wrong), "stage")
        for wrong in (
            *((5, 0), (1, 2), (5, 2, [5]), (5, 2, [2, 2])),
            *((5, 2, [5, 0]), (5, 2, [6, -1]), (5, 2, None, 2)),
        )
    ),
    *(
        (lambda wrong=wrong: part(**wrong), "a part needs|at least 1")
        for wrong in (
            *({"head_start": -1}, {"head_start": 2}, {"head_stop": 5}),
            *({"head_dim": 0}, {"item_size_bytes": 0}),
        )
    ),
    (lambda: group(block_size=0), "block_size"),
    (lambda: group(block_size=1 << 21), "block_size"),
    (lambda: group(layers=(1, 0)), "ascend"),
    (lambda: group(layers=(1, 1)), "ascend"),
    (lambda: group(layers=(-1, 1)), "out of range"),
    (lambda: group(layers=(1 << 16,)), "out of range"),
    (lambda: group(dcp_size=0), "outside its context parallel group"),
    (lambda: group(dcp_size=2, dcp_rank=2), "outside its context parallel group"),
    (lambda: group(dcp_size=2, interleave_tokens=0), "at least 1"),
    (lambda: group(dcp_size=2, interleave_tokens=5), "does not divide the block"),
    (lambda: group(parts=()), "distinct names"),
    *(
        (
            lambda scales=scales: group(
                layers=(0, 1), parts=(part(), part(name="v")), scales=scales
            ),
            "scales",
        )
        for scales in ((((1.0,),) * 2,), (((1.0,),),) * 2, (((1.0,) * 3, (1.0,)),) * 2)
    ),
    (lambda: group(parts=(part(), part())), "distinct names"),
    (lambda: group(parts=(part(), part(name="v", head_stop=1))), "same heads"),
    (lambda: split(slice(3)), "in order"),
    (lambda: split(order=(0, 1, 2, 3, 3)), "in order"),
    (lambda: split(order=(1, 0, 2, 3)), "in order"),
    (lambda: split(order=(0, 0, 2, 3)), "in order"),
    (lambda: split(slice(0)), "in order"),
    (lambda: split(tp_size=4, pp_size=1), "in order"),
    (lambda: split(tp_size=1, pp_size=4), "in order"),
    (lambda: split(tp_size=1 << 40), "in order"),
    (lambda: split(tp_size=0), "at least 1"),
    (lambda: split(pp_size=-1), "at least 1"),
    (lambda: with_third_rank(block_size=32), "same groups"),
    (lambda: with_third_rank(parts=(part(),)), "same groups"),
    (lambda: with_third_rank(layers=(2,)), "same layers"),
    (lambda: engine(stages=((0, 1), (1, 2, 3))), "one pipeline stage"),
    (lambda: TpKVTopology(engine(), Rank(0, 1)), "no such rank"),
    *(
        (lambda fields=fields: Stripe(*fields), "inside its period")
        for fields in ((-1, 1, 1), (0, 0, 1), (1, 1, 1), (0, 2, 1))
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_impossible_geometries_are_refused(number):
    call, complaint = REFUSED[number]
    with pytest.raises(GeometryError, match=complaint):
        call()


def test_parts_of_one_shape_are_a_family():
    group = GroupGeometry(
        block_size=16, layers=(0, 5), parts=(part(), part(name="state", head_dim=3), part(name="v"))
    )
    assert [family.part_indices for family in group.families] == [(0, 2), (1,)]
    assert [family.head_token_bytes for family in group.families] == [16, 6]


def test_engines_of_other_models_are_incompatible():
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
        with pytest.raises(IncompatiblePeerError, match=f"differ in {name}") as refused:
            topology(ours).check_compatible(theirs)
        named = refused.value.context[name]
        assert named["ours"] != named["theirs"]


YARN = "yarn(rope_theta=1000000, factor=4, original_max_position_embeddings=32768)"
PLAIN = "default(rope_theta=1000000)"
COMMITS = ("0" * 40, "f" * 40)


@pytest.mark.parametrize(
    "field,values,name",
    [
        ("position_encodings", ((("", YARN),), (("", PLAIN),)), "position_encoding"),
        (
            "position_encodings",
            ((("a", PLAIN), ("b", YARN)), (("a", PLAIN), ("b", PLAIN))),
            "position_encoding of b",
        ),
        ("revision", tuple(f"org/m@{each}" for each in COMMITS), "revision of org/m"),
        ("revision", ("org/m@main", "org/m@v1"), "requested revision of org/m"),
        (
            "config",
            ((("rms_norm_eps", "1e-05"),), (("a", "1"), ("rms_norm_eps", "1e-06"))),
            "config.rms_norm_eps",
        ),
    ],
)
def test_values_of_a_model_that_both_state_are_compared(field, values, name):
    ours, theirs = (
        relisted(
            engine(),
            engine().ranks,
            engine_id=side,
            model=replace(engine().model, **{field: value}),
        )
        for side, value in zip(("ours", "theirs"), values, strict=True)
    )
    with pytest.raises(IncompatiblePeerError, match=rf"differ in {name}; .*--") as refused:
        topology(ours).check_compatible(theirs)
    shown = refused.value.context[name]
    assert shown["ours"] != shown["theirs"]
    if field == "revision":
        assert f"{values[0]}".endswith(shown["ours"])
    unstated = relisted(engine(), engine().ranks, engine_id="earlier")
    for same in (ours, unstated):
        other = relisted(same, same.ranks, engine_id="other")
        topology(ours).check_compatible(other)
        topology(other).check_compatible(ours)


def test_layers_that_one_engine_does_not_tell_apart_are_not_compared():
    model = engine().model
    kinds = (("full_attention", YARN), ("sliding_attention", PLAIN))
    ours, theirs = (
        relisted(
            engine(), engine().ranks, engine_id=name, model=replace(model, position_encodings=each)
        )
        for name, each in (("ours", kinds), ("theirs", (("", PLAIN),)))
    )
    topology(ours).check_compatible(theirs)
    topology(theirs).check_compatible(ours)


@pytest.mark.parametrize(
    "revisions",
    [
        (f"org/m@{COMMITS[0]}", "org/m@main"),  # they may be the same
        (f"org/m@{COMMITS[0]}", f"org/m-FP8@{COMMITS[1]}"),  # as of two quantisations
        (f"org/m@{COMMITS[0]}", ""),  # a local path
    ],
)
def test_revisions_that_say_nothing_of_each_other_are_not_compared(revisions):
    model = engine().model
    ours, theirs = (
        relisted(engine(), engine().ranks, engine_id=each, model=replace(model, revision=each))
        for each in revisions
    )
    topology(ours).check_compatible(theirs)
    topology(theirs).check_compatible(ours)


def with_parts(engine, *parts):
    """Make an engine whose only group has parts of these names and widths, in bytes."""
    made = [
        PartGeometry(
            name=name, total_heads=1, head_start=0, head_stop=1, head_dim=nbytes, item_size_bytes=1
        )
        for name, nbytes in parts
    ]
    ranks = [
        msgspec.structs.replace(
            rank, groups=(msgspec.structs.replace(rank.groups[0], parts=tuple(made)),)
        )
        for rank in engine.ranks
    ]
    return relisted(engine, ranks)


def test_an_engine_that_takes_planes_for_rows_is_told_why_it_is_refused():
    """An earlier release, in either role, would bring keys of an indexer with other keys' scales."""
    whole = mla(tp_size=2)
    repaired = with_parts(whole, ("index", 128), ("index-scales", 4))
    earlier = with_parts(relisted(whole, whole.ranks, engine_id="earlier"), ("latent", 132))
    for ours, theirs in ((repaired, earlier), (earlier, repaired)):
        with pytest.raises(IncompatiblePeerError, match="wrong scales: update it") as refused:
            topology(ours).check_compatible(theirs)
        assert refused.value.context["parts"]["earlier"] == ("latent",)
    other = with_parts(relisted(whole, whole.ranks, engine_id="other"), ("k", 66), ("v", 66))
    with pytest.raises(IncompatiblePeerError) as refused:
        topology(other).check_compatible(earlier)
    assert "scales" not in str(refused.value)


def test_an_engine_of_our_name_is_refused_like_any_other():
    """Two engines may be started with the same `engine_id`."""
    ours, theirs = (
        engine(),
        relisted(mla(tp_size=2), mla(tp_size=2).ranks, engine_id=engine().engine_id),
    )
    with pytest.raises(IncompatiblePeerError) as refused:
        topology(ours).check_compatible(theirs)
    assert len(refused.value.context["parts"]) == 2


def scaled(scale_of, **cut):
    """Make an engine whose ranks state the scales `scale_of(layer, part, heads)` of quantised numbers."""

    def rank_of(rank):
        (group,) = rank.groups
        scales = tuple(
            tuple(
                scale_of(layer, part.name, range(part.head_start, part.head_stop))
                for part in group.parts
            )
            for layer in group.layers
        )
        return msgspec.structs.replace(
            rank, groups=(msgspec.structs.replace(group, scales=scales),)
        )

    whole = engine(**cut)
    return relisted(whole, map(rank_of, whole.ranks))


def per_layer(layer, part, heads):
    return (layer + ord(part),)


def per_head(layer, part, heads):
    return tuple(layer + 0.5 * head for head in heads)


HALVES = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "theirs, is_compatible",
    [
        (scaled(per_layer, name="theirs", tp_size=8, stages=HALVES), True),
        (scaled(lambda *place: per_layer(*place) * len(place[2]), name="theirs", tp_size=2), True),
        (engine(name="theirs"), True),  # it states none
        (scaled(lambda *place: (1.0,), name="theirs", stages=HALVES), False),
        (scaled(lambda layer, *place: per_layer(layer ^ 1, *place), name="theirs"), False),
        (scaled(per_head, name="theirs"), False),
    ],
)
def test_quantised_caches_need_the_same_scales(theirs, is_compatible):
    for ours in (scaled(per_layer, name="ours"), scaled(per_layer, name="ours", tp_size=4)):
        if is_compatible:
            topology(ours).check_compatible(theirs)
            continue
        with pytest.raises(IncompatiblePeerError, match="differ in scales") as refused:
            topology(ours).check_compatible(theirs)
        assert set(refused.value.context["scales"]) == {"ours", "theirs"}


def test_scales_of_heads_are_compared_head_by_head():
    ours = scaled(per_head, name="ours", tp_size=2)
    for cut in ({}, {"tp_size": 4}, {"tp_size": 8, "stages": HALVES}):
        topology(ours).check_compatible(scaled(per_head, name="theirs", **cut))
    other = scaled(lambda *place: per_head(*place)[::-1], name="theirs", tp_size=2)
    with pytest.raises(IncompatiblePeerError, match="differ in scales"):
        topology(ours).check_compatible(other)


@pytest.mark.parametrize(
    "total, dcp_size, held",
    [
        (8, 1, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (6, 1, [range(1), range(1, 3), range(3, 4), range(4, 6)]),
        (2, 1, [range(1), range(1), range(1, 2), range(1, 2)]),
        # pairs of ranks share the tokens of their heads
        (4, 2, [range(2), range(2), range(2, 4), range(2, 4)]),
        (1, 4, [range(1)] * 4),
    ],
)
def test_each_of_four_ranks_holds_a_run_of_heads(total, dcp_size, held):
    assert [heads(total, rank, 4, dcp_size) for rank in range(4)] == held


def test_many_engines_spread_over_the_replicas():
    engines = [relisted(mla(1), mla(1).ranks, engine_id=f"decode-{n}") for n in range(32)]
    read = {
        target.rank
        for one in engines
        for target in TpKVTopology(one, Rank(0, 0)).get_target_remote_ranks(mla(4))
    }
    assert len(read) == 4


def read_by(consumer, producer):
    """Return the number of the one rank that each consumer rank reads."""
    return [
        target.rank.global_rank(producer.tp_size)
        for rank in consumer.ranks
        for target in TpKVTopology(consumer, rank.rank).get_target_remote_ranks(producer)
    ]


@pytest.mark.parametrize("name", ["decode-0", "decode-1", "x"])
def test_equal_sizes_read_their_own_number_and_others_spread(name):
    def decode(tp_size, **changes):
        return relisted(mla(tp_size), mla(tp_size).ranks, engine_id=name, **changes)

    assert read_by(decode(8), mla(8)) == [*range(8)]
    assert read_by(decode(16), mla(8)) == [*range(8)] * 2
    assert read_by(decode(8), mla(3)) == [0, 1, 2, 0, 1, 2, 0, 1]
    # a run of neighbours from a multiple of their number on
    assert read_by(decode(2), mla(8)) in [[0, 1], [2, 3], [4, 5], [6, 7]]
    first, second = read_by(decode(2), mla(5))
    assert second == (first + 1) % 5
    shared = engine(tp_size=4, heads=1, parts=("latent",), dcp=(4, 2))
    assert read_by(shared, mla(4)) == [*range(4)]
    assert read_by(mla(4), shared) == [*range(4)] * 4
    # an engine of an earlier release has another rule
    assert read_by(decode(8, replica_rule=0), mla(8)) == read_by(
        decode(8), msgspec.structs.replace(mla(8), replica_rule=0)
    )


def test_missing_heads_layers_and_parts_are_named():
    whole = engine()
    half = relisted(
        whole, [RankGeometry(pp_rank=0, tp_rank=0, groups=engine(tp_size=2).ranks[0].groups)]
    )
    with pytest.raises(IncompatiblePeerError, match="heads"):
        topology(whole).get_target_remote_ranks(half)
    short = cut_engine(
        FakeModel(4, (FakeGroup((0, 3), (FakePart("k", 4, 8, 2), FakePart("v", 4, 8, 2))),)),
        engine_id="short",
        stages=(LAYERS,),
        block_sizes=[16],
        tp_size=1,
    )
    with pytest.raises(IncompatiblePeerError, match="layers") as refused:
        topology(whole).get_target_remote_ranks(short)
    assert refused.value.context == {"layers": [1, 2], "group": 0, "peer": "short"}
    with pytest.raises(IncompatiblePeerError, match="same parts"):
        topology(whole).get_target_remote_ranks(mla(1))


def test_context_parallel_groups_are_complete_and_uniform():
    base, other = sharing(2, 4), sharing(2, 8)
    second = msgspec.structs.replace(
        base.ranks[1], groups=(msgspec.structs.replace(base.ranks[1].groups[0], dcp_rank=0),)
    )
    with pytest.raises(GeometryError, match="every rank of a context parallel group") as refused:
        relisted(base, (base.ranks[0], second))
    assert refused.value.context["dcp_ranks"] == [0]
    with pytest.raises(GeometryError, match="same groups"):
        relisted(base, (base.ranks[0], other.ranks[1]))


def test_stripes_of_unequal_interleaves_intersect():
    ours, theirs = (sharing(2, turn).ranks[0].groups[0].context_parallel for turn in (4, 1))
    assert common_stripes(ours, theirs) == (Stripe(0, 1, 8), Stripe(2, 1, 8))


def test_interleaves_with_a_long_period_are_incompatible():
    topology(sharing(2, 4)).check_compatible(sharing(3, 16))
    ours = sharing(2, 4096, block_size=4096)
    with pytest.raises(IncompatiblePeerError, match="too long a common period") as refused:
        topology(ours).check_compatible(sharing(2, 4095, block_size=4095))
    assert refused.value.context["ours"] == (2, 4096)
