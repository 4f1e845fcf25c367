"""The producer engines of a consumer rank: look-up, greeting, heartbeats, loss and backoff. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

from kvconnector.agenda import AT_ONCE, MAX_AT_ONCE, Agenda
from kvconnector.config import PeerConfig
from kvconnector.errors import (
    IncompatiblePeerError,
    KVConnectorError,
    PeerLostError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from kvconnector.ids import EngineAddress, Rank
from kvconnector.planning import plan_routes
from kvconnector.session import events as ev
from kvconnector.session.containment import failure_of, guarded
from kvconnector.session.link import FromPeer, Link, kind_of
from kvconnector.session.load import EngineState, RemoteEngine, RemoteWorker
from kvconnector.session.machine import Table, staying
from kvconnector.session.orders import WantRequest
from kvconnector.session.port import Ports
from kvconnector.topology import EngineGeometry, TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error, versions

FIRST_GREETING_FACTOR = 3
"""The first greeting of an engine may take longer by this factor, as the engine may be starting: eighteen workers at
once on two cores took more than 10 s.
"""

QUICK_GREETING_S = 1.0
"""Heartbeats begin this many seconds after an engine's ranks are known, greeted or not. Most greetings are quicker."""


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
            **staying(_S.HELLO, WantRequest, m.HeartbeatReply, ev.PoolsUnmapped),
            m.HelloReply: frozenset({_S.HELLO, _S.READY, _S.BACKOFF}),
            ev.WarmedUp: frozenset({_S.HELLO, _S.READY, _S.BACKOFF}),
            ev.LinkLost: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.HELLO, _S.BACKOFF}),
        },
        _S.READY: {
            ev.LinkLost: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.READY, _S.BACKOFF, _S.UNKNOWN}),
            **staying(_S.READY, WantRequest, m.HeartbeatReply, m.HelloReply, ev.PoolsUnmapped),
        },
        _S.BACKOFF: {
            WantRequest: frozenset({_S.BACKOFF}),
            ev.Tick: frozenset({_S.RESOLVING, _S.QUEUED, _S.UNKNOWN}),
        },
    },
)


