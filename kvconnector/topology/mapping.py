"""Producer ranks to consumer ranks, by intersecting intervals.

A consumer rank needs a rectangle (layers x heads) per cache group. The producer's pipeline stages cut it along layers
and its tensor-parallel ranks along heads; no size has to divide another. Where several producer ranks hold the same
head (GQA with more ranks than heads, MLA), one of them is read. Where the ranks of a context parallel group share a
head's tokens, each of them is read that holds any token of the consumer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvconnector.cache.slot_mapping import ContextParallel
from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.topology.geometry import EngineGeometry, RankGeometry
from kvconnector.topology.stripes import ALL_TOKENS, Stripe, common_stripes


@dataclass(frozen=True, slots=True)
class Rectangle:
    """What a consumer rank reads from one producer rank, for one part family of one group.

    `layers` are global indices that lie next to each other in both ranks' holdings; heads are global. `stripe` are the
    tokens, all of which both ranks hold.
    """

    source: Rank
    group: int
    family: int
    layers: tuple[int, ...]
    head_start: int
    head_stop: int
    stripe: Stripe = ALL_TOKENS


def source_rectangles(
    consumer: RankGeometry, spread: int, producer: EngineGeometry
) -> tuple[Rectangle, ...]:
    """Rectangles that together cover everything `consumer` holds, each (layer, head, token) once.

    `spread` chooses among replicas: consumers with different numbers read from different ones, as far as there are any.

    Raises:
        GeometryError: the producer has other groups or parts, or lacks a layer, a head or tokens that the consumer
            holds.
    """
    ours, theirs = _part_keys(consumer), _part_keys(producer.ranks[0])
    if ours != theirs:
        raise GeometryError(
            "both engines need the same cache groups of the same parts",
            ours=ours,
            theirs=theirs,
            peer=producer.engine_id,
        )
    rectangles: list[Rectangle] = []
    for group_index, group in enumerate(consumer.groups):
        missing = set(group.layers)
        for pp_rank in range(producer.pp_size):
            stage = producer.stage(pp_rank)
            held = stage[0].groups[group_index].layers
            missing.difference_update(held)
            for run in adjacent_runs(group.layers, held):
                rectangles.extend(_stage_rectangles(consumer, spread, stage, group_index, run))
        if missing:
            raise GeometryError(
                "no producer rank holds these layers",
                layers=sorted(missing),
                peer=producer.engine_id,
            )
    return tuple(rectangles)


def _part_keys(rank: RankGeometry) -> list[list[tuple[str, int, int, int]]]:
    return [[(part.name, *part.model_key) for part in group.parts] for group in rank.groups]


def _stage_rectangles(
    consumer: RankGeometry,
    spread: int,
    stage: Sequence[RankGeometry],
    group_index: int,
    layers: tuple[int, ...],
) -> Iterator[Rectangle]:
    group = consumer.groups[group_index]
    for family_index, family in enumerate(group.families):
        for stripes, holders in token_shares(group.context_parallel, stage, group_index):
            held = [
                (r.rank, r.groups[group_index].families[family_index].head_range) for r in holders
            ]
            for source, heads in assign_heads(
                family.head_range, held, replica_choice(spread, group.dcp_size)
            ):
                for stripe in stripes:
                    yield Rectangle(
                        source=source,
                        group=group_index,
                        family=family_index,
                        layers=layers,
                        head_start=heads.start,
                        head_stop=heads.stop,
                        stripe=stripe,
                    )


def token_shares(
    wanted: ContextParallel, stage: Sequence[RankGeometry], group_index: int
) -> Iterator[tuple[tuple[Stripe, ...], list[RankGeometry]]]:
    """A consumer's tokens by the ranks of a producer's stage that hold them: those of one share are replicas."""
    theirs = stage[0].groups[group_index].context_parallel
    for dcp_rank in range(theirs.world_size):
        stripes = common_stripes(wanted, replace(theirs, rank=dcp_rank))
        if stripes:
            yield stripes, [r for r in stage if r.groups[group_index].dcp_rank == dcp_rank]


def replica_choice(spread: int, dcp_size: int) -> int:
    """A consumer's number among those that hold the same tokens: neighbouring ranks differ in their tokens first."""
    return spread // dcp_size


def adjacent_runs(ours: Sequence[int], theirs: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Values in both ascending sequences, cut into runs whose members are neighbours in both of them."""
    position_in_theirs = {value: position for position, value in enumerate(theirs)}
    run: list[int] = []
    last = (-2, -2)
    for position, value in enumerate(ours):
        if value not in position_in_theirs:
            continue
        here = (position, position_in_theirs[value])
        if run and here != (last[0] + 1, last[1] + 1):
            yield tuple(run)
            run = []
        run.append(value)
        last = here
    if run:
        yield tuple(run)


def assign_heads(
    wanted: range, held: Sequence[tuple[Rank, range]], spread: int
) -> list[tuple[Rank, range]]:
    """Which rank delivers which of the `wanted` heads: disjoint ranges in ascending order that cover `wanted`.

    Raises:
        GeometryError: no rank holds some wanted head.
    """
    edges = {wanted.start, wanted.stop}
    for _, heads in held:
        edges.update(edge for edge in (heads.start, heads.stop) if edge in wanted)
    cuts = sorted(edges)
    assigned: list[tuple[Rank, range]] = []
    for start, stop in pairwise(cuts):
        replicas = [rank for rank, heads in held if heads.start <= start and stop <= heads.stop]
        if not replicas:
            raise GeometryError("no producer rank holds these heads", heads=(start, stop))
        rank = replicas[spread % len(replicas)]
        if assigned and assigned[-1][0] == rank:
            assigned[-1] = (rank, range(assigned[-1][1].start, stop))
        else:
            assigned.append((rank, range(start, stop)))
    return assigned


def _shares_anything(consumer: RankGeometry, producer: RankGeometry) -> bool:
    """Whether the two hold a common (layer, head, token), so that the one may read from the other."""
    for ours, theirs in zip(consumer.groups, producer.groups, strict=True):
        if set(ours.layers).isdisjoint(theirs.layers):
            continue
        if not common_stripes(ours.context_parallel, theirs.context_parallel):
            continue
        for mine, other in zip(ours.families, theirs.families, strict=True):
            if mine.head_start < other.head_stop and other.head_start < mine.head_stop:
                return True
    return False


def release_targets(
    consumer: RankGeometry, consumer_engine: EngineGeometry, producer: EngineGeometry
) -> tuple[Rank, ...]:
    """Producer ranks to which this consumer rank confirms that it is done, read from or not.

    These are the ranks that hold anything it needs, replicas included; a producer rank that no consumer needs is
    confirmed by one consumer, chosen by position, so that every producer rank is released by somebody.
    """
    return tuple(
        holder.rank
        for holder in producer.ranks
        if consumer.rank in expected_confirmations(holder, producer, consumer_engine)
    )


def expected_confirmations(
    holder: RankGeometry, producer: EngineGeometry, consumer: EngineGeometry
) -> frozenset[Rank]:
    """Consumer ranks that will confirm to this producer rank: the mirror image of `release_targets`."""
    readers = frozenset(rank.rank for rank in consumer.ranks if _shares_anything(rank, holder))
    if readers:
        return readers
    position = holder.rank.global_rank(producer.tp_size) % consumer.world_size
    return frozenset({consumer.ranks[position].rank})
