"""An engine's geometry in the form in which it is sent: equal holdings of ranks are sent once."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnector.errors import GeometryError
from kvconnector.ids import Id, Rank
from kvconnector.topology.geometry import (
    EngineGeometry,
    GroupGeometry,
    ModelDescription,
    RankGeometry,
)

MAX_RANKS = 1 << 16


class PackedGeometry(msgspec.Struct, frozen=True, array_like=True, kw_only=True, cache_hash=True):
    """`holdings` are the ranks' holdings, each once; `ranks[i]` is the index of the i-th rank's. Raises GeometryError:
    a rank of no holding, no rank, or another number of ranks than `tp_size * pp_size`. Releases that state no
    `replica_rule` know the first one.
    """

    engine_id: Id
    tp_size: int
    pp_size: int
    model: ModelDescription
    holdings: tuple[tuple[GroupGeometry, ...], ...]
    ranks: Annotated[tuple[int, ...], Meta(max_length=MAX_RANKS)]
    verify: str = "none"
    replica_rule: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    num_optional: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    converts: bool = True

    def __post_init__(self) -> None:
        num_ranks, num_holdings = self.tp_size * self.pp_size, len(self.holdings)
        if not 0 < num_ranks == len(self.ranks) or not all(
            0 <= index < num_holdings for index in self.ranks
        ):
            raise GeometryError(
                "an engine must name a holding for each of its ranks",
                engine=self.engine_id,
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                ranks=len(self.ranks),
                holdings=num_holdings,
            )

    @classmethod
    def of(cls, engine: EngineGeometry) -> PackedGeometry:
        numbers: dict[tuple[GroupGeometry, ...], int] = {}
        ranks = tuple(numbers.setdefault(rank.groups, len(numbers)) for rank in engine.ranks)
        fields = {**msgspec.structs.asdict(engine), "holdings": tuple(numbers), "ranks": ranks}
        return cls(**fields)

    def groups_of(self, rank: Rank) -> tuple[GroupGeometry, ...]:
        """Return the cache groups of one of its ranks."""
        return self.holdings[self.ranks[rank.global_rank(self.tp_size)]]

    def unpack(self) -> EngineGeometry:
        """Return the engine. Raises GeometryError: as `EngineGeometry`."""
        fields = msgspec.structs.asdict(self)
        holdings = fields.pop("holdings")
        fields["ranks"] = tuple(
            RankGeometry(
                pp_rank=number // self.tp_size,
                tp_rank=number % self.tp_size,
                groups=holdings[index],
            )
            for number, index in enumerate(self.ranks)
        )
        return EngineGeometry(**fields)
