"""Hypothesis strategies for engines and for the transfers between them.

Two engines of one drawn `FakeModel` can exchange blocks, however differently they are cut. Sizes are small, because the
relations between sizes matter (divides, does not divide, equal, one is one), and large numbers do not.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import strategies as st

from kvconnector.topology import EngineGeometry, RankGeometry, TpKVTopology
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine

MAX_TP = 8
MAX_PP = 4
MAX_LAYERS = 7
MAX_HEADS = 9
MAX_BLOCK_TOKENS = 24
MAX_INTERLEAVE = 6
MAX_TOKENS = 60
ROW_TOKENS = st.sampled_from([1, 1, 4, 128])


@dataclass(frozen=True, slots=True)
class Transfer:
    """One consumer rank's load: tokens `token_ranges[group]` of everything it holds, in chunks of `chunk_bytes`."""

    topology: TpKVTopology
    consumer: RankGeometry
    producer: EngineGeometry
    token_ranges: tuple[range, ...]
    chunk_bytes: int


@st.composite
def part_shapes(draw):
    """Draw a group's parts: K and V alike, K and V of different head sizes, an MLA latent, or a recurrent state."""
    kind = draw(st.sampled_from(["kv", "unequal kv", "latent", "state"]))
    heads = draw(st.integers(1, MAX_HEADS))
    dim = draw(st.integers(1, 4))
    item_size = draw(st.sampled_from([1, 2, 4]))
    if kind == "latent":
        return (FakePart("latent", 1, dim, item_size),)
    if kind == "state":
        channels = draw(st.integers(1, MAX_HEADS))
        return (FakePart("conv", channels, 1, 2), FakePart("ssm", heads, dim, 4))
    dim_of_v = dim if kind == "kv" else dim + 1
    return (FakePart("k", heads, dim, item_size), FakePart("v", heads, dim_of_v, item_size))


@st.composite
def model_shapes(draw):
    """Draw models of one to three cache groups. A layer is in at least one group; every group has a layer."""
    num_layers = draw(st.integers(1, MAX_LAYERS))
    num_groups = draw(st.integers(1, 3))
    some_layers = st.sets(st.integers(0, num_layers - 1), min_size=1)
    members = [draw(some_layers) for _ in range(num_groups)]
    members[0] |= set(range(num_layers)) - set().union(*members)
    return FakeModel(
        num_layers=num_layers,
        groups=tuple(
            FakeGroup(tuple(sorted(layers)), draw(part_shapes()), draw(ROW_TOKENS))
            for layers in members
        ),
    )


@st.composite
def pipeline_stages(draw, num_layers):
    """Draw the layers of each stage: contiguous and uneven, or dealt out in any way. No stage is without a layer."""
    pp_size = draw(st.integers(1, min(MAX_PP, num_layers)))
    inner = st.lists(
        st.integers(1, max(num_layers - 1, 1)),
        min_size=pp_size - 1,
        max_size=pp_size - 1,
        unique=True,
    )
    cuts = [0, *sorted(draw(inner)), num_layers]
    order = list(range(num_layers))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    return [sorted(order[a:b]) for a, b in pairwise(cuts)]


@st.composite
def head_splits(draw, total_heads, tp_size):
    """Draw the heads of each rank: those of `heads_of`, or any intervals that cover all heads, overlapping or not."""
    if draw(st.booleans()):
        return [
            TpKVTopology.heads_of(total_heads, tp_rank=tp_rank, tp_size=tp_size)
            for tp_rank in range(tp_size)
        ]
    size = tp_size - 1
    inner = draw(st.lists(st.integers(0, total_heads), min_size=size, max_size=size))
    cuts = [0, *sorted(inner), total_heads]
    split = []
    for start, stop in pairwise(cuts):
        more = draw(st.integers(0, 2))
        first = max(min(start, total_heads - 1) - more, 0)
        split.append(range(first, min(max(stop, first + 1) + more, total_heads)))
    return split


