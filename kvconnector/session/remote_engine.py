"""A producer engine as one consumer rank sees it: the state table and the record."""

from __future__ import annotations

from enum import Enum

from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineId, Rank
from kvconnector.planning import PeerPlan
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.session.machine import Table, Tracked
from kvconnector.topology import EngineGeometry
from kvconnector.wire.messages import WorkerEntry


class EngineState(str, Enum):
    """States of a remote engine."""

    UNKNOWN = "unknown"
    RESOLVING = "resolving"
    HELLO = "hello"
    READY = "ready"
    BACKOFF = "backoff"


_S = EngineState

ENGINE_TABLE: Table[EngineState] = Table(
    "remote engine",
    _S.UNKNOWN,
    {
        _S.UNKNOWN: {ev.Wanted: frozenset({_S.RESOLVING})},
        _S.RESOLVING: {
            ev.Wanted: frozenset({_S.RESOLVING}),
            ev.DirectoryArrived: frozenset({_S.HELLO, _S.BACKOFF}),
            ev.DirectoryDenied: frozenset({_S.BACKOFF}),
            ev.LinkLost: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.RESOLVING, _S.BACKOFF}),
        },
        _S.HELLO: {
            ev.Wanted: frozenset({_S.HELLO, _S.RESOLVING}),
            ev.HelloAnswered: frozenset({_S.HELLO, _S.READY, _S.BACKOFF}),
            ev.WarmedUp: frozenset({_S.HELLO, _S.READY, _S.BACKOFF}),
            ev.LinkLost: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.HELLO, _S.BACKOFF}),
        },
        _S.READY: {
            ev.Wanted: frozenset({_S.READY, _S.RESOLVING}),
            ev.LinkLost: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.READY, _S.BACKOFF}),
        },
        _S.BACKOFF: {
            ev.Wanted: frozenset({_S.BACKOFF, _S.RESOLVING}),
            ev.Tick: frozenset({_S.BACKOFF, _S.RESOLVING, _S.UNKNOWN}),
        },
    },
)


class Worker:
    """One rank of a remote engine that we greeted: its directory entry, its link, and how far the greeting is."""

    __slots__ = ("answered", "entry", "incarnation", "last_heard", "link", "warm")

    def __init__(self, entry: WorkerEntry, link: LinkId, now: float) -> None:
        self.entry = entry
        self.link = link
        self.answered = False
        self.warm = False
        self.incarnation = entry.incarnation
        self.last_heard = now


class RemoteEngine(Tracked[EngineState]):
    """Where the engine is, who its workers are, and what we read from whom."""

    __slots__ = (
        "address",
        "attempts",
        "directory_link",
        "engine_id",
        "geometry",
        "heartbeat_at",
        "last_error",
        "plan",
        "public_key",
        "until",
        "workers",
    )

    def __init__(self, engine_id: EngineId, address: str, public_key: str) -> None:
        super().__init__(ENGINE_TABLE, f"engine {engine_id}")
        self.engine_id = engine_id
        self.address = address
        self.public_key = public_key
        self.attempts = 0
        self.until = 0.0
        self.heartbeat_at = 0.0
        self.directory_link: LinkId | None = None
        self.geometry: EngineGeometry | None = None
        self.plan: PeerPlan | None = None
        self.workers: dict[Rank, Worker] = {}
        self.last_error: KVConnectorError | None = None

    @property
    def links(self) -> list[LinkId]:
        """All links that are open to this engine."""
        links = [worker.link for worker in self.workers.values()]
        return links if self.directory_link is None else [self.directory_link, *links]
