"""The check of a peer's read, compared with a check of every single token and layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import IncompatiblePeerError, KVConnectorError
from kvconnector.layout import Stripe, Watermark
from kvconnector.planning import GroupBlocks, plan_read
from kvconnector.planning import route as route_module
from kvconnector.session.lease import Lease
from kvconnector.session.orders import HoldRequest
from kvconnector.session.producer import LEASE_TABLE
from kvconnector.session.read_check import check_read, check_route
from kvconnector.topology import Segment
from kvconnector.wire import messages as m
from tests.support.examples import examples
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine
from tests.unit.session import harness

MAX_CHUNK_BYTES = 512
NUM_TOKENS = 27
COUNTS = st.just(NUM_TOKENS) | st.integers(5, NUM_TOKENS)
WATERMARKS = st.builds(Watermark, COUNTS, COUNTS, st.integers(0, 6))


PARTS = FakePart("k", 4, 8), FakePart("v", 4, 8), FakePart("scale", 4, 1)
SHAPE = FakeModel(6, (FakeGroup((1, 3, 5), PARTS), FakeGroup((2,), PARTS[:1])))
"""Every rank has the last three of four heads; two ranks share the tokens of the second group."""
ENGINE = cut_engine(
    SHAPE,
    engine_id="e",
    stages=[range(6)],
    block_sizes=(4, 2),
    tp_size=2,
    splits={(4, shares): [range(1, 4)] * shares for shares in (1, 2)},
    dcp=[(1, 1), (2, 1)],
)
RANK = ENGINE.ranks[1]


def cut_shape(shape, *, block_sizes=(4, 2), heads=range(1, 4), dcp=(), tp_size=1):
    """Return an engine of one stage whose shares all have these heads."""
    splits = {(4, shares): [heads] * shares for shares in (1, 2)}
    stages = [range(shape.num_layers)]
    return cut_engine(
        shape,
        engine_id="d",
        stages=stages,
        block_sizes=block_sizes,
        tp_size=tp_size,
        splits=splits,
        dcp=dcp,
    )


MINE = RANK.groups
LEASED = (GroupBlocks.of([7, 3, 9, 1], first_block=1), GroupBlocks.of([4, 5, 2, 0, 8]))
OTHER_BLOCKS = (
    (GroupBlocks.of([7, 3, 9, 1]), LEASED[1]),
    (GroupBlocks.of([3, 9, 1, 7], first_block=1), LEASED[1]),
    (GroupBlocks.of([7, 3, 9], first_block=1), LEASED[1]),
    LEASED[:1],
)


def segment(group, family, layers, heads, stripe=(0, 1, 1), *, num_parts=2, head_bytes=16):
    place = (group, family, layers, num_parts, heads.start, heads.stop, head_bytes)
    return Segment(*place, stripe=Stripe(*stripe))


SEGMENTS = (
    segment(0, 0, (3, 5), range(1, 3)),
    segment(0, 1, (1, 3, 5), range(3, 4), num_parts=1, head_bytes=2),
    segment(1, 0, (2,), range(1, 4), (1, 1, 2), num_parts=1),
)
WRONG_SEGMENTS = (
    segment(2, 0, (3, 5), range(1, 3)),
    segment(0, 2, (3, 5), range(1, 3)),
    segment(0, 0, (3, 5), range(1, 3), num_parts=3),
    segment(0, 0, (3, 5), range(1, 3), head_bytes=32),
    segment(0, 0, (3, 5), range(3)),
    segment(0, 0, (3, 5), range(1, 5)),
    segment(0, 0, (3, 5), range(2, 2)),
    segment(0, 0, (7,), range(1, 3)),
    segment(0, 0, (3, 5, 7), range(1, 3)),
    segment(0, 0, (1, 5), range(1, 3)),
    # all tokens; the other rank's; those of another interleave
    segment(1, 0, (2,), range(1, 4), num_parts=1),
    segment(1, 0, (2,), range(1, 4), (0, 1, 2), num_parts=1),
    segment(1, 0, (2,), range(1, 4), (1, 2, 4), num_parts=1),
)
"""Segments of groups, parts, heads, layers or tokens that this rank does not hold."""


def route_of(*segments):
    return check_route(harness.hello(ENGINE, RANK.rank.tp_rank, segments=segments), RANK)


def lease_of(watermark):
    granted = HoldRequest("r", "t", "5" * 32, LEASED, NUM_TOKENS)
    lease = Lease(LEASE_TABLE, granted, 0.0)
    lease.blocks, lease.watermark = LEASED, watermark
    return lease


@st.composite
def reads(draw, route):
    """Draw a read inside its lease, or with one wrong field. Returns it and that field's name, or None."""
    edges = draw(st.sampled_from([st.integers(4, 20), st.integers(0, NUM_TOKENS)]))
    ranges = [tuple(sorted((draw(edges), draw(edges)))) for _ in MINE]
    layers = tuple(sorted(draw(st.just((0, 7)) | st.tuples(st.integers(0, 7), st.integers(0, 7)))))
    chunk_bytes = draw(st.sampled_from([96, 200, MAX_CHUNK_BYTES] * 2 + [MAX_CHUNK_BYTES + 1, 0]))
    wrong = draw(st.sampled_from([None] * 6 + ["ranges", "reversed", "blocks", "chunks"]))
    if wrong == "ranges":
        ranges = draw(st.sampled_from([ranges[:1], [*ranges, (0, 1)], []]))
    elif wrong == "reversed":
        ranges = [(stop, start) for start, stop in ranges]
    whole = [range(*each) for each in ranges]
    try:
        planned = plan_read(route, whole, chunk_bytes=chunk_bytes, layers=range(*layers))
    except KVConnectorError:
        planned = None
    num_chunks = len(planned.chunks) if planned is not None else 1
    return m.Read(
        transfer_id="t",
        secret="5" * 32,
        read_id=1,
        incarnation="i",
        token_ranges=tuple(ranges),
        layers=layers,
        chunk_bytes=chunk_bytes,
        num_chunks=num_chunks + (wrong == "chunks"),
        blocks=draw(st.sampled_from(OTHER_BLOCKS)) if wrong == "blocks" else LEASED,
        window=1,
        first_tag=1 << 20,
    ), wrong