class RemoteEngines:
    """All producer engines of one consumer rank.

    Heartbeats name the loads of each engine in turn and keep their leases alive. An engine without loads and reads is
    disconnected after `PeerConfig.idle_timeout_s`. The `agenda` has the deadline of each engine, for `tick`.
    `on_change` is called when an engine becomes ready or is lost.

    At most `PeerConfig.max_unknown_engines` that were never ready are greeted at a time: requests may name any address,
    and an address where nobody answers occupies descriptors until it times out. Others are queued, for as
    long as a greeting may take: first the engines that a load wants, then those that only have to be told that a
    transfer is over here, so that they free its blocks before its lease ends.
    """

    def __init__(
        self,
        topology: TpKVTopology,
        settings: PeerConfig,
        element_orders: Mapping[tuple[int, int], str],
        agenda: Agenda[Any],
        ports: Ports,
        *,
        on_change: Callable[[ev.EngineReady | ev.EngineLost, float], None],
    ) -> None:
        self._topology = topology
        self._element_orders = element_orders
        self._settings = settings
        self._links, self._engine = ports.links, ports.engine
        self._on_change = on_change
        self._engines: dict[EngineAddress, RemoteEngine] = {}
        self._link_numbers = count(1)
        self._strangers: dict[RemoteEngine, None] = {}
        """Engines that are being greeted and were never ready."""
        self._queued: OrderedDict[RemoteEngine, None] = OrderedDict()
        self._to_notify: OrderedDict[RemoteEngine, None] = OrderedDict()
        """Queued engines that no load wants, and that are told of an ending."""
        self.agenda = agenda

    def engine_of(self, name: EngineAddress) -> RemoteEngine:
        """Return the engine of this name, which may be new."""
        engine = self._engines.get(name)
        if engine is None:
            engine = self._engines[name] = RemoteEngine(ENGINE_TABLE, name)
        return engine

    def ready_at(self, link: Link) -> RemoteEngine | None:
        """Return the engine whose worker is at `link`, if it is ready to be read from."""
        worker = link.peer
        if isinstance(worker, RemoteWorker) and worker.engine.is_ready:
            return worker.engine
        return None

    def patience_s(self, engine: RemoteEngine) -> float:
        """Return the seconds that greeting an engine may take; see `config.PeerConfig.hello_timeout_s`."""
        factor = 1 if engine.was_ready else FIRST_GREETING_FACTOR
        return factor * self._settings.hello_timeout_s

    def lose_if_silent(self, engine: RemoteEngine, now: float) -> None:
        """Lose an engine that has been silent for too long, before a new request relies on it. After a pause of this
        whole process the request may come before the tick that finds out, and would fail with the older ones.
        """
        if engine.is_ready and (lost := self._found_lost(engine, now)) is not None:
            guarded(partial(self.contain, engine, now), self._lose, engine, ev.Tick(), lost, now)

    def want(self, event: WantRequest, now: float) -> None:
        """Greet the engine of a new load, unless it was greeted already."""
        engine = self.engine_of(event.engine)
        guarded(partial(self.contain, engine, now), self._want, engine, event, now)

    def _want(self, engine: RemoteEngine, event: WantRequest, now: float) -> None:
        engine.accept(event, now)
        if engine.state is EngineState.UNKNOWN:
            self._begin(engine, now)
        elif engine in self._to_notify:
            del self._to_notify[engine]
            self._queued[engine] = None
        elif engine.state is EngineState.RESOLVING:
            if now > engine.asked_at + self._settings.timeout_s:
                # a connection attempt over a broken network may keep hanging long after the network works again
                self._close(engine)
                self._ask_directory(engine, now)
        elif engine.state is EngineState.BACKOFF:
            # an engine at that address made this request's blocks, so a long pause is cut short
            engine.until = min(engine.until, now + self._settings.backoff_initial_s)
        self.agenda.plan(engine, engine.deadline)

    def handle(self, event: Any, now: float) -> None:
        """Handle an event of a link. Events of closed links are stale and change nothing. An unexpected exception ends
        the links to the engine.
        """
        peer = event.link.peer
        worker = peer if isinstance(peer, RemoteWorker) else None
        engine = peer if worker is None else worker.engine
        if not isinstance(engine, RemoteEngine):
            return
        guarded(partial(self.contain, engine, now), self._of_link, engine, worker, event, now)

    def _of_link(
        self, engine: RemoteEngine, worker: RemoteWorker | None, event: Any, now: float
    ) -> None:
        kind = kind_of(event)
        if kind is ev.LinkLost:
            self._lose(engine, event, event.error, now)
        elif (kind in (m.Directory, m.DirectoryRefused)) is not (worker is None):
            error: KVConnectorError = RemoteProtocolError(
                f"a {kind.__name__} came from the wrong peer", engine=engine.name.engine_id
            )
            self._lose(engine, ev.LinkLost(event.link, error), error, now)
        elif worker is not None:
            self._of_worker(engine, worker, event, now)
        elif kind is m.DirectoryRefused:
            refused = event.message
            self._lose(engine, event, refusal_error(refused.refusal, refused.text), now)
        else:
            self._directory(engine, event, now)
        self.agenda.plan(engine, engine.deadline)

    def tick(self, engine: RemoteEngine, event: ev.Tick, now: float) -> None:
        """Handle the deadline of an engine."""
        if now >= engine.deadline:
            guarded(partial(self.contain, engine, now), self._due, engine, event, now)
        self.agenda.plan(engine, engine.deadline)

    def contain(self, engine: RemoteEngine, now: float, error: Exception) -> None:
        """Give up an engine's links after an unexpected exception, whatever that left half done."""
        self._engine.note_contained(f"the connection to engine {engine.name.engine_id}", error)
        is_known = (
            self._engines.get(engine.name) is engine
        )  # otherwise it was idle, and is forgotten
        engine.force(EngineState.BACKOFF if is_known else EngineState.UNKNOWN, now)
        self._set_back(engine, failure_of(error), now)
        self.agenda.plan(engine, engine.deadline)

    def end_transfer(self, name: EngineAddress, ending: m.Done | m.Abort, now: float) -> None:
        """Notify every worker of the engine that a transfer is over here, now or once it has greeted us."""
        engine = self._engines.get(name)
        if engine is not None:
            guarded(partial(self.contain, engine, now), self._end_transfer, engine, ending, now)

    def _end_transfer(self, engine: RemoteEngine, ending: m.Done | m.Abort, now: float) -> None:
        engine.idle_since = now
        if engine.is_ready:
            self._send_to_all(engine, ending)
        elif engine.state in (EngineState.QUEUED, EngineState.RESOLVING, EngineState.HELLO):
            engine.unsent_endings.append(ending)
            if engine in self._queued and not engine.loads.heartbeat_queue:
                del self._queued[engine]
                self._to_notify[engine] = None

    def _send_to_all(self, engine: RemoteEngine, message: m.Message) -> None:
        for worker in engine.workers.values():
            self._links.send(worker.link, message)

    def _begin(self, engine: RemoteEngine, now: float) -> None:
        """Greet an engine, now or when its turn comes."""
        if engine.was_ready or len(self._strangers) < self._settings.max_unknown_engines:
            self._resolve(engine, now)
            return
        engine.move(EngineState.QUEUED)
        engine.until = now + self.patience_s(engine)
        self._queued[engine] = None

    def _leave_queue(self, engine: RemoteEngine) -> None:
        """Remove an engine from the queue, or give its place among the strangers being greeted to the next one."""
        self._queued.pop(engine, None)
        self._to_notify.pop(engine, None)
        if engine not in self._strangers:
            return
        del self._strangers[engine]
        if queue := self._queued or self._to_notify:
            following, _ = queue.popitem(last=False)
            self._strangers[following] = None
            following.until = AT_ONCE
            self.agenda.plan(following, following.deadline)

    def _resolve(self, engine: RemoteEngine, now: float) -> None:
        if not engine.was_ready:
            self._strangers[engine] = None
        engine.move(EngineState.RESOLVING)
        engine.until = now + self.patience_s(engine)
        self._ask_directory(engine, now)

    def _ask_directory(self, engine: RemoteEngine, now: float) -> None:
        """Ask an engine's directory for its workers. How long the engine may take in all does not change."""
        engine.asked_at = now
        link = engine.directory_link = Link(next(self._link_numbers), engine)
        engine.has_named_ranks = False
        # this guess is right for an engine like ours. Its geometry will show which ranks we really need
        ours, rank = self._topology.engine, self._topology.rank
        name = engine.name
        self._links.open_link(link, name.address, name.public_key, versions.SPOKEN.oldest)
        self._links.send(link, _look_up(name, (rank,), ours))

    def _directory(self, engine: RemoteEngine, event: FromPeer[m.Directory], now: float) -> None:
        directory = event.message
        engine.accept(event, now)
        try:
            version = versions.SPOKEN.check(directory.wire_version)
            geometry = _geometry_of(engine.name, directory)
            self._topology.check_compatible(geometry)
            holders = self._topology.holders(geometry)
            entries = {Rank(entry.pp_rank, entry.tp_rank): entry for entry in directory.workers}
            if not entries.keys() >= {*holders}:
                if engine.has_named_ranks:
                    raise RemoteProtocolError(
                        "a directory leaves out workers that it was asked for",
                        engine=engine.name.engine_id,
                        wanted=[str(rank) for rank in holders],
                    )
                engine.has_named_ranks = True
                self._links.send(event.link, _look_up(engine.name, holders, geometry))
                return
            engine.routes = plan_routes(self._topology, geometry, self._element_orders)
            engine.row_tokens = tuple(group.row_tokens for group in geometry.ranks[0].groups)
        except KVConnectorError as error:
            self._lose(engine, event, error, now)
            return
        self._close(engine)
        self._engine.log_peer_met(engine.name.engine_id, self._topology.describe(geometry))
        if not holders:  # this rank reads nothing from it, so there is nothing to wait for
            self._ready_now(engine, now)
            return
        engine.move(EngineState.HELLO)
        # greeting all of them may take longer than a lease lasts
        engine.heartbeat_at = now + QUICK_GREETING_S
        segments = {route.peer: route.segments for route in engine.routes}
        for rank in holders:
            entry, link = entries[rank], Link(next(self._link_numbers))
            theirs = geometry.rank_geometry(rank)
            worker = RemoteWorker(engine, link, theirs, now, self._settings.timeout_s)
            engine.workers[rank] = link.peer = worker
            engine.ungreeted.add(worker)
            self._links.open_link(link, entry.control_address, entry.public_key, version)
            limit = directory.max_message_bytes
            self._links.send_hello(link, segments.get(rank, ()), limit)

    def _of_worker(
        self, engine: RemoteEngine, worker: RemoteWorker, event: Any, now: float
    ) -> None:
        kind = kind_of(event)
        if kind is m.HeartbeatReply:
            engine.accept(event, now)
            worker.heartbeat_answered(event.message.number)
            return
        if kind is ev.PoolsUnmapped or (kind is m.HelloReply and worker.answered):
            self._pools_changed(engine, worker, event, now)
            return
        if engine.state is not EngineState.HELLO:
            return
        engine.accept(event, now)
        if kind is m.HelloReply:
            reply = event.message
            if reply.refusal is not None:
                self._lose(engine, event, refusal_error(reply.refusal, reply.text), now)
                return
            worker.greeted_by(reply, now)
            self._links.connect_back(worker, reply)
        elif event.error is not None:
            self._lose(engine, event, event.error, now)
            return
        else:
            worker.warm = True
        if worker.answered and worker.warm:
            engine.ungreeted.discard(worker)
        if not engine.ungreeted:
            self._ready_now(engine, now)

    def _pools_changed(
        self,
        engine: RemoteEngine,
        worker: RemoteWorker,
        event: ev.PoolsUnmapped | FromPeer[m.HelloReply],
        now: float,
    ) -> None:
        """Give up the mapping of a worker's pools if it replies again with another export, and then map that."""
        if isinstance(event, ev.PoolsUnmapped):
            engine.accept(event, now)
            # mapped already if the pools had changed once more before this event came
            if worker.export is not None and not worker.link.maps_pools:
                self._links.map_pools(worker, worker.export)
            engine.heartbeat_at = now  # the worker waits until it is told that its memory is free
            return
        reply = event.message
        if reply.refusal is None and reply.incarnation == worker.incarnation:
            engine.accept(event, now)
            if reply.export != worker.export:  # else it is a duplicate
                worker.export = reply.export
                self._links.unmap_pools(worker.link)

    def _ready_now(self, engine: RemoteEngine, now: float) -> None:
        engine.move(EngineState.READY)
        engine.was_ready = True
        self._leave_queue(engine)
        engine.attempts = 0
        engine.heartbeat_at = engine.idle_since = now
        engine.silent_at = now  # the first tick looks when that will be
        engine.loads.num_due_now = len(
            engine.loads.heartbeat_queue
        )  # the engine knows none of them yet
        self._send_endings(engine)
        self._on_change(ev.EngineReady(engine), now)

    def _send_endings(self, engine: RemoteEngine) -> None:
        for _ in range(min(MAX_AT_ONCE, len(engine.unsent_endings))):
            self._send_to_all(engine, engine.unsent_endings.popleft())

    def _due(self, engine: RemoteEngine, event: ev.Tick, now: float) -> None:
        engine.accept(event, now)
        if engine.state is EngineState.BACKOFF:
            if engine.loads.heartbeat_queue:
                self._begin(engine, now)
            else:
                self._forget(engine)
        elif engine.state is EngineState.QUEUED and not (
            engine.loads.heartbeat_queue or engine.unsent_endings
        ):
            self._forget(engine)
        elif engine in self._strangers and engine.state is EngineState.QUEUED:
            self._resolve(engine, now)
        elif not engine.is_ready and engine.until > now:
            self._heartbeats(engine, now)
        elif (lost := self._found_lost(engine, now)) is not None:
            self._lose(engine, event, lost, now)
        else:
            self._send_endings(engine)
            idle_at = max(engine.heartbeat_at, engine.idle_since + self._settings.idle_timeout_s)
            if now >= idle_at and not (engine.loads.heartbeat_queue or engine.reads):
                self._forget(engine)
            else:
                self._heartbeats(engine, now)

    def _found_lost(self, engine: RemoteEngine, now: float) -> KVConnectorError | None:
        """Return why an engine is lost: not ready by its deadline, or a worker is silent. None if it is not lost."""
        if not engine.is_ready:
            is_queued = engine.state is EngineState.QUEUED
            return PeerUnreachableError(
                "the engine could not be greeted in time: peer.max_unknown_engines others did not answer"
                if is_queued
                else "the engine did not complete the greeting in time",
                engine=engine.name.engine_id,
                address=engine.name.address,
                state=engine.state.value,
                waited_s=self.patience_s(engine),
            )
        rank = engine.find_silent(now)
        if rank is None:
            return None
        return PeerLostError(
            "a producer rank went silent",
            engine=engine.name.engine_id,
            rank=str(rank),
            timeout_s=engine.workers[rank].timeout_s,
        )

    def _heartbeats(self, engine: RemoteEngine, now: float) -> None:
        """Send a heartbeat with the next transfers to all workers. New ones are named at once, the others in turn."""
        loads = engine.loads
        limit = min(m.MAX_NAMED, loads.num_due_now)
        if engine.heartbeat_at <= now:
            limit = m.MAX_NAMED
            interval_s = engine.heartbeat_interval_s(self._settings.heartbeat_interval_s)
            engine.heartbeat_at = now + interval_s / loads.num_heartbeats
        if not limit:
            return
        # workers answer only after they have greeted us
        links = [w.link.number for w in engine.workers.values()] if engine.is_ready else []
        transfers, followed = loads.take_turn(limit, links)
        for worker in engine.workers.values():
            number = worker.heartbeat_sent(now)
            beat = m.Heartbeat(
                transfers=transfers,
                number=number,
                followed=followed,
                # whoever has no answer yet may map them while this is under way
                maps_pools=worker.link.maps_pools or not worker.answered,
            )
            self._links.send(worker.link, beat)

    def _lose(self, engine: RemoteEngine, event: Any, error: KVConnectorError, now: float) -> None:
        engine.accept(event, now)
        error.context.setdefault("engine", engine.name.engine_id)
        worker = None if isinstance(event, ev.Tick) else event.link.peer
        if isinstance(worker, RemoteWorker):
            error.context.setdefault("rank", str(worker.geometry.rank))
        engine.move(EngineState.BACKOFF)
        self._set_back(engine, error, now)

    def _set_back(self, engine: RemoteEngine, error: KVConnectorError, now: float) -> None:
        """Close an engine's links, and fail the loads that depend on it. It may be greeted again after a pause."""
        self._close(engine)
        self._leave_queue(engine)
        pause = self._settings.backoff_initial_s * 2 ** min(engine.attempts, 30)
        engine.attempts += 1
        # the engine's leases end by themselves. If it were told later, it might have been started anew, and an abort
        # would end a new request of the same name, or the read of a decode engine that has the request now
        engine.unsent_endings.clear()
        engine.until = now + min(pause, self._settings.backoff_max_s)
        engine.loss = error
        self._on_change(ev.EngineLost(engine, error), now)

    def _forget(self, engine: RemoteEngine) -> None:
        """Disconnect an engine that no load wants. The next request greets it anew."""
        engine.move(EngineState.UNKNOWN)
        self._leave_queue(engine)
        del self._engines[engine.name]
        self.agenda.forget(engine)
        self._close(engine)

    def _close(self, engine: RemoteEngine) -> None:
        """Close every link of the engine."""
        links = [worker.link for worker in engine.workers.values()]
        if engine.directory_link is not None:
            links.insert(0, engine.directory_link)
        # listed until they are closed: an exception in between must not leave one open
        for link in links:
            link.peer = None
            self._links.close_link(link)
        engine.workers = {}
        engine.ungreeted = set()
        engine.directory_link = None


def _look_up(
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


def _geometry_of(wanted: EngineAddress, directory: m.Directory) -> EngineGeometry:
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
            "a directory's list of workers does not match its geometry",
            engine=wanted.engine_id,
            workers=ranks,
        )
    return geometry
