"""`TpKVTopology`: who holds what of a model's KV cache, and who reads what from whom.

Pipeline stages cut a model's layers, tensor-parallel ranks its heads, and ranks of a decode context parallel group its
tokens. What one rank holds is a box of (layers x heads x tokens) in every cache group, so what a consumer rank reads
from a producer rank is the intersection of two boxes: no size has to divide another. Where several producer ranks hold
the same (GQA with more ranks than heads, MLA), one of them is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvconnector.errors import GeometryError, IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.layout import ALL_TOKENS, Stripe, common_stripes, own_stripe
from kvconnector.topology.geometry import (
    EngineGeometry,
    GroupGeometry,
    RankGeometry,
    agreed_values,
    parts_of,
)
from kvconnector.topology.sources import Offer, chosen, first_replica, offers, sources_of


@dataclass(frozen=True, slots=True)
class Segment:
    """One part family of one cache group, as far as both ranks hold it.

    `layers` are global indices that are neighbours in both ranks' holdings, `[head_start, head_stop)` global heads, and
    `stripe` says which tokens. `num_parts` are the parts of one layer (K and V: 2), `head_token_bytes` those of a part.
    """

    group: int
    family: int
    layers: tuple[int, ...]
    num_parts: int
    head_start: int
    head_stop: int
    head_token_bytes: int
    stripe: Stripe = ALL_TOKENS

    @property
    def part_token_bytes(self) -> int:
        """Bytes of one token of one part of one layer."""
        return (self.head_stop - self.head_start) * self.head_token_bytes

    def rows_of(self, layers: range) -> range:
        """(layer, part) pairs: those of the layers whose global indices are in `layers`, a range without steps."""
        first, stop = bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.stop)
        return range(first * self.num_parts, stop * self.num_parts)


@dataclass(frozen=True, slots=True)
class Target:
    """A remote rank to read from, and what."""

    rank: Rank
    segments: tuple[Segment, ...]


class TpKVTopology:
    """One rank of an engine: what it holds, and whom of another engine it reads from or is read by.

    `engine` are all workers as they registered. `replica_index` chooses among remote ranks that hold the same: by
    default an engine's ranks count on from a number of the engine's, so that they read different replicas, and so do
    the first ranks of several engines. Ratios are exact fractions *ours over theirs*: a `tp_ratio` of 2 means that we
    have twice as many ranks.

    Raises:
        GeometryError: the engine has no such rank.
    """

    def __init__(
        self, engine: EngineGeometry, rank: Rank, *, replica_index: int | None = None
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.geometry: RankGeometry = engine.rank_geometry(rank)
        if replica_index is None:
            replica_index = self.global_rank + first_replica(engine)
        self.replica_index = replica_index

    @staticmethod
    def heads_of(total_heads: int, *, tp_rank: int, tp_size: int, dcp_size: int = 1) -> range:
        """The heads that a rank holds of `total_heads`, in global numbering.

        `dcp_size` neighbouring ranks hold the same heads and share the tokens. Shares are runs of heads whose lengths
        differ by at most one; with more shares than heads, each head is held by a run of shares. Where one number
        divides the other this is the split of Megatron-style tensor parallelism.

        Raises:
            GeometryError: no heads, a rank outside its engine, or a `tp_size` that is no multiple of `dcp_size`.
        """
        if not (0 <= tp_rank < tp_size and total_heads > 0 and dcp_size > 0) or tp_size % dcp_size:
            raise GeometryError(
                "a rank needs 0 <= tp_rank < tp_size, a dcp_size that divides tp_size, and at least one head",
                total_heads=total_heads,
                tp_rank=tp_rank,
                tp_size=tp_size,
                dcp_size=dcp_size,
            )
        share, shares = tp_rank // dcp_size, tp_size // dcp_size
        start = share * total_heads // shares
        return range(start, max((share + 1) * total_heads // shares, start + 1))

    @staticmethod
    def layers_of(
        num_layers: int,
        *,
        pp_rank: int,
        pp_size: int,
        layers_per_stage: Sequence[int] | None = None,
    ) -> range:
        """The layers of a pipeline stage, in global numbering. Without `layers_per_stage` the stages' sizes differ by
        at most one, longer stages first.

        Raises:
            GeometryError: a stage without layers, sizes that do not add up, or no such stage.
        """
        sizes = list(layers_per_stage or ())
        if pp_size > 0 and not sizes:
            short, longer = divmod(num_layers, pp_size)
            sizes = [short + (stage < longer) for stage in range(pp_size)]
        fits = len(sizes) == pp_size and sum(sizes) == num_layers and 0 <= pp_rank < pp_size
        if not fits or min(sizes) < 1:
            raise GeometryError(
                "every pipeline stage needs a layer, and layers_per_stage must add up to num_layers",
                num_layers=num_layers,
                pp_rank=pp_rank,
                pp_size=pp_size,
                layers_per_stage=tuple(sizes),
            )
        start = sum(sizes[:pp_rank])
        return range(start, start + sizes[pp_rank])

    @property
    def global_rank(self) -> int:
        """Index of this rank in its engine."""
        return self.rank.global_rank(self.engine.tp_size)

    def targets(self, remote: EngineGeometry) -> tuple[Target, ...]:
        """The remote ranks to read from, in rank order: together they deliver everything that we hold, each
        (layer, part, head, token) once.

        Raises:
            IncompatiblePeerError: the remote engine has other cache groups or parts, or lacks a layer, a head or tokens
                that we hold.
        """
        self._check_same_parts(remote)
        found: dict[Rank, list[Segment]] = {}
        for offer in offers(self.geometry.groups, remote):
            for source, heads in self._assigned(offer):
                found.setdefault(source, []).extend(self._segments(offer, heads))
        return tuple(Target(rank, tuple(found[rank])) for rank in sorted(found))

    def readers(self, remote: EngineGeometry) -> frozenset[Rank]:
        """The remote ranks that confirm to us that they are done, so that blocks can be freed.

        These are the ranks whose `targets` have us; if there is none, one that our position chooses, so that every rank
        is released by somebody.

        Raises:
            IncompatiblePeerError: we lack a layer or a head that a remote rank holds.
        """
        found = sources_of(remote, self.engine, first_replica(remote))
        reading = [
            rank.rank
            for rank, sources in zip(remote.ranks, found, strict=True)
            if self.rank in sources
        ]
        return frozenset(reading or {remote.ranks[self.global_rank % remote.world_size].rank})

    def holders(self, remote: EngineGeometry) -> tuple[Rank, ...]:
        """The remote ranks to greet: those that have us among their `readers`.

        Raises:
            IncompatiblePeerError: as `targets`.
        """
        found = sources_of(self.engine, remote, self.replica_index - self.global_rank)
        read = set().union(*found)
        at_our_position = remote.ranks[self.global_rank :: self.engine.world_size]
        unread = {rank.rank for rank in at_our_position} - read
        return tuple(sorted(found[self.global_rank] | unread))

    def check_compatible(self, remote: EngineGeometry) -> None:
        """Refuse an engine whose cache means something else than ours. TP, PP and DCP sizes, block sizes, layouts and
        pool sizes may differ.

        Raises:
            IncompatiblePeerError: names every value in which the two engines disagree, or two ways of dealing out
                tokens that hardly ever coincide.
        """
        ours, theirs = agreed_values(self.engine), agreed_values(remote)
        engine_id, peer_id = self.engine.engine_id, remote.engine_id
        differing = {
            name: {engine_id: ours.get(name), peer_id: theirs.get(name)}
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        }
        if differing:
            raise IncompatiblePeerError(
                "the engines cannot exchange blocks, give both the same: they disagree in "
                + ", ".join(differing),
                **differing,
            )
        try:
            for mine, other in zip(self.geometry.groups, remote.ranks[0].groups, strict=True):
                common_stripes(mine.context_parallel, other.context_parallel)
        except GeometryError as error:
            raise IncompatiblePeerError(
                error.message, engine=engine_id, peer=peer_id, **error.context
            ) from error

    def tp_ratio(self, remote: EngineGeometry) -> Fraction:
        """Our tensor-parallel size over theirs."""
        return Fraction(self.engine.tp_size, remote.tp_size)

    def pp_ratio(self, remote: EngineGeometry) -> Fraction:
        """Our pipeline-parallel size over theirs."""
        return Fraction(self.engine.pp_size, remote.pp_size)

    def block_size_ratio(self, remote: EngineGeometry) -> Fraction:
        """Our block size over theirs in the first cache group, in tokens of one rank."""
        ours, theirs = self.geometry.groups[0], remote.ranks[0].groups[0]
        return Fraction(ours.block_size, theirs.block_size)

    @staticmethod
    def replicates_kv_cache(engine: EngineGeometry) -> bool:
        """Whether several ranks hold the same: replicated heads, an MLA latent, or shares that overlap."""
        held = Counter(
            (rank.pp_rank, index, number, group.dcp_rank, head)
            for rank in engine.ranks
            for index, group in enumerate(rank.groups)
            if group.layers
            for number, family in enumerate(group.families)
            for head in family.head_range
        )
        return max(held.values(), default=0) > 1

    def needs_relayout(self, remote: EngineGeometry) -> bool:
        """Whether a block of theirs is not a block of ours: another size, other tokens in it, or other heads."""
        return any(
            _block_of(self.geometry.groups[segment.group], segment)
            != _block_of(remote.rank_geometry(target.rank).groups[segment.group], segment)
            for target in self.targets(remote)
            for segment in target.segments
        )

    def _check_same_parts(self, remote: EngineGeometry) -> None:
        ours, theirs = parts_of(self.geometry), parts_of(remote.ranks[0])
        if ours != theirs:
            raise IncompatiblePeerError(
                "both engines need the same cache groups of the same parts",
                ours=ours,
                theirs=theirs,
                peer=remote.engine_id,
            )

    def _assigned(self, offer: Offer) -> list[tuple[Rank, range]]:
        """Which rank delivers which heads of an offer, in ascending order."""
        dcp_size = self.geometry.groups[offer.group].dcp_size
        assigned: list[tuple[Rank, range]] = []
        for heads, replicas in offer.pieces:
            rank = chosen(replicas, self.replica_index, dcp_size)
            goes_on = assigned and assigned[-1][0] == rank
            start = assigned.pop()[1].start if goes_on else heads.start
            assigned.append((rank, range(start, heads.stop)))
        return assigned

    def _segments(self, offer: Offer, heads: range) -> Iterator[Segment]:
        family = self.geometry.groups[offer.group].families[offer.family]
        for stripe in offer.stripes:
            yield Segment(
                group=offer.group,
                family=offer.family,
                layers=offer.layers,
                num_parts=family.num_parts,
                head_start=heads.start,
                head_stop=heads.stop,
                head_token_bytes=family.head_token_bytes,
                stripe=stripe,
            )


def _block_of(group: GroupGeometry, segment: Segment) -> tuple[object, ...]:
    heads = group.families[segment.family].head_range
    return (group.block_size, heads, own_stripe(group.context_parallel))
