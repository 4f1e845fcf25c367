"""`Route`: what all reads of one consumer rank from one producer rank have in common.

Each side makes its end of the route once, in the greeting. The consumer rank makes it from the two engines' geometries,
and lists the segments in its `Hello`. The producer rank checks these against its own geometry. A read then needs only
token ranges and layers, which both sides cut into the same chunks along their route (`plan.py`).
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
from kvconnector.topology.conversion import SegmentConversion, segment_conversion
from kvconnector.topology.segments import MAX_SEGMENTS


@dataclass(frozen=True, slots=True)
class SegmentWindow:
    """A segment in the terms of one rank: rows from `first_row` on of the part table of (group, family), heads from
    `head_start` on of those on this rank, and `stripe` counted in this rank's tokens. `order` is the element order in a
    chunk, and `part_token_bytes` the size of one token of one row.
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
    """One side's end of all reads between two ranks. `peer` is the rank at the other end, `num_groups` the number of
    cache groups that both have: reads name tokens of these. Either side's last groups may be missing on the other.

    Chunks of `segments[i]` are best cut at multiples of the first of `align_tokens[i]` that fits, in members of its
    stripe: a common multiple of both sides' block sizes, then the larger one, then the smaller. `here[i]` is
    `segments[i]` in the terms of this rank; on the consumer's side `there[i]` is the same for the producer rank.
    `row_tokens[group]` is that of the common groups. `conversions[i]` is None if the elements of `segments[i]` are
    copied as they are; there are no `conversions` if all are.
    """

    peer: Rank
    num_groups: int
    segments: tuple[Segment, ...]
    align_tokens: tuple[tuple[int, ...], ...]
    here: tuple[SegmentWindow, ...]
    there: tuple[SegmentWindow, ...] = ()
    row_tokens: tuple[int, ...] = (1,)
    conversions: tuple[SegmentConversion | None, ...] = ()


def plan_routes(
    consumer: TpKVTopology,
    producer: EngineGeometry,
    element_orders: Mapping[tuple[int, int], str] | None = None,
) -> tuple[Route, ...]:
    """Return the routes on which a consumer rank reads from a producer engine, in the order of that engine's ranks.

    Args:
        consumer: The rank that reads.
        producer: The engine to read from.
        element_orders: By (group, family), the element order of chunks that the consumer rank unpacks fastest; "HND" if
            absent.

    Raises:
        IncompatiblePeerError: the producer lacks something that the consumer rank holds, or a route would have more
            than `MAX_SEGMENTS` segments.
    """
    ours = consumer.geometry.groups
    routes = []
    for target in consumer.get_target_remote_ranks(producer):
        theirs = producer.rank_geometry(target.rank).groups
        segments = tuple(
            replace(
                segment, order=(element_orders or {}).get((segment.group, segment.family), "HND")
            )
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
    """Return one side's end of a route.

    Args:
        peer: The rank at the other end.
        segments: The route's segments, all of which this rank holds.
        ours: This rank's cache groups.
        theirs: The other rank's cache groups, of which either side's last ones may be missing on the other.
        there: The segments in the terms of the other rank, on the side that may read its pools: the consumer's.

    Raises:
        IncompatiblePeerError: there are more than `MAX_SEGMENTS` segments.
    """
    if len(segments) > MAX_SEGMENTS:
        raise IncompatiblePeerError(
            "the caches of two ranks have too many segments in common",
            segments=len(segments),
            max_segments=MAX_SEGMENTS,
        )
    align_tokens = tuple(_alignments(ours[s.group], theirs[s.group], s.stripe) for s in segments)
    producer, consumer = (theirs, ours) if there else (ours, theirs)
    conversions = tuple(
        segment_conversion(s, producer[s.group], consumer[s.group]) for s in segments
    )
    row_tokens = tuple(each.row_tokens for each, _ in zip(ours, theirs, strict=False))
    return Route(
        peer=peer,
        num_groups=len(row_tokens),
        segments=segments,
        align_tokens=align_tokens,
        here=_windows(segments, ours),
        there=there,
        row_tokens=row_tokens,
        conversions=conversions if any(conversions) else (),
    )


def _alignments(ours: GroupGeometry, theirs: GroupGeometry, stripe: Stripe) -> tuple[int, ...]:
    """Return `Route.align_tokens` of a segment: members of the stripe in whole (virtual) blocks and whole periods."""
    blocks = (ours.virtual_block_tokens, theirs.virtual_block_tokens)
    tokens = (lcm(size, stripe.period) for size in (lcm(*blocks), *blocks))
    return tuple(sorted({stripe.count_below(count) for count in tokens}, reverse=True))


def _windows(
    segments: Sequence[Segment], groups: Sequence[GroupGeometry]
) -> tuple[SegmentWindow, ...]:
    """Return segments in the terms of a rank that holds them."""
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
