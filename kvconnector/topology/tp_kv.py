"""`TpKVTopology`: one rank's place in its engine, and what it reads from an engine cut differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvconnector.cache.slot_mapping import NO_CONTEXT_PARALLEL, ContextParallel
from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.topology.backend import CacheLayout
from kvconnector.topology.geometry import EngineGeometry, RankGeometry
from kvconnector.topology.heads import is_kv_replicated, owned_heads
from kvconnector.topology.mapping import (
    adjacent_runs,
    assign_heads,
    replica_choice,
    token_shares,
)
from kvconnector.topology.stripes import ALL_TOKENS, Stripe


@dataclass(frozen=True, slots=True)
class TargetRank:
    """A remote rank to read from: which of our layers, heads (both global) and tokens it delivers."""

    global_rank: int
    pp_rank: int
    tp_rank: int
    layers: tuple[int, ...]
    head_start: int
    head_stop: int
    stripe: Stripe = ALL_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class TpKVTopology:
    """One rank of an engine: parallel position, KV heads, layers (global indices), block size (tokens), cache layout.

    With decode context parallelism, runs of neighbouring tensor ranks hold the same heads and share the tokens.

    Ratios are exact fractions *ours over theirs*: `tp_ratio == 2` means that we have twice the ranks.

    Raises:
        GeometryError: a rank outside its group, a tensor-parallel size that is no multiple of the context parallel one,
            no heads, no layers or unordered ones, or a block size below one.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    total_num_kv_heads: int
    is_mla: bool
    block_size: int
    engine_id: str
    layers: tuple[int, ...]
    layout: CacheLayout
    context_parallel: ContextParallel = NO_CONTEXT_PARALLEL

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise GeometryError(
                "a rank lies outside its group",
                engine=self.engine_id,
                tp=(self.tp_rank, self.tp_size),
                pp=(self.pp_rank, self.pp_size),
            )
        if self.tp_size % self.context_parallel.world_size:
            raise GeometryError(
                "context parallel groups are made of whole tensor-parallel groups",
                engine=self.engine_id,
                tp_size=self.tp_size,
                dcp_size=self.context_parallel.world_size,
            )
        if self.total_num_kv_heads < 1 or self.block_size < 1 or not self.layers:
            raise GeometryError(
                "a rank needs KV heads, layers and a block size",
                engine=self.engine_id,
                total_num_kv_heads=self.total_num_kv_heads,
                layers=self.layers,
                block_size=self.block_size,
            )
        if any(b <= a for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise GeometryError(
                "layers must ascend strictly", engine=self.engine_id, layers=self.layers
            )

    @property
    def num_head_shares(self) -> int:
        """Runs of tensor ranks that share the heads out among each other."""
        return self.tp_size // self.context_parallel.world_size

    @property
    def heads(self) -> range:
        """KV heads on this rank; MLA's single latent is on every rank."""
        if self.is_mla:
            return range(1)
        share = self.tp_rank // self.context_parallel.world_size
        return owned_heads(self.total_num_kv_heads, share, self.num_head_shares)

    @property
    def global_rank(self) -> int:
        """Index of this rank in its engine."""
        return Rank(self.pp_rank, self.tp_rank).global_rank(self.tp_size)

    @property
    def is_kv_replicated(self) -> bool:
        """Some KV head of a token is on several ranks: more ranks than heads, each with all tokens of its group."""
        return is_kv_replicated(self.total_num_kv_heads, self.num_head_shares)

    @property
    def replicates_kv_cache(self) -> bool:
        """The same cache content is on several ranks: MLA with more than one rank, or replicated heads."""
        return (self.is_mla and self.num_head_shares > 1) or self.is_kv_replicated

    @property
    def split_k_and_v(self) -> bool:
        """K and V are regions of their own."""
        return self.layout.split_k_and_v

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """Blocks come before K and V in the cache tensor."""
        return self.layout.is_kv_layout_blocks_first

    @property
    def cross_layers_blocks(self) -> bool:
        """One tensor holds all layers."""
        return self.layout.cross_layers_blocks

    @property
    def block_size_position(self) -> int:
        """Position of the token axis in memory, counted from the fastest (-1)."""
        return self.layout.block_size_position

    def tp_ratio(self, remote: EngineGeometry) -> Fraction:
        """Our tensor-parallel size over theirs."""
        return Fraction(self.tp_size, remote.tp_size)

    def pp_ratio(self, remote: EngineGeometry) -> Fraction:
        """Our pipeline-parallel size over theirs."""
        return Fraction(self.pp_size, remote.pp_size)

    def block_size_ratio(self, remote: EngineGeometry, group: int = 0) -> Fraction:
        """Our block size over theirs."""
        return Fraction(self.block_size, remote.ranks[0].groups[group].block_size)

    def get_target_remote_ranks(
        self, remote: EngineGeometry, group: int = 0, family: int = 0
    ) -> tuple[TargetRank, ...]:
        """Remote ranks that together deliver all that we hold of a group, each (layer, head, token) once.

        Raises:
            GeometryError: the remote engine holds fewer layers or heads than we need.
        """
        targets: list[TargetRank] = []
        missing = set(self.layers)
        for pp_rank in range(remote.pp_size):
            stage = remote.stage(pp_rank)
            runs = list(adjacent_runs(self.layers, stage[0].groups[group].layers))
            missing.difference_update(*runs)
            targets += [
                TargetRank(
                    global_rank=rank.global_rank(remote.tp_size),
                    pp_rank=rank.pp_rank,
                    tp_rank=rank.tp_rank,
                    layers=run,
                    head_start=heads.start,
                    head_stop=heads.stop,
                    stripe=stripe,
                )
                for run in runs
                for rank, heads, stripe in self._sources(stage, group, family)
            ]
        if missing:
            raise GeometryError(
                "no remote rank holds these layers", layers=sorted(missing), remote=remote.engine_id
            )
        return tuple(targets)

    def _sources(
        self, stage: Sequence[RankGeometry], group: int, family: int
    ) -> Iterator[tuple[Rank, range, Stripe]]:
        """Ranks of a remote stage, and which of our heads and tokens each delivers."""
        choice = replica_choice(self.global_rank, self.context_parallel.world_size)
        for stripes, holders in token_shares(self.context_parallel, stage, group):
            held = [(r.rank, r.groups[group].families[family].head_range) for r in holders]
            for rank, heads in assign_heads(self.heads, held, choice):
                yield from ((rank, heads, stripe) for stripe in stripes)
