"""The check of a peer's read against one that looks at every chunk by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import RemoteProtocolError
from kvconnector.layout import Watermark
from kvconnector.planning import CHUNK_DTYPE, GroupBlocks
from kvconnector.session.read_check import ReadCheck
from kvconnector.topology import GroupGeometry, PartGeometry, RankGeometry
from kvconnector.wire import messages as m
from tests.support.examples import examples

MAX_CHUNK_BYTES = 512
NUM_TOKENS = 21
WATERMARKS = st.builds(
    Watermark, st.integers(5, NUM_TOKENS), st.integers(5, NUM_TOKENS), st.integers(0, 6)
)
EXTREMES = (-(1 << 31), -1, (1 << 31) - 1)


def part(name, head_dim):
    return PartGeometry(
        name=name, total_heads=4, head_start=1, head_stop=4, head_dim=head_dim, item_size_bytes=2
    )


MINE = RankGeometry(
    pp_rank=0,
    tp_rank=0,
    groups=(
        GroupGeometry(
            block_size=4, layers=(1, 3, 5), parts=(part("k", 8), part("v", 8), part("scale", 1))
        ),
        GroupGeometry(
            block_size=2,
            layers=(2,),
            parts=(part("k", 8),),
            dcp_size=2,
            dcp_rank=1,
            interleave_tokens=1,
        ),
    ),
)
LEASED = (GroupBlocks.of([7, 3, 9, 1], first_block=1), GroupBlocks.of([4, 5, 2, 0, 8]))
OTHER_BLOCKS = (
    (GroupBlocks.of([7, 3, 9, 1]), LEASED[1]),
    (GroupBlocks.of([3, 9, 1, 7], first_block=1), LEASED[1]),
    (GroupBlocks.of([7, 3, 9], first_block=1), LEASED[1]),
    LEASED[:1],
)


def segment(group, family, layers, heads, stripe=(0, 1, 1)):
    first, run, period = stripe
    return m.ReadSegment(
        group=group,
        family=family,
        first_layer=layers.start,
        num_layers=len(layers),
        head_start=heads.start,
        head_stop=heads.stop,
        order="NHD",
        token_first=first,
        token_run=run,
        token_period=period,
    )


SEGMENTS = (
    segment(0, 0, range(3, 5), range(1, 3)),
    segment(0, 1, range(1, 4), range(3, 4)),
    segment(1, 0, range(2, 3), range(1, 4), (1, 1, 2)),
)
WRONG_SEGMENTS = (
    segment(2, 0, range(3, 5), range(1, 3)),
    segment(0, 2, range(3, 5), range(1, 3)),
    segment(0, 0, range(3, 5), range(3)),
    segment(0, 0, range(3, 5), range(1, 5)),
    segment(0, 0, range(7, 9), range(1, 3)),
    segment(0, 0, range(3, 6), range(1, 3)),
    segment(0, 0, range(3, 3), range(1, 3)),
    # all tokens, as one asks who knows of no sharing; the other rank's; of other turns
    segment(1, 0, range(2, 3), range(1, 4)),
    segment(1, 0, range(2, 3), range(1, 4), (0, 1, 2)),
    segment(1, 0, range(2, 3), range(1, 4), (1, 2, 4)),
)
"""Of groups, heads, layers or tokens that this rank does not hold."""


def read_of(segments, chunks, blocks):
    return m.Read(
        transfer_id="t",
        secret="5" * 32,
        read_id=1,
        incarnation="i",
        segments=segments,
        chunks=chunks,
        blocks=blocks,
        window=1,
        first_tag=1 << 20,
    )


@st.composite
def pieces(draw, whole):
    """Start and length of a part of a range, often one that begins or ends with it."""
    start = draw(st.just(whole.start) | st.integers(whole.start, whole[-1]))
    stop = draw(st.just(whole.stop) | st.integers(start + 1, whole.stop))
    return start, stop - start


@st.composite
def chunk_fields(draw, segments, watermark):
    """A chunk that is inside, if there is one, or has one field that is one off or any number."""
    number = draw(st.integers(0, len(segments) - 1))
    segment = segments[number]
    group, held = MINE.groups[segment.group], LEASED[segment.group]
    first = group.layers.index(segment.first_layer)
    layers = group.layers[first : first + segment.num_layers]
    stop = watermark.num_tokens
    if draw(st.booleans()):
        layers = [layer for layer in layers if layer < watermark.ahead_layers]
        stop = watermark.ahead_tokens
    num_rows = max(1, len(layers) * group.families[segment.family].num_parts)
    room = held.token_range(group.virtual_block_tokens)
    members = segment.stripe.members(range(room.start, stop)) or range(4, 6)
    row, num_parts = draw(pieces(range(num_rows)))
    token, num_tokens = draw(pieces(members))
    fields = [number, row, num_parts, token, num_tokens]
    wrong = draw(st.sampled_from([None, None, None, None, 0, 1, 2, 3, 4, 4]))
    if wrong is not None:
        is_far = draw(st.integers(0, 9)) == 0
        fields[wrong] = draw(
            st.sampled_from(EXTREMES if is_far else [fields[wrong] - 1, fields[wrong] + 1])
        )
    return tuple(fields)


def is_inside(chunk, segments, watermark):
    """Whether a chunk reads only what is there: row by row and token by token."""
    number, part_start, num_parts, token_start, num_tokens = chunk
    if not 0 <= number < len(segments) or min(num_parts, num_tokens) < 1:
        return False
    segment = segments[number]
    group, leased = MINE.groups[segment.group], LEASED[segment.group]
    family = group.families[segment.family]
    first = group.layers.index(segment.first_layer)
    layers = group.layers[first : first + segment.num_layers]
    held = leased.token_range(group.virtual_block_tokens)
    nbytes = (segment.head_stop - segment.head_start) * family.head_token_bytes
    if num_parts * num_tokens * nbytes > MAX_CHUNK_BYTES or min(part_start, token_start) < 0:
        return False
    rows = range(part_start, part_start + num_parts)
    if rows[-1] >= len(layers) * family.num_parts:
        return False
    tokens = [segment.stripe.token(token_start + index) for index in range(num_tokens)]
    last_layer = layers[rows[-1] // family.num_parts]
    return all(
        token in held
        and (
            token < watermark.num_tokens
            or (token < watermark.ahead_tokens and last_layer < watermark.ahead_layers)
        )
        for token in tokens
    )


@examples(200)
@given(data=st.data())
def test_a_read_is_accepted_if_each_of_its_chunks_is_inside(data):
    segments = tuple(data.draw(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3)))
    check = ReadCheck(MINE, max_chunk_bytes=MAX_CHUNK_BYTES)
    for _ in range(3):
        watermark = data.draw(WATERMARKS)
        fields = data.draw(st.lists(chunk_fields(segments, watermark), max_size=2))
        chunks = np.array(fields, CHUNK_DTYPE).tobytes()
        cut = data.draw(st.sampled_from([None] * 9 + [-1]))
        blocks = data.draw(st.sampled_from([LEASED] * 12 + [*OTHER_BLOCKS]))
        is_right = bool(fields) and cut is None and blocks == LEASED
        is_right = is_right and all(is_inside(chunk, segments, watermark) for chunk in fields)
        try:
            check.check(read_of(segments, chunks[:cut], blocks), LEASED, watermark)
        except RemoteProtocolError:
            assert not is_right
        else:
            assert is_right


@pytest.mark.parametrize("wrong", WRONG_SEGMENTS)
def test_a_segment_that_this_rank_does_not_hold_is_refused(wrong):
    chunk = np.array([(0, 0, 1, 4, 1)], CHUNK_DTYPE).tobytes()
    with pytest.raises(RemoteProtocolError, match=r"no such|does not hold these"):
        ReadCheck(MINE, max_chunk_bytes=MAX_CHUNK_BYTES).check(
            read_of((wrong,), chunk, LEASED), LEASED, NUM_TOKENS
        )
