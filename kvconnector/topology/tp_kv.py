"""`TpKVTopology`: one rank's place in its engine, and what it reads from an engine cut differently."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.topology.backend import CacheLayout
from kvconnector.topology.geometry import EngineGeometry
from kvconnector.topology.heads import is_kv_replicated, owned_heads
from kvconnector.topology.mapping import adjacent_runs, assign_heads


@dataclass(frozen=True, slots=True)
class TargetRank:
    """A remote rank to read from: which of our layers and heads (both global) it delivers."""

    global_rank: int
    pp_rank: int
    tp_rank: int
    layers: tuple[int, ...]
    head_start: int
    head_stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TpKVTopology:
    """One rank of an engine: parallel position, KV heads, layers (global indices), block size (tokens), cache layout.

    Ratios are exact fractions *ours over theirs*: `tp_ratio == 2` means that we have twice the ranks.

    Raises:
        GeometryError: a rank outside its group, no heads, no layers or unordered ones, or a block size below one.
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

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise GeometryError(
                "a rank lies outside its group",
                engine=self.engine_id,
                tp=(self.tp_rank, self.tp_size),
                pp=(self.pp_rank, self.pp_size),
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
    def heads(self) -> range:
        """KV heads on this rank; MLA's single latent is on every rank."""
        if self.is_mla:
            return range(1)
        return owned_heads(self.total_num_kv_heads, self.tp_rank, self.tp_size)

    @property
    def global_rank(self) -> int:
        """Index of this rank in its engine."""
        return Rank(self.pp_rank, self.tp_rank).global_rank(self.tp_size)

    @property
    def is_kv_replicated(self) -> bool:
        """Some KV head is on several ranks: more ranks than heads."""
        return is_kv_replicated(self.total_num_kv_heads, self.tp_size)

    @property
    def replicates_kv_cache(self) -> bool:
        """The same cache content is on several ranks: MLA with more than one rank, or replicated heads."""
        return (self.is_mla and self.tp_size > 1) or self.is_kv_replicated

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
        """Remote ranks that together deliver all our layers and heads of a group, each (layer, head) once.

        Raises:
            GeometryError: the remote engine holds fewer layers or heads than we need.
        """
        targets: list[TargetRank] = []
        missing = set(self.layers)
        for pp_rank in range(remote.pp_size):
            stage = remote.stage(pp_rank)
            held = [(r.rank, r.groups[group].families[family].head_range) for r in stage]
            for run in adjacent_runs(self.layers, stage[0].groups[group].layers):
                missing.difference_update(run)
                targets.extend(
                    TargetRank(
                        global_rank=rank.global_rank(remote.tp_size),
                        pp_rank=rank.pp_rank,
                        tp_rank=rank.tp_rank,
                        layers=run,
                        head_start=heads.start,
                        head_stop=heads.stop,
                    )
                    for rank, heads in assign_heads(self.heads, held, self.global_rank)
                )
        if missing:
            raise GeometryError(
                "no remote rank holds these layers", layers=sorted(missing), remote=remote.engine_id
            )
        return tuple(targets)
