"""Producer engines that a consumer rank talks to: look-up, greeting, heartbeats, loss and backoff. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from math import ceil
from typing import Any

from kvconnector.config import PeerConfig
from kvconnector.errors import (
    KVConnectorError,
    PeerLostError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from kvconnector.ids import EngineAddress, Rank
from kvconnector.planning import plan_routes
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.agenda import MAX_AT_ONCE, Agenda
from kvconnector.session.commands import Command, LinkId
from kvconnector.session.orders import WantRequest
from kvconnector.session.remote_engine import (
    EngineState,
    RemoteEngine,
    RemoteWorker,
    geometry_of,
    look_up,
)
from kvconnector.topology import TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error, versions

FIRST_GREETING_FACTOR = 3
"""An engine that was not met before may be starting: eighteen workers at once on two cores took more than 10 s."""

QUICK_GREETING_S = 1.0
"""Heartbeats begin this long after an engine's ranks are known, greeted or not: most greetings are quicker."""


class RemoteEngines:
    """All producer engines of one consumer rank.

    Heartbeats name the loads of each engine in turn, and keep their leases alive. An engine without loads and reads is
    disconnected after `PeerConfig.idle_timeout_s`. Each is in the `agenda`, for `tick`. What `on_change` returns is
    carried out after an engine's own commands.
    """

    def __init__(
        self,
        topology: TpKVTopology,
        settings: PeerConfig,
        orders: Mapping[tuple[int, int], str],
        agenda: Agenda[Any],
        *,
        on_change: Callable[[ev.EngineReady | ev.EngineLost, float], list[Command]],
    ) -> None:
        self._topology = topology
        self._orders = orders
        self._settings = settings
        self._on_change = on_change
        self._engines: dict[EngineAddress, RemoteEngine] = {}
        self._by_link: dict[LinkId, tuple[RemoteEngine, RemoteWorker | None]] = {}
        self._link_numbers = count(1)
        self.agenda = agenda
        self._met: set[EngineAddress] = set()

    def engine_of(self, name: EngineAddress) -> RemoteEngine:
        """The engine of this name; a new one unless it is known."""
        engine = self._engines.get(name)
        if engine is None:
            engine = self._engines[name] = RemoteEngine(name)
        return engine

    def ready_at(self, link: LinkId) -> RemoteEngine | None:
        """The engine whose worker is at `link`, if it can be read from now."""
        engine, _ = self._by_link.get(link, (None, None))
        return engine if engine is not None and engine.is_ready else None

    def patience_s(self, name: EngineAddress) -> float:
        """Seconds that greeting an engine may take; see `config.PeerConfig.hello_timeout_s`."""
        factor = 1 if name in self._met else FIRST_GREETING_FACTOR
        return factor * self._settings.hello_timeout_s

    def want(self, event: WantRequest, now: float) -> list[Command]:
        """Return the commands for a new load, which has been added to its engine."""
        engine = self.engine_of(event.engine)
        engine.accept(event, now)
        commands: list[Command] = []
        if engine.state is EngineState.UNKNOWN:
            commands = self._resolve(engine, now)
        elif engine.state is EngineState.RESOLVING:
            asked_at = engine.until - self.patience_s(engine.name)
            if now > asked_at + self._settings.timeout_s:
                # a connection that was begun over a broken link may hang for long after the link is whole again
                commands = [*self._close(engine), *self._resolve(engine, now)]
        elif engine.state is EngineState.BACKOFF:
            # somebody at that address made this request's blocks, so a long pause is cut short
            engine.until = min(engine.until, now + self._settings.backoff_initial_s)
        return self._planned(engine, commands)

    def handle(self, event: Any, now: float) -> list[Command]:
        """Return the commands for an event of a link; those of links that were closed are stale and have none."""
        if event.link not in self._by_link:
            return []
        engine, worker = self._by_link[event.link]
        kind = ev.kind_of(event)
        if kind is ev.LinkLost:
            commands = self._lose(engine, event, event.error, now)
        elif (kind in (m.Directory, m.DirectoryRefused)) is not (worker is None):
            error: KVConnectorError = RemoteProtocolError(
                f"a {kind.__name__} came from the wrong peer", engine=engine.name.engine_id
            )
            commands = self._lose(engine, ev.LinkLost(event.link, error), error, now)
        elif worker is not None:
            commands = self._of_worker(engine, worker, event, now)
        elif kind is m.DirectoryRefused:
            refused = event.message
            error = refusal_error(refused.refusal, refused.text)
            commands = self._lose(engine, event, error, now)
        else:
            commands = self._directory(engine, event, now)
        return self._planned(engine, commands)

    def tick(self, engine: RemoteEngine, event: ev.Tick, now: float) -> list[Command]:
        """Return the commands for an engine that the agenda named."""
        return self._planned(engine, self._tick(engine, event, now))

    def _planned(self, engine: RemoteEngine, commands: list[Command]) -> list[Command]:
        self.agenda.plan(engine, engine.deadline)
        return commands

    def end_transfer(
        self, name: EngineAddress, ending: m.Done | m.Abort, now: float
    ) -> list[Command]:
        """Tell every worker of the engine that we are done with a transfer: now, or once it has greeted us."""
        engine = self._engines.get(name)
        if engine is None:
            return []
        engine.idle_since = now
        if engine.is_ready:
            return engine.send_all(ending)
        if engine.state in (EngineState.RESOLVING, EngineState.HELLO):
            engine.unsent_endings.append(ending)
        return []

    def _resolve(self, engine: RemoteEngine, now: float) -> list[Command]:
        engine.move(EngineState.RESOLVING)
        engine.until = now + self.patience_s(engine.name)
        link = engine.directory_link = LinkId(next(self._link_numbers))
        self._by_link[link] = engine, None
        engine.has_named_ranks = False
        # a guess, right for an engine like ours: only its geometry shows which ranks of a large engine we need
        ours, rank = self._topology.engine, self._topology.rank
        replica = Rank(rank.pp_rank, self._topology.replica_index % ours.tp_size)
        request = look_up(engine.name, (rank, replica), ours)
        return [
            cmd.OpenLink(link, engine.name.address, engine.name.public_key, versions.SPOKEN.oldest),
            cmd.SendMessage(link, request),
        ]

    def _directory(
        self, engine: RemoteEngine, event: ev.FromPeer[m.Directory], now: float
    ) -> list[Command]:
        directory = event.message
        engine.accept(event, now)
        try:
            version = versions.SPOKEN.check(directory.wire_version)
            geometry = geometry_of(engine.name, directory)
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
                return [cmd.SendMessage(event.link, look_up(engine.name, holders, geometry))]
            engine.routes = plan_routes(self._topology, geometry, self._orders)
        except KVConnectorError as error:
            return self._lose(engine, event, error, now)
        summary = self._topology.describe(geometry)
        commands: list[Command] = [
            *self._close(engine),
            cmd.LogEngine(engine.name.engine_id, summary),
        ]
        if not holders:  # this rank holds nothing, so nobody waits for it either
            return [*commands, *self._ready_now(engine, now)]
        engine.move(EngineState.HELLO)
        # greeting all of them may take longer than a lease lasts
        engine.heartbeat_at = now + QUICK_GREETING_S
        segments = {route.peer: route.segments for route in engine.routes}
        for rank in holders:
            entry, link = entries[rank], LinkId(next(self._link_numbers))
            theirs = geometry.rank_geometry(rank)
            worker = RemoteWorker(link, theirs, now, self._settings.timeout_s)
            self._by_link[link] = engine, worker
            engine.workers[rank] = worker
            commands += (
                cmd.OpenLink(link, entry.control_address, entry.public_key, version),
                cmd.ExpectWarmUp(link, segments.get(rank, ())),
            )
        return commands

    def _of_worker(
        self, engine: RemoteEngine, worker: RemoteWorker, event: Any, now: float
    ) -> list[Command]:
        kind = ev.kind_of(event)
        if kind is m.HeartbeatReply:
            engine.accept(event, now)
            worker.heartbeat_answered(event.message.number)
            return []
        is_repeated = kind is m.HelloReply and worker.answered
        if engine.state is not EngineState.HELLO or is_repeated:
            return []
        engine.accept(event, now)
        commands: list[Command] = []
        if kind is m.HelloReply:
            reply = event.message
            if reply.refusal is not None:
                return self._lose(engine, event, refusal_error(reply.refusal, reply.text), now)
            worker.greeted_by(reply, now)
            name = engine.name.engine_id
            commands.append(cmd.TakeReply(worker.link, name, worker.geometry, reply))
        elif event.error is not None:
            return self._lose(engine, event, event.error, now)
        else:
            worker.warm = True
        if all(w.answered and w.warm for w in engine.workers.values()):
            commands += self._ready_now(engine, now)
        return commands

    def _ready_now(self, engine: RemoteEngine, now: float) -> list[Command]:
        engine.move(EngineState.READY)
        self._met.add(engine.name)
        engine.attempts = 0
        engine.heartbeat_at = engine.idle_since = now
        engine.loads.num_unnamed = len(engine.loads.turns)  # it knows none of them yet
        ready = self._on_change(ev.EngineReady(engine), now)
        return [*self._send_endings(engine), *ready]

    def _send_endings(self, engine: RemoteEngine) -> list[Command]:
        endings = engine.unsent_endings
        some = [endings.popleft() for _ in range(min(MAX_AT_ONCE, len(endings)))]
        return [command for ending in some for command in engine.send_all(ending)]

    def _tick(self, engine: RemoteEngine, event: ev.Tick, now: float) -> list[Command]:
        if now < engine.deadline:
            return []
        engine.accept(event, now)
        if engine.state is EngineState.BACKOFF:
            return self._resolve(engine, now) if engine.loads.turns else self._forget(engine)
        if not engine.is_ready:
            if engine.until > now:
                return self._heartbeats(engine, now)
            error: KVConnectorError = PeerUnreachableError(
                "the engine did not complete the handshake in time",
                engine=engine.name.engine_id,
                address=engine.name.address,
                state=engine.state.value,
                waited_s=self.patience_s(engine.name),
            )
            return self._lose(engine, event, error, now)
        for rank, worker in engine.workers.items():
            if worker.silent_at <= now:
                error = PeerLostError(
                    "a producer rank went silent",
                    engine=engine.name.engine_id,
                    rank=str(rank),
                    timeout_s=worker.timeout_s,
                )
                return self._lose(engine, event, error, now)
        endings = self._send_endings(engine)
        is_idle = now >= max(engine.heartbeat_at, engine.idle_since + self._settings.idle_timeout_s)
        if is_idle and not (engine.loads.turns or engine.reads):
            return [*endings, *self._forget(engine)]
        return [*endings, *self._heartbeats(engine, now)]

    def _heartbeats(self, engine: RemoteEngine, now: float) -> list[Command]:
        """Name the transfers whose turn it is to all workers. Each is named within an interval, new ones at once."""
        loads = engine.loads
        limit = min(m.MAX_NAMED, loads.num_unnamed)
        if engine.heartbeat_at <= now:
            limit = m.MAX_NAMED
            interval_s = engine.heartbeat_interval_s(self._settings.heartbeat_interval_s)
            num_heartbeats = ceil(len(loads.turns) / m.MAX_NAMED)
            engine.heartbeat_at = now + interval_s / max(1, num_heartbeats)
        if not limit:
            return []
        # only a worker that has greeted us answers
        links = [w.link for w in engine.workers.values()] if engine.is_ready else []
        transfers, followed = loads.take_turn(limit, links)
        return [
            cmd.SendMessage(
                worker.link,
                m.Heartbeat(
                    transfers=transfers, number=worker.heartbeat_sent(now), followed=followed
                ),
            )
            for worker in engine.workers.values()
        ]

    def _lose(
        self, engine: RemoteEngine, event: object, error: KVConnectorError, now: float
    ) -> list[Command]:
        engine.accept(event, now)
        _, worker = self._by_link.get(getattr(event, "link", LinkId(0)), (None, None))
        error.context.setdefault("engine", engine.name.engine_id)
        if worker is not None:
            error.context.setdefault("rank", str(worker.geometry.rank))
        commands = self._close(engine)
        pause = self._settings.backoff_initial_s * 2 ** min(engine.attempts, 30)
        engine.attempts += 1
        engine.unsent_endings.clear()  # its leases end by themselves
        engine.until = now + min(pause, self._settings.backoff_max_s)
        engine.move(EngineState.BACKOFF)
        engine.loss = ev.EngineLost(engine, error)
        return [*commands, *self._on_change(engine.loss, now)]

    def _forget(self, engine: RemoteEngine) -> list[Command]:
        """Nobody wants the engine: the next request greets it as any other."""
        engine.move(EngineState.UNKNOWN)
        del self._engines[engine.name]
        self.agenda.forget(engine)
        return self._close(engine)

    def _close(self, engine: RemoteEngine) -> list[Command]:
        """Close every link of the engine."""
        links = [worker.link for worker in engine.workers.values()]
        if engine.directory_link is not None:
            links.insert(0, engine.directory_link)
        for link in links:
            del self._by_link[link]
        engine.workers = {}
        engine.directory_link = None
        return [cmd.CloseLink(link) for link in links]
