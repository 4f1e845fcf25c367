"""An engine's geometry and directory from its workers' metadata, and the retentions of its cache groups."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import structs

from kvconnector._version import __version__
from kvconnector.config import ConnectorConfig, Role
from kvconnector.errors import ConfigError, GeometryError, require_counts
from kvconnector.ids import Rank
from kvconnector.planning import KeepsAll, KeepsState, Retention
from kvconnector.topology import EngineGeometry, GroupGeometry, ModelDescription, RankGeometry
from kvconnector.wire import messages as m
from kvconnector.wire.packed_geometry import PackedGeometry


class WorkerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report to its scheduler after registration: its caches' geometry, and its address for peers.

    `num_blocks[group]` are the block ids that its pools have; a group without a layer there has any. The last
    `num_optional` groups are optional, see `EngineGeometry`.
    """

    engine_id: str
    geometry: RankGeometry
    model: ModelDescription
    control_address: str
    public_key: str
    incarnation: str
    role: Role
    num_blocks: tuple[int, ...]
    num_optional: int = 0


_NEEDED = "a Scheduler needs the list of what each worker's handshake() returned"


def joined_geometry(config: ConnectorConfig, metadata: Sequence[WorkerMetadata]) -> EngineGeometry:
    """Return the whole engine's geometry, from the metadata of all its workers in any order.

    A model that states no number of layers has as many as the workers registered in groups that are not optional.

    Raises:
        ConfigError: a worker has another engine id or role than these settings.
        GeometryError: a worker is missing or twice there, or they belong to different models.
    """
    if not isinstance(metadata, Sequence):
        raise ConfigError(_NEEDED, got=type(metadata).__name__)
    if not metadata:
        raise GeometryError("an engine needs at least one worker")
    for worker in metadata:
        _check_worker(worker, config, metadata[0])
    ordered = sorted(metadata, key=_rank_of)
    model = ordered[0].model
    layers = {
        layer
        for worker in ordered
        for group in worker.geometry.groups[: len(worker.num_blocks) - worker.num_optional]
        for layer in group.layers
    }
    engine = EngineGeometry(
        engine_id=config.engine_id,
        tp_size=max(worker.geometry.tp_rank for worker in ordered) + 1,
        pp_size=ordered[-1].geometry.pp_rank + 1,
        model=structs.replace(model, num_layers=model.num_layers or len(layers)),
        ranks=tuple(worker.geometry for worker in ordered),
        verify=config.verify,
        converts=config.convert == "auto",
        num_optional=ordered[0].num_optional,
    )
    for pp_rank in range(engine.pp_size):
        _check_heads(engine, pp_rank)
    return engine


def _rank_of(worker: WorkerMetadata) -> Rank:
    return worker.geometry.rank


def _check_worker(worker: object, config: ConnectorConfig, first: WorkerMetadata) -> None:
    if not isinstance(worker, WorkerMetadata):
        raise ConfigError(_NEEDED, got=type(worker).__name__)
    rank = str(worker.geometry.rank)
    theirs, ours = (worker.engine_id, worker.role), (config.engine_id, config.role)
    if theirs != ours:
        raise ConfigError(
            "a worker belongs to another engine, or has another role in it",
            rank=rank,
            worker=theirs,
            scheduler=ours,
        )
    if worker.num_optional != first.num_optional:
        raise GeometryError(
            "workers have different numbers of optional cache groups",
            first=first.num_optional,
            rank=rank,
            other=worker.num_optional,
        )
    if worker.model != first.model:
        raise GeometryError(
            "workers belong to different models", first=first.model, rank=rank, other=worker.model
        )


def _check_heads(engine: EngineGeometry, pp_rank: int) -> None:
    """Refuse a stage whose last ranks are missing, which nothing else shows."""
    for index, group in enumerate(engine.stage(pp_rank)[0].groups):
        for number, part in enumerate(group.parts):
            parts = [rank.groups[index].parts[number] for rank in engine.stage(pp_rank)]
            held = {head for each in parts for head in range(each.head_start, each.head_stop)}
            if len(held) < part.total_heads:
                raise GeometryError(
                    "no worker of a pipeline stage holds these heads: the metadata of a rank is missing",
                    engine=engine.engine_id,
                    pp_rank=pp_rank,
                    group=index,
                    part=part.name,
                    heads=sorted({*range(part.total_heads)} - held),
                    ranks=[str(rank.rank) for rank in engine.stage(pp_rank)],
                )


def directory_of(
    geometry: EngineGeometry, metadata: Sequence[WorkerMetadata], *, stream: bool = True
) -> m.Directory:
    """Return the directory service's answer."""
    entries = tuple(
        m.WorkerEntry(
            pp_rank=worker.geometry.pp_rank,
            tp_rank=worker.geometry.tp_rank,
            control_address=worker.control_address,
            public_key=worker.public_key,
            incarnation=worker.incarnation,
        )
        for worker in sorted(metadata, key=_rank_of)
    )
    return m.Directory(
        geometry=PackedGeometry.of(geometry),
        workers=entries,
        library_version=__version__,
        stream=stream,
    )


def checked_retentions(
    engine: EngineGeometry, retentions: Sequence[Retention] | None
) -> tuple[Retention, ...]:
    """Return each cache group's retention; by default it keeps every token, or every row.

    Raises:
        GeometryError: not as many as groups, a group of states has blocks of several tokens, a retention counts rows of
            other tokens than its group, or ranks share the tokens of a group that keeps only some.
    """
    groups = engine.ranks[0].groups
    kept = tuple(
        [KeepsAll(group.row_tokens) for group in groups] if retentions is None else retentions
    )
    if len(kept) != engine.num_groups:
        raise GeometryError(
            "give one retention per cache group", retentions=len(kept), groups=engine.num_groups
        )
    for index, (retention, group) in enumerate(zip(kept, groups, strict=True)):
        _check_retention(index, retention, group)
    return kept


def checked_tables(engine: EngineGeometry, tables: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of each cache group's block table; nothing if no two groups share one.

    Raises:
        GeometryError: not one number from 0 to 2^31 - 1 per group.
    """
    if tables is None:
        return ()
    require_counts(GeometryError, **{f"tables[{i}]": table for i, table in enumerate(tables)})
    if len(tables) != engine.num_groups:
        raise GeometryError(
            "give one block table number per cache group", tables=tables, groups=engine.num_groups
        )
    return tuple(tables) if len(set(tables)) < len(tables) else ()


def _check_retention(index: int, retention: Retention, group: GroupGeometry) -> None:
    if not isinstance(retention, Retention):
        raise GeometryError(
            "a retention must be one of kvconnector.planning: KeepsAll, KeepsWindow, KeepsChunk, KeepsState,"
            " KeepsEncoder",
            group=index,
            got=retention,
        )
    if isinstance(retention, KeepsState) and group.block_size != 1:
        raise GeometryError(
            "a group of states needs block_size 1, since a block holds one state",
            group=index,
            block_size=group.block_size,
        )
    row_tokens = retention.row_tokens if isinstance(retention, KeepsAll) else 1
    if row_tokens != group.row_tokens:
        raise GeometryError(
            "a cache group and its retention must have the same row_tokens",
            group=index,
            retention=retention,
            row_tokens=group.row_tokens,
        )
    if not isinstance(retention, KeepsAll) and group.dcp_size > 1:
        raise GeometryError(
            "context parallel ranks can share tokens only in groups that keep all tokens",
            group=index,
            retention=retention,
            dcp_size=group.dcp_size,
        )
