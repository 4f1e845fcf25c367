"""The planner's oracle: it iterates over single coordinates, is obviously right, and far too slow to use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    for group_index, group in enumerate(consumer.geometry.groups):
        for layer in (each for each in group.layers if each in layers):
            for part_index, part in enumerate(group.parts):
                for head in range(part.head_start, part.head_stop):
                    for token in token_ranges[group_index]:
                        if not _is_held(group, layer, part_index, head, token):
                            continue
                        replicas = [
                            rank.rank
                            for rank in producer.ranks
                            if _is_held(rank.groups[group_index], layer, part_index, head, token)
                        ]
                        if not replicas:
                            raise GeometryError("no producer rank holds this head", head=head)
                        source = replicas[consumer.replica_index // group.dcp_size % len(replicas)]
                        yield Item(source, group_index, layer, part.name, head, token)


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
