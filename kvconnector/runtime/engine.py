"""An engine's geometry and directory from its workers' metadata."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.runtime.steps import WorkerMetadata
from kvconnector.topology import EngineGeometry
from kvconnector.wire import messages as m


def engine_geometry(
    metadata: Sequence[WorkerMetadata], *, tp_size: int, pp_size: int
) -> EngineGeometry:
    """The whole engine, from the metadata of all its workers in any order.

    Raises:
        GeometryError: a worker is missing or twice there, or they belong to different engines or models.
    """
    ordered = sorted(metadata, key=lambda worker: (worker.pp_rank, worker.tp_rank))
    if not ordered:
        raise GeometryError("an engine has at least one worker")
    first = ordered[0]
    for worker in ordered:
        if (worker.engine_id, worker.model) != (first.engine_id, first.model):
            raise GeometryError(
                "workers belong to different engines or models",
                first=(first.engine_id, first.model),
                rank=str(Rank(worker.pp_rank, worker.tp_rank)),
                other=(worker.engine_id, worker.model),
            )
    return EngineGeometry(
        engine_id=first.engine_id,
        tp_size=tp_size,
        pp_size=pp_size,
        model=first.model,
        ranks=tuple(worker.geometry for worker in ordered),
    )


def directory_of(geometry: EngineGeometry, metadata: Sequence[WorkerMetadata]) -> m.Directory:
    """What the directory service answers."""
    ordered = sorted(metadata, key=lambda worker: (worker.pp_rank, worker.tp_rank))
    entries = tuple(
        m.WorkerEntry(
            pp_rank=worker.pp_rank,
            tp_rank=worker.tp_rank,
            control_address=worker.control_address,
            public_key=worker.public_key,
            incarnation=worker.incarnation,
        )
        for worker in ordered
    )
    return m.Directory(geometry=geometry, workers=entries)