def cells(read, segments):
    """Return the group, layer and token of each cell that a read asks for."""
    return {
        (segment.group, layer, token)
        for segment in segments
        for token in range(*read.token_ranges[segment.group])
        if (token - segment.stripe.first) % segment.stripe.period < segment.stripe.run
        for layer in segment.layers
        if layer in range(*read.layers)
    }


def is_there(asked, watermark):
    """Returns True if the lease's blocks hold these cells, in all layers or in the newest step's first ones."""
    tokens = [token for _, _, token in asked]
    layers = [layer for _, layer, _ in asked]
    is_whole = max(tokens) < watermark.num_tokens
    is_ahead = max(tokens) < watermark.ahead_tokens and max(layers) < watermark.ahead_layers
    return (is_whole or is_ahead) and all(
        token in LEASED[group].token_range(MINE[group].virtual_block_tokens)
        for group, _, token in asked
    )


@examples(400)
@given(data=st.data())
def test_a_read_is_accepted_if_its_lease_holds_all_of_it(data):
    segments = data.draw(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3))
    route, watermark = route_of(*segments), data.draw(WATERMARKS)
    read, wrong = data.draw(reads(route))
    is_right = wrong is None and read.chunk_bytes <= MAX_CHUNK_BYTES
    if is_right:
        asked = cells(read, segments)
        fits = all(
            each.part_token_bytes <= read.chunk_bytes for each in segments if cells(read, [each])
        )
        is_right = bool(asked) and fits and is_there(asked, watermark)
    try:
        source = check_read(read, route, MINE, lease_of(watermark), MAX_CHUNK_BYTES)
    except KVConnectorError:
        assert not is_right
    else:
        assert is_right
        assert source.chunk_nbytes.max() <= MAX_CHUNK_BYTES


@pytest.mark.parametrize("wrong", WRONG_SEGMENTS)
def test_segments_that_a_rank_does_not_hold_are_refused(wrong):
    route_of(*SEGMENTS)
    with pytest.raises(IncompatiblePeerError, match=r"no such|does not hold these|parts of"):
        route_of(SEGMENTS[0], wrong)


CONSUMERS = {
    "group": cut_shape(FakeModel(6, (FakeGroup((0, 1, 3, 5), PARTS),)), block_sizes=(4,)),
    "layers": cut_shape(FakeModel(6, (FakeGroup((1, 3), PARTS), FakeGroup((2,), PARTS[:1])))),
    "heads": cut_shape(SHAPE, heads=range(2)),
    "tokens": cut_shape(SHAPE, dcp=[(1, 1), (2, 1)], tp_size=2),
}
"""Engines whose first rank lacks the layers, heads or tokens of some of `SEGMENTS`, or their whole group."""


@pytest.mark.parametrize("lacking", CONSUMERS)
def test_segments_that_the_consumer_does_not_hold_itself_are_refused(lacking):
    """Whoever names them may have no such cache group at all: nothing about it can be looked up."""
    with pytest.raises(IncompatiblePeerError, match=r"the consumer's rank (has|does)"):
        check_route(harness.hello(CONSUMERS[lacking], segments=SEGMENTS), RANK)


def test_routes_of_too_many_segments_are_refused(monkeypatch):
    monkeypatch.setattr(route_module, "MAX_SEGMENTS", 3)
    route_of(*SEGMENTS)
    with pytest.raises(IncompatiblePeerError, match="too many segments"):
        route_of(*SEGMENTS, SEGMENTS[0])


def test_reads_of_too_many_chunks_are_refused():
    route = route_of(segment(0, 0, (1, 3, 5), range(1, 4)))
    with pytest.raises(KVConnectorError, match="chunk_bytes is too small"):
        plan_read(route, [range((1 << 31) - 1), range(1)], chunk_bytes=64)
