"""The ranks of a producer engine that deliver a consumer rank's holding, and the choice among replicas.

Several producer ranks may hold the same of a cache group: *replicas*. The consumer ranks that need it are its *takers*,
and each reads one replica:

- As many takers as replicas: the taker at position `i` reads replica `i`. Between engines of equal shape a rank reads
  the rank with its own number, which on a rail-optimised network is the one on its rail.
- More takers: they take turns, so the numbers of their readers differ by at most one.
- Fewer takers: one replica each. Which ones depends on the consumer engine's id, so that several engines spread over
  all replicas. If the numbers divide, an engine takes a run that begins at a multiple of its takers, so some engines
  still read from their own rails.

Both engines compute the choice: the producer's ranks have to know who confirms. So it is part of what they agree on:
`EngineGeometry.replica_rule` says which rule an engine knows, and both use the older one. Rule 0 is that of releases
that state none: rank `i` reads replica `i` plus a hash of its engine's id.

Ranks of a stage with equal holdings are examined once, so the time grows with the number of ranks of both engines, not
with the number of pairs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import TypeAlias

from kvconnector.errors import IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.layout import ContextParallel, Stripe, common_stripes
from kvconnector.topology.geometry import REPLICAS_BY_INDEX, EngineGeometry, GroupGeometry


@dataclass(frozen=True, slots=True)
class StageShare:
    """A stage's share of a family of parts: adjacent layers, the tokens of `stripes`, and in `pieces` disjoint head
    ranges in ascending order, each with the ranks that hold all of it, in rank order.
    """

    group: int
    family: int
    layers: tuple[int, ...]
    stripes: tuple[Stripe, ...]
    pieces: tuple[tuple[range, tuple[Rank, ...]], ...]


Replicas: TypeAlias = tuple[int, tuple[Rank, ...]]
"""A cache group, and the ranks that hold the same of it, in rank order."""


def rotation_of(engine: EngineGeometry) -> int:
    """Return where an engine begins among the replicas if there are more replicas than ranks: a hash of its id."""
    return zlib.crc32(engine.engine_id.encode())


def chosen(num_replicas: int, num_takers: int, place: int, rotation: int) -> int:
    """Return which replica the taker at `place` reads, by the rule that this module describes."""
    if num_takers >= num_replicas:
        return place % num_replicas
    windows, rest = divmod(num_replicas, num_takers)
    first = rotation if rest else num_takers * (rotation % windows)
    return (first + place) % num_replicas


def sources_of(
    consumer: EngineGeometry, producer: EngineGeometry, rotation: int
) -> dict[Replicas, dict[int, Rank]]:
    """Return which replica each consumer rank reads, by the number of the rank, for all replicas that some rank needs.
    `rotation` is that of the consumer. Raises as `stage_shares`.
    """
    numbers: dict[tuple[GroupGeometry, ...], list[int]] = {}
    for number, rank in enumerate(consumer.ranks):
        numbers.setdefault(rank.groups, []).append(number)
    takers: dict[Replicas, list[tuple[int, int]]] = {}
    for groups, alike in numbers.items():
        needed = {
            (share.group, replicas)
            for share in stage_shares(groups, producer)
            for _, replicas in share.pieces
        }
        for key in needed:
            dcp_rank = groups[key[0]].dcp_rank
            takers.setdefault(key, []).extend([(dcp_rank, number) for number in alike])
    is_by_index = min(consumer.replica_rule, producer.replica_rule) >= REPLICAS_BY_INDEX
    return {
        key: (
            _by_index(key[1], places, rotation)
            if is_by_index
            else _by_id(key[1], places, rotation, consumer.ranks[0].groups[key[0]].dcp_size)
        )
        for key, places in takers.items()
    }


def _by_index(
    replicas: tuple[Rank, ...], takers: list[tuple[int, int]], rotation: int
) -> dict[int, Rank]:
    """Return the replica of each taker, given as its rank in its context parallel group and its number."""
    if len(takers) > len(replicas):
        takers.sort()  # those that need the same tokens take turns
    else:
        takers.sort(key=lambda taker: taker[1])
    return {
        number: replicas[chosen(len(replicas), len(takers), place, rotation)]
        for place, (_, number) in enumerate(takers)
    }


def _by_id(
    replicas: tuple[Rank, ...], takers: list[tuple[int, int]], rotation: int, dcp_size: int
) -> dict[int, Rank]:
    """Rule 0, of earlier releases."""
    size = len(replicas)
    return {number: replicas[(number + rotation) // dcp_size % size] for _, number in takers}


def stage_shares(groups: Sequence[GroupGeometry], remote: EngineGeometry) -> Iterator[StageShare]:
    """Yield what an engine has of these cache groups. It may lack optional layers, and the last groups, if they are
    optional. Raises IncompatiblePeerError: it lacks a layer or a head.
    """
    for index, group in enumerate(groups[: remote.num_groups]):
        missing = set(group.layers)
        for pp_rank in range(remote.pp_size):
            theirs = remote.ranks[pp_rank * remote.tp_size].groups[index].layers
            for layers in _common_runs(group.layers, theirs):
                missing.difference_update(layers)
                yield from _offers_of_stage(index, group, layers, remote, pp_rank)
        missing.difference_update(group.optional_layers)
        if missing:
            raise IncompatiblePeerError(
                "no rank of the other engine holds these layers",
                layers=sorted(missing),
                group=index,
                peer=remote.engine_id,
            )


def _offers_of_stage(
    index: int, group: GroupGeometry, layers: tuple[int, ...], remote: EngineGeometry, pp_rank: int
) -> Iterator[StageShare]:
    held = remote.shares[pp_rank][index]
    theirs = held[0][0][0].context_parallel
    for number, family in enumerate(group.families):
        for dcp_rank, stripes in _sharing(group.context_parallel, theirs):
            pieces = _pieces(family.head_range, number, held[dcp_rank])
            yield StageShare(index, number, layers, stripes, pieces)


@lru_cache(maxsize=1024)
def _sharing(
    ours: ContextParallel, theirs: ContextParallel
) -> tuple[tuple[int, tuple[Stripe, ...]], ...]:
    """Return the ranks of another context parallel group that hold tokens of ours, with these tokens."""
    common = [
        (rank, common_stripes(ours, replace(theirs, rank=rank)))
        for rank in range(theirs.world_size)
    ]
    return tuple((rank, stripes) for rank, stripes in common if stripes)


@lru_cache(maxsize=4096)
def _common_runs(ours: Sequence[int], theirs: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the values in both ascending sequences, in runs whose members are adjacent in both of them."""
    position_in_theirs = {value: position for position, value in enumerate(theirs)}
    runs: list[list[int]] = []
    last = (-2, -2)
    for position, value in enumerate(ours):
        if value in position_in_theirs:
            here = (position, position_in_theirs[value])
            if here != (last[0] + 1, last[1] + 1):
                runs.append([])
            runs[-1].append(value)
            last = here
    return tuple(map(tuple, runs))


@lru_cache(maxsize=1024)
def _pieces(
    wanted: range, family: int, holdings: Sequence[tuple[GroupGeometry, tuple[Rank, ...]]]
) -> tuple[tuple[range, tuple[Rank, ...]], ...]:
    """Split a family's heads where a holding begins or ends. Raises IncompatiblePeerError: no rank holds a head."""
    held = [(group.families[family].head_range, ranks) for group, ranks in holdings]
    edges = {wanted.start, wanted.stop}
    for heads, _ in held:
        edges.update(edge for edge in (heads.start, heads.stop) if edge in wanted)
    pieces = []
    for start, stop in pairwise(sorted(edges)):
        holders = [ranks for heads, ranks in held if heads.start <= start and stop <= heads.stop]
        if not holders:
            raise IncompatiblePeerError(
                "no rank of the other engine holds these heads", heads=(start, stop)
            )
        pieces.append((range(start, stop), tuple(sorted(chain(*holders)))))
    return tuple(pieces)
