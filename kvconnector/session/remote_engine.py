"""A producer engine as one consumer rank sees it: its state table, workers, loads and record."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from kvconnector.errors import IncompatiblePeerError, RemoteProtocolError
from kvconnector.ids import EngineAddress, Rank
from kvconnector.planning import Route
from kvconnector.session import events as ev
from kvconnector.session.agenda import AT_ONCE, NEVER
from kvconnector.session.link import Link
from kvconnector.session.load import Load
from kvconnector.session.machine import Table, Tracked, staying
from kvconnector.session.orders import WantRequest
from kvconnector.session.reads import RankRead
from kvconnector.topology import EngineGeometry, RankGeometry
from kvconnector.wire import messages as m
from kvconnector.wire import versions

MIN_HEARTBEAT_INTERVAL_S = 0.05
"""The shortest interval of heartbeats in seconds, no matter how short a peer's timeout or leases are."""


MAX_NAMED_BYTES = 24 << 10
"""The most bytes of transfers' names in a heartbeat: with the rest of them it fits into any peer's longest message."""
LONGEST_NAME_BYTES = 2 << 10
"""Of 512 characters."""


class EngineState(StrEnum):
    """States of a remote engine."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    RESOLVING = "resolving"
    HELLO = "hello"
    READY = "ready"
    BACKOFF = "backoff"


_S = EngineState

ENGINE_TABLE: Table[EngineState] = Table(
    "remote engine",
    _S.UNKNOWN,
    {
        _S.UNKNOWN: {WantRequest: frozenset({_S.RESOLVING, _S.QUEUED})},
        _S.QUEUED: {
            **staying(_S.QUEUED, WantRequest),
            ev.Tick: frozenset({_S.RESOLVING, _S.BACKOFF, _S.UNKNOWN}),
        },
        _S.RESOLVING: {
            WantRequest: frozenset({_S.RESOLVING}),
            m.Directory: frozenset({_S.RESOLVING, _S.HELLO, _S.READY, _S.BACKOFF}),
            m.DirectoryRefused: frozenset({_S.BACKOFF}),
            ev.LinkLost: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.BACKOFF}),
        },
        _S.HELLO: {
            **staying(_S.HELLO, WantRequest, m.HeartbeatReply),
            m.HelloReply: frozenset({_S.HELLO, _S.READY, _S.BACKOFF}),
            ev.WarmedUp: frozenset({_S.HELLO, _S.READY, _S.BACKOFF}),
            ev.LinkLost: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.HELLO, _S.BACKOFF}),
        },
        _S.READY: {
            ev.LinkLost: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.READY, _S.BACKOFF, _S.UNKNOWN}),
            **staying(_S.READY, WantRequest, m.HeartbeatReply),
        },
        _S.BACKOFF: {
            WantRequest: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.RESOLVING, _S.QUEUED, _S.UNKNOWN}),
        },
    },
)


@dataclass(slots=True, eq=False)
class RemoteWorker:
    """One rank of a remote engine that we greeted. `alive_at` is when we sent the newest message that it has answered:
    it had not given us up then, and will not within `timeout_s`, the shorter of both sides' timeouts for silent peers.
    Its leases last `lease_s` unless they are renewed. `unanswered` has number and time of each unanswered heartbeat.
    """

    engine: RemoteEngine
    link: Link
    geometry: RankGeometry
    alive_at: float
    timeout_s: float
    answered: bool = False
    greeted_at: float = 0.0
    warm: bool = False
    incarnation: str = ""
    max_chunk_bytes: int = 0
    lease_s: float = NEVER
    num_heartbeats: int = 0
    unanswered: deque[tuple[int, float]] = field(default_factory=deque)

    def greeted_by(self, reply: m.HelloReply, now: float) -> None:
        """Record its answer to our `Hello`."""
        self.answered = True
        self.greeted_at = now
        self.incarnation = reply.incarnation
        self.max_chunk_bytes = reply.max_chunk_bytes
        self.timeout_s = m.shorter_timeout_s(self.timeout_s, reply.timeout_ms)
        self.lease_s = m.shorter_timeout_s(NEVER, reply.lease_ms)

    @property
    def deadline(self) -> float:
        """The time until which it has certainly not given us up."""
        return self.alive_at + self.timeout_s

    @property
    def silent_at(self) -> float:
        """The time at which we give it up without an answer. Its greeting may have taken longer than its timeout."""
        return max(self.alive_at, self.greeted_at) + self.timeout_s

    def heartbeat_sent(self, now: float) -> int:
        """Record that a heartbeat is sent. Returns its number."""
        self.num_heartbeats += 1
        self.unanswered.append((self.num_heartbeats, now))
        return self.num_heartbeats

    def heartbeat_answered(self, number: int) -> None:
        """Record an answer. Duplicates and answers to nothing are ignored. Unnumbered ones come in order."""
        while self.unanswered and (not number or self.unanswered[0][0] <= number):
            sent, at = self.unanswered.popleft()
            if sent == number or not number:
                self.alive_at = at
                return


def look_up(
    name: EngineAddress, ranks: Iterable[Rank], shape: EngineGeometry
) -> m.DirectoryRequest:
    """Return a request for the workers at the place of `ranks` in an engine of this shape."""
    spoken = versions.SPOKEN
    return m.DirectoryRequest(
        engine_id=name.engine_id,
        ranks=tuple(rank.global_rank(shape.tp_size) for rank in ranks),
        world_size=shape.world_size,
        oldest_version=spoken.oldest,
        newest_version=spoken.newest,
    )


def geometry_of(wanted: EngineAddress, directory: m.Directory) -> EngineGeometry:
    """Return the geometry in a directory.

    Raises:
        IncompatiblePeerError: It is another engine's.
        RemoteProtocolError: It contradicts itself.
    """
    geometry = directory.geometry.unpack()
    if geometry.engine_id != wanted.engine_id:
        raise IncompatiblePeerError(
            "another engine answers at this address",
            wanted=wanted.engine_id,
            found=geometry.engine_id,
            address=wanted.address,
        )
    ranks = [(w.pp_rank, w.tp_rank) for w in directory.workers]
    if not {*ranks} <= {rank.rank for rank in geometry.ranks}:
        raise RemoteProtocolError(
            "a directory lists other workers than its geometry",
            engine=wanted.engine_id,
            workers=ranks,
        )
    return geometry


class EngineLoads:
    """The loads from one engine that are not over and have not failed. The cost of each method does not grow with them.

    `heartbeat_queue` has the loads that heartbeats name, the next one first; the first `num_due_now` should be named at
    once. `fail_on_loss` are the loads that fail if the engine is lost, and that begin, if they wait for it, when it is
    ready.
    """

    def __init__(self) -> None:
        self.heartbeat_queue: OrderedDict[Load, None] = OrderedDict()
        self.num_due_now = 0
        self._names_bytes = 0
        self.fail_on_loss: dict[Load, None] = {}
        self._followed: dict[str, dict[Load, None]] = {}

    def add(self, load: Load) -> None:
        """Add a new load. If it is followed, a heartbeat that names it is due at once."""
        self.heartbeat_queue[load] = None
        self._names_bytes += len(load.key.transfer_id.encode())
        if load.is_followed:
            self.heartbeat_queue.move_to_end(load, last=False)
            self.num_due_now += 1
            self.fail_on_loss[load] = None
            self._followed.setdefault(load.key.transfer_id, {})[load] = None

    def remove(self, load: Load) -> None:
        """Remove a load that is over or has failed. Idempotent."""
        if load not in self.heartbeat_queue:
            return
        del self.heartbeat_queue[load]
        self._names_bytes -= len(load.key.transfer_id.encode())
        self.num_due_now = min(self.num_due_now, len(self.heartbeat_queue))
        self.fail_on_loss.pop(load, None)
        if load.is_followed:
            same = self._followed[load.key.transfer_id]
            del same[load]
            if not same:
                del self._followed[load.key.transfer_id]

    @property
    def num_heartbeats(self) -> int:
        """Number of heartbeats that name all loads. Long names need more of them."""
        # the last name of each may be the one that no longer fits
        by_bytes = self._names_bytes / (MAX_NAMED_BYTES - LONGEST_NAME_BYTES)
        return max(1, ceil(len(self.heartbeat_queue) / m.MAX_NAMED), ceil(by_bytes))

    def following(self, transfer_id: str) -> list[Load]:
        """Return the loads that follow one transfer."""
        return [*self._followed.get(transfer_id, ())]

    def take_turn(
        self, limit: int, links: Collection[int]
    ) -> tuple[tuple[m.TransferKey, ...], tuple[m.Follow, ...]]:
        """Return the next transfers that a heartbeat names, at most `limit` or `MAX_NAMED_BYTES`, and move them to the
        end: those to renew, and the followed ones of which some worker at `links` has not reported yet.
        """
        renewed: list[m.TransferKey] = []
        followed: list[m.Follow] = []
        left_bytes = MAX_NAMED_BYTES
        for _ in range(min(limit, len(self.heartbeat_queue))):
            load = next(iter(self.heartbeat_queue))
            left_bytes -= len(load.key.transfer_id.encode())
            if left_bytes < 0:
                break
            self.heartbeat_queue.move_to_end(load)
            self.num_due_now = max(0, self.num_due_now - 1)
            key = load.key
            if not load.is_followed or load.progress.keys() >= {*links}:
                renewed.append(key)
            else:
                followed.append(m.Follow(transfer_id=key.transfer_id, secret=key.secret))
        return tuple(renewed), tuple(followed)


class RemoteEngine(Tracked[EngineState]):
    """A producer engine: its address, its workers, and the `routes` on which we read from them. From its directory on,
    `row_tokens` has those of each of its cache groups. Once it is ready,
    `chunk_bytes` is the longest chunk that we and all of its workers take, and it `was_ready`, even if it is lost.

    `until` ends the present attempt or pause. A transfer last ended at `idle_since`. `has_named_ranks`: its directory
    was asked for the very workers that we need. The next heartbeat is due at `heartbeat_at`. `unsent_endings` are sent
    once it has greeted us. `reads` are those whose slots are not free yet. `loss` is the latest one.
    """

    def __init__(self, name: EngineAddress) -> None:
        super().__init__(ENGINE_TABLE, f"engine {name.engine_id} at {name.address}")
        self.name = name
        self.attempts = 0
        self.was_ready = False
        self.until = 0.0
        self.heartbeat_at = 0.0
        self.idle_since = 0.0
        self.directory_link: Link | None = None
        self.has_named_ranks = False
        self.routes: tuple[Route, ...] = ()
        self.row_tokens: tuple[int, ...] = ()
        self.chunk_bytes = 0
        self.workers: dict[Rank, RemoteWorker] = {}
        self.unsent_endings: deque[m.Done | m.Abort] = deque()
        self.loads = EngineLoads()
        self.reads: dict[int, RankRead] = {}
        self.loss: ev.EngineLost | None = None

    @property
    def num_groups(self) -> int:
        """Number of its cache groups."""
        return len(self.row_tokens)

    @property
    def is_ready(self) -> bool:
        """Returns True if it can be read from now."""
        return self.state is _S.READY

    @property
    def deadline(self) -> float:
        """The time at which a heartbeat is due, a worker or an attempt is given up, or a pause ends."""
        if self.state is _S.HELLO:
            return min(self.until, self.heartbeat_at)
        if self.state is not _S.READY:
            return self.until if self.state is not _S.UNKNOWN else NEVER
        if self.unsent_endings or self.loads.num_due_now:
            return AT_ONCE  # the next tick goes on with them
        return min([self.heartbeat_at, *[worker.silent_at for worker in self.workers.values()]])

    def heartbeat_interval_s(self, ours_s: float) -> float:
        """Return the seconds within which each transfer is named: our setting, or less, so that three heartbeats fit
        into the timeout and the leases of every worker.
        """
        times = [min(worker.timeout_s, worker.lease_s) for worker in self.workers.values()]
        return min(ours_s, max(min(times, default=NEVER) / 3, MIN_HEARTBEAT_INTERVAL_S))
