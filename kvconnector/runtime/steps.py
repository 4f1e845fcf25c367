"""What the scheduler half tells the worker halves with each engine step, and what workers tell it at the start.

All are `msgspec` structs without references to this process, so an engine can send them between its processes.
"""

from __future__ import annotations

import msgspec

from kvconnector.session.orders import Order
from kvconnector.topology import EngineGeometry, ModelDescription, RankGeometry


class StepMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One step's orders for every worker of the engine, in the order in which they were given: an id may be used again
    within a step. `engine` is there until the scheduler knows that all workers have it.
    """

    engine: EngineGeometry | None = None
    orders: tuple[Order, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing new."""
        return not (self.engine or self.orders)


class WorkerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells its scheduler after registration: what it holds, and where its peers find it."""

    engine_id: str
    pp_rank: int
    tp_rank: int
    geometry: RankGeometry
    model: ModelDescription
    control_address: str
    public_key: str
    incarnation: str
