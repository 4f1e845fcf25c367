"""The planner's oracle: it iterates over single coordinates, is obviously right, and far too slow to use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import lcm
from typing import NamedTuple

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.layout import ALL_LAYERS
from kvconnector.planning.plan import SourceRead
from kvconnector.topology import EngineGeometry, GroupGeometry, RankGeometry, TpKVTopology


class Item(NamedTuple):
    """One head of one token of one part of one layer, and the producer rank that delivers it."""

    source: Rank
    group: int
    layer: int
    part: str
    head: int
    token: int


def naive_plan(
    consumer: TpKVTopology,
    producer: EngineGeometry,
    token_ranges: Sequence[range],
    layers: range = ALL_LAYERS,
) -> Iterator[Item]:
    """Yield every item of these layers that the consumer rank needs, each once."""
    takers = _takers(consumer.engine, producer)
    num_common = min(len(consumer.geometry.groups), len(producer.ranks[0].groups))
    for group_index, group in enumerate(consumer.geometry.groups[:num_common]):
        for layer in (each for each in group.layers if each in layers):
            for part_index, part in enumerate(group.parts):
                for head in range(part.head_start, part.head_stop):
                    for token in token_ranges[group_index]:
                        if not _is_held(group, layer, part_index, head, token):
                            continue
                        replicas = _holders(producer, group_index, layer, (part_index, head, token))
                        if not replicas and layer in group.optional_layers:
                            continue
                        if not replicas:
                            raise GeometryError("no producer rank holds this head", head=head)
                        source = _choice(
                            replicas,
                            takers[group_index, replicas],
                            consumer.geometry,
                            group_index,
                            consumer.rotation,
                        )
                        yield Item(source, group_index, layer, part.name, head, token)


_Takers = dict[tuple[int, tuple[Rank, ...]], set[RankGeometry]]


def _takers(consumer: EngineGeometry, producer: EngineGeometry) -> _Takers:
    """Return the consumer ranks that need something of each group and of each set of replicas."""
    takers: _Takers = defaultdict(set)
    for rank in consumer.ranks:
        num_common = min(len(rank.groups), len(producer.ranks[0].groups))
        for index, group in enumerate(rank.groups[:num_common]):
            theirs = producer.ranks[0].groups[index]
            turns = [each.interleave_tokens * each.dcp_size for each in (group, theirs)]
            for layer in group.layers:
                for part, held in enumerate(group.parts):
                    for head in range(held.head_start, held.head_stop):
                        for token in range(lcm(*turns)):
                            if _is_held(group, layer, part, head, token):
                                found = _holders(producer, index, layer, (part, head, token))
                                takers[index, found].add(rank)
    return takers


def _holders(
    producer: EngineGeometry, group: int, layer: int, place: tuple[int, int, int]
) -> tuple[Rank, ...]:
    """Return the ranks that hold one part, head and token of a layer."""
    return tuple(
        rank.rank for rank in producer.ranks if _is_held(rank.groups[group], layer, *place)
    )


def _choice(
    replicas: tuple[Rank, ...],
    takers: set[RankGeometry],
    reader: RankGeometry,
    group: int,
    rotation: int,
) -> Rank:
    """Return the replica that a consumer rank reads, by the newest rule of `topology.sources`."""
    in_order = sorted(takers, key=lambda rank: rank.rank)
    if len(takers) > len(replicas):
        in_order.sort(key=lambda rank: rank.groups[group].dcp_rank)
    place = in_order.index(reader)
    if len(takers) >= len(replicas):
        return replicas[place % len(replicas)]
    if len(replicas) % len(takers) == 0:
        rotation *= len(takers)
    return replicas[(place + rotation) % len(replicas)]


def _is_held(group: GroupGeometry, layer: int, part: int, head: int, token: int) -> bool:
    held = group.parts[part]
    is_own_turn = token // group.interleave_tokens % group.dcp_size == group.dcp_rank
    return is_own_turn and layer in group.layers and held.head_start <= head < held.head_stop


def plan_items(plan: Iterable[SourceRead], consumer: RankGeometry) -> Iterator[Item]:
    """Yield all items of a vectorised plan, in the order of its chunks."""
    for read in plan:
        for chunk in read.chunks:
            segment = read.segments[int(chunk["segment"])]
            group = consumer.groups[segment.group]
            names = [group.parts[i].name for i in group.families[segment.family].part_indices]
            for row in range(chunk["part_start"], chunk["part_start"] + chunk["num_parts"]):
                layer = segment.layers[row // segment.num_parts]
                part = names[row % segment.num_parts]
                for head in range(segment.head_start, segment.head_stop):
                    start = int(chunk["token_start"])
                    for member in range(start, start + int(chunk["num_tokens"])):
                        token = segment.stripe.token(member)
                        yield Item(read.source, segment.group, layer, part, head, token)