@st.composite
def token_shares(draw, tp_size, block_size):
    """Draw a context parallel group's size and its interleave in tokens; every other time, no such group."""
    if draw(st.booleans()):
        return (1, 1)
    return (
        draw(st.sampled_from([n for n in range(1, tp_size + 1) if tp_size % n == 0])),
        draw(st.sampled_from([i for i in range(1, MAX_INTERLEAVE + 1) if block_size % i == 0])),
    )


@st.composite
def engines(draw, shape, num_optional=0, *, engine_id="engine", even_heads=False):
    """Engines of `shape`: TP 1 to 8, PP 1 to 4, a block size and a way to share the tokens for every group.

    `even_heads` splits heads as `TpKVTopology.heads_of` does; without it, other covers are drawn too.
    """
    tp_size = draw(st.integers(1, MAX_TP))
    block_sizes = [draw(st.integers(1, MAX_BLOCK_TOKENS)) for _ in shape.groups]
    dcp = [draw(token_shares(tp_size, block_size)) for block_size in block_sizes]
    splits = None
    if not even_heads:
        counts = {part.total_heads for group in shape.groups for part in group.parts}
        splits = {
            (count, tp_size // dcp_size): draw(head_splits(count, tp_size // dcp_size))
            for count in sorted(counts)
            for dcp_size in sorted({size for size, _ in dcp})
        }
    return cut_engine(
        shape,
        engine_id=engine_id,
        stages=draw(pipeline_stages(shape.num_layers)),
        block_sizes=block_sizes,
        tp_size=tp_size,
        splits=splits,
        dcp=dcp,
        num_optional=num_optional,
    )


@st.composite
def engine_pairs(draw, *, even_heads=False):
    """Draw a consumer engine and a producer engine of one model, cut independently. One of them may lack the other's
    last groups.
    """
    shapes = draw(shape_pairs())
    return tuple(
        draw(engines(*shape, engine_id=name, even_heads=even_heads))
        for name, shape in zip(("consumer", "producer"), shapes, strict=True)
    )


@st.composite
def shape_pairs(draw):
    """Draw a model for each of two engines, with its number of optional groups. They differ in these, and in optional
    layers.
    """
    whole = draw(model_shapes())
    missing = draw(st.integers(0, len(whole.groups) - 1))
    num_common = len(whole.groups) - missing
    pair = [
        (whole, draw(st.integers(missing, len(whole.groups)))),
        (replace(whole, groups=whole.groups[:num_common]), draw(st.integers(0, num_common))),
    ]
    if draw(st.booleans()):
        first, second = (shape for shape, _ in pair)
        lacking = draw(st.lists(st.integers(0, MAX_LAYERS), max_size=3))
        has, lacks = (replace(each, groups=()) for each in (first, second))
        for index, group in enumerate(first.groups):
            lone = tuple(n for n in group.layers[1:] if n in lacking)
            has = replace(has, groups=(*has.groups, replace(group, optional_layers=lone)))
            if index < num_common:
                left = tuple(n for n in group.layers if n not in lone)
                lacks = replace(lacks, groups=(*lacks.groups, replace(group, layers=left)))
        pair = [(has, pair[0][1]), (lacks, pair[1][1])]
    return pair[:: draw(st.sampled_from([1, -1]))]


@st.composite
def token_ranges(draw):
    """Draw the missing tokens of one group: none, or a range that starts and ends anywhere in blocks."""
    start = draw(st.integers(0, MAX_TOKENS))
    return range(start, start + draw(st.integers(0, MAX_TOKENS)))


@st.composite
def transfers(draw):
    """Draw loads that can be planned: `chunk_bytes` holds at least one token of the consumer's widest part."""
    consumer_engine, producer = draw(engine_pairs())
    consumer = draw(st.sampled_from(consumer_engine.ranks))
    widest = max(part.token_bytes for group in consumer.groups for part in group.parts)
    return Transfer(
        topology=TpKVTopology(consumer_engine, consumer.rank),
        consumer=consumer,
        producer=producer,
        token_ranges=tuple(draw(token_ranges()) for _ in consumer.groups),
        chunk_bytes=draw(st.integers(widest, widest * draw(st.sampled_from([2, 30, 2000])))),
    )
