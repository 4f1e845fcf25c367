"""The ranks of a producer engine that deliver a consumer rank's holding, and the choice among replicas.

Ranks of a stage with equal holdings are examined once, so the time grows with the number of ranks of both engines, not
with the number of pairs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise

from kvconnector.errors import IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.layout import ContextParallel, Stripe, common_stripes
from kvconnector.topology.geometry import EngineGeometry, GroupGeometry


@dataclass(frozen=True, slots=True)
class Offer:
    """A stage's offer of a family of parts: adjacent layers, the tokens of `stripes`, and in `pieces` disjoint head
    ranges in ascending order, each with the ranks that hold all of it, in rank order.
    """

    group: int
    family: int
    layers: tuple[int, ...]
    stripes: tuple[Stripe, ...]
    pieces: tuple[tuple[range, tuple[Rank, ...]], ...]


def first_replica(engine: EngineGeometry) -> int:
    """Return the replica that an engine's first rank reads: a hash of its id, so that engines read different ones."""
    return zlib.crc32(engine.engine_id.encode())


def chosen(replicas: Sequence[Rank], replica_index: int, dcp_size: int) -> Rank:
    """Return the replica to read. All ranks of a context parallel group read the same one: they hold other tokens."""
    return replicas[replica_index // dcp_size % len(replicas)]


def sources_of(consumer: EngineGeometry, producer: EngineGeometry, first: int) -> list[set[Rank]]:
    """Return the producer ranks that each consumer rank reads, the first one replica `first`. Raises as `offers`."""
    known: dict[tuple[GroupGeometry, ...], set[tuple[int, tuple[Rank, ...]]]] = {}
    found = []
    for index, rank in enumerate(consumer.ranks, first):
        if rank.groups not in known:
            known[rank.groups] = {
                (rank.groups[offer.group].dcp_size, replicas)
                for offer in offers(rank.groups, producer)
                for _, replicas in offer.pieces
            }
        choices = known[rank.groups]
        found.append({chosen(replicas, index, dcp_size) for dcp_size, replicas in choices})
    return found


def offers(groups: Sequence[GroupGeometry], remote: EngineGeometry) -> Iterator[Offer]:
    """Yield what an engine has of these cache groups. Raises IncompatiblePeerError: it lacks a layer or a head."""
    for index, group in enumerate(groups):
        missing = set(group.layers)
        for pp_rank in range(remote.pp_size):
            theirs = remote.ranks[pp_rank * remote.tp_size].groups[index].layers
            for layers in _common_runs(group.layers, theirs):
                missing.difference_update(layers)
                yield from _offers_of_stage(index, group, layers, remote, pp_rank)
        if missing:
            raise IncompatiblePeerError(
                "no rank of the other engine holds these layers",
                layers=sorted(missing),
                group=index,
                peer=remote.engine_id,
            )


def _offers_of_stage(
    index: int, group: GroupGeometry, layers: tuple[int, ...], remote: EngineGeometry, pp_rank: int
) -> Iterator[Offer]:
    held = remote.shares[pp_rank][index]
    theirs = held[0][0][0].context_parallel
    for number, family in enumerate(group.families):
        for dcp_rank, stripes in _sharing(group.context_parallel, theirs):
            pieces = _pieces(family.head_range, number, held[dcp_rank])
            yield Offer(index, number, layers, stripes, pieces)


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
