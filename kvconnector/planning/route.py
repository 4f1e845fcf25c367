"""`Route`: all that the reads of one consumer rank from one producer rank have in common.

It is made once on each side, at the greeting. The consumer rank makes its routes from the two engines' geometries, and
its `Hello` names the segments. The producer rank checks these against its own geometry and makes its end of the route.
A read then names token ranges and layers only: both sides cut them along their route into the same chunks (`plan.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from msgspec.structs import replace

from kvconnector.errors import IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.layout import ALL_TOKENS, Stripe, local_stripe
from kvconnector.topology import EngineGeometry, GroupGeometry, Segment, TpKVTopology
from kvconnector.topology.segments import MAX_SEGMENTS


@dataclass(frozen=True, slots=True)
class SegmentWindow:
    """A segment in one rank's tables: rows of the part table `[group, family]` from `first_row` on, local heads from
    `head_start` on, and `stripe` among the tokens that this rank stores. `order` is the element order in a chunk,
    `part_token_bytes` are the bytes of one token of one row.
    """

    group: int
    family: int
    first_row: int
    head_start: int
    num_heads: int
    part_token_bytes: int
    order: str
    stripe: Stripe = ALL_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One side's end of all reads between two ranks. `peer` is the rank at the other end.

    `align_tokens[i]` are the member counts at whose multiples chunks of `segments[i]` are best cut, best first: common
    multiples of both sides' block sizes, then those of the larger one, then of the smaller. `here[i]` is `segments[i]`
    in this rank's tables, and on the consumer's side `there[i]` the same in the producer rank's tables.
    """

    peer: Rank
    num_groups: int
    segments: tuple[Segment, ...]
    align_tokens: tuple[tuple[int, ...], ...]
    here: tuple[SegmentWindow, ...]
    there: tuple[SegmentWindow, ...] = ()


def plan_routes(
    consumer: TpKVTopology,
    producer: EngineGeometry,
    orders: Mapping[tuple[int, int], str] | None = None,
) -> tuple[Route, ...]:
    """The routes on which a consumer rank reads from a producer engine, in the order of that engine's ranks.

    Args:
        consumer: the rank that reads.
        producer: the engine that is read from.
        orders: for `[group, family]` the element order of a chunk that the consumer rank unpacks fastest.

    Raises:
        IncompatiblePeerError: the producer does not hold all that the consumer rank does, or a route would have
            more than `MAX_SEGMENTS` segments.
    """
    ours = consumer.geometry.groups
    routes = []
    for target in consumer.get_target_remote_ranks(producer):
        theirs = producer.rank_geometry(target.rank).groups
        segments = tuple(
            replace(segment, order=(orders or {}).get((segment.group, segment.family), "HND"))
            for segment in target.segments
        )
        there = _windows(segments, theirs)
        routes.append(make_route(target.rank, segments, ours, theirs, there=there))
    return tuple(routes)


def make_route(
    peer: Rank,
    segments: tuple[Segment, ...],
    ours: Sequence[GroupGeometry],
    theirs: Sequence[GroupGeometry],
    *,
    there: tuple[SegmentWindow, ...] = (),
) -> Route:
    """One side's end of a route.

    Args:
        peer: the rank at the other end.
        segments: of which this rank holds all.
        ours: the cache groups of this rank.
        theirs: the cache groups of the other rank, as many as ours.
        there: the segments in the other rank's tables, where these can be read.

    Raises:
        IncompatiblePeerError: there are more than `MAX_SEGMENTS`.
    """
    if len(segments) > MAX_SEGMENTS:
        raise IncompatiblePeerError(
            "two ranks have their caches in common in too many segments",
            segments=len(segments),
            max_segments=MAX_SEGMENTS,
        )
    align_tokens = tuple(_alignments(ours[s.group], theirs[s.group], s.stripe) for s in segments)
    return Route(peer, len(ours), segments, align_tokens, _windows(segments, ours), there)


def _alignments(ours: GroupGeometry, theirs: GroupGeometry, stripe: Stripe) -> tuple[int, ...]:
    """Members of the stripe in whole (virtual) blocks and whole periods."""
    blocks = (ours.virtual_block_tokens, theirs.virtual_block_tokens)
    tokens = (lcm(size, stripe.period) for size in (lcm(*blocks), *blocks))
    return tuple(sorted({stripe.count_below(count) for count in tokens}, reverse=True))


def _windows(
    segments: Sequence[Segment], groups: Sequence[GroupGeometry]
) -> tuple[SegmentWindow, ...]:
    """Segments that a rank holds, in its tables."""
    return tuple(
        SegmentWindow(
            group=segment.group,
            family=segment.family,
            first_row=group.layers.index(segment.layers[0]) * segment.num_parts,
            head_start=segment.head_start - group.families[segment.family].head_start,
            num_heads=segment.head_stop - segment.head_start,
            part_token_bytes=segment.part_token_bytes,
            order=segment.order,
            stripe=local_stripe(segment.stripe, group.context_parallel),
        )
        for segment in segments
        for group in (groups[segment.group],)
    )
