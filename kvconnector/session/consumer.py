"""The consumer's session: the loads of one worker and the engines they come from, as a pure state machine.

A load is over when every read of it is unpacked, or when one failed and nothing writes the request's blocks any more.
What the peer still sends for a stopped read is drained into staging memory and dropped, so a late chunk can never land
in blocks that belong to another request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from kvconnector.config import PeerConfig
from kvconnector.errors import (
    KVConnectorError,
    LocalError,
    PeerLostError,
    RemoteProtocolError,
    TransferAbortedError,
    UnknownRequestError,
)
from kvconnector.ids import Rank
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.agenda import AT_ONCE, MAX_AT_ONCE, Agenda
from kvconnector.session.commands import NEVER, Command, LinkId
from kvconnector.session.completion import LoadInFlight
from kvconnector.session.engines import RemoteEngines
from kvconnector.session.load import Load, LoadState
from kvconnector.session.orders import DropRequest, LoadRequest, WantRequest
from kvconnector.session.reads import OpenReads, read_message
from kvconnector.session.remote_engine import RemoteEngine
from kvconnector.topology import EngineGeometry, TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error


class ConsumerSession:
    """All loads of one consumer worker. `handle` is the only way in; `load.py` has the table of states.

    `orders[group, family]` is what this worker unpacks fastest. `stream`: read prompts that are still computed. The
    next `Tick` is to come by `next_deadline()`, which may be early where something has moved away since the last.
    """

    def __init__(
        self,
        geometry: EngineGeometry,
        rank: Rank,
        peer: PeerConfig,
        *,
        chunk_bytes: int,
        orders: Mapping[tuple[int, int], str],
        stream: bool = True,
    ) -> None:
        self._timeout_s = peer.transfer_timeout_s
        self._progress_timeout_s = peer.progress_timeout_s
        self._chunk_bytes = chunk_bytes
        self._stream = stream
        self._rank = rank
        self._num_groups = geometry.num_groups
        self._loads: dict[str, Load] = {}
        self._asked: dict[str, Load] = {}
        self._agenda: Agenda[Load | cmd.StartReceive | RemoteEngine | ConsumerSession] = Agenda()
        self.next_deadline = self._agenda.next_deadline
        self._backlog: deque[tuple[ev.EngineReady | ev.EngineLost, Iterator[Load]]] = deque()
        self._progress_at = 0.0
        self._reads = OpenReads(self._agenda, drain_timeout_s=self._timeout_s)
        topology = TpKVTopology(geometry, rank)
        self._engines = RemoteEngines(
            topology, peer, orders, self._agenda, on_change=self._engine_changed
        )

    def handle(self, event: object, now: float) -> list[Command]:
        """Return the commands for `event`. The only method that changes loads and engines.

        Raises:
            LocalError: the engine asked for a load twice, or for one of an unknown request.
        """
        commands: list[Command] = []
        if isinstance(event, ev.OfReceive):
            self._progress_at = now
            commands += self._fail_if_lost(self._reads[event.read_id], now)
        handler = self._HANDLERS.get(ev.kind_of(event))
        if handler is None:  # it is about a link
            return self._engines.handle(event, now)
        return commands + handler(self, event, now)

    def in_flight(self, now: float) -> tuple[LoadInFlight, ...]:
        """The loads that are read now. Any thread may ask."""
        rank, asked = str(self._rank), list(self._asked.values())
        begun = [load for load in asked if load.trace.first_read_s is not None]
        return tuple([load.in_flight(rank, now) for load in begun])

    def _give_until(self, load: Load, deadline: float) -> None:
        """Give a load up at `deadline`, unless something happens before."""
        load.deadline = deadline
        self._agenda.plan(load, deadline)

    def _wanted(self, event: WantRequest, now: float) -> list[Command]:
        if event.request_id in self._loads:
            raise LocalError("a request was wanted twice", request=event.request_id)
        load = Load(event, self._engines.engine_of(event.engine), now)
        self._loads[load.request_id] = load
        load.engine.loads.add(load)
        if load.is_followed:
            self._give_until(load, now + self._progress_timeout_s)
        return self._engines.want(event, now)

    def _progressed(self, event: ev.FromPeer[m.Progress], now: float) -> list[Command]:
        engine = self._engines.ready_at(event.link)
        loads = [] if engine is None else engine.loads.following(event.message.transfer_id)
        commands: list[Command] = []
        for load in loads:
            load.accept(event, now)
            commands += self._take_report(load, event, now)
        return commands

    def _take_report(self, load: Load, event: ev.FromPeer[m.Progress], now: float) -> list[Command]:
        try:
            is_new = load.record_progress(event.link, event.message, self._num_groups)
        except KVConnectorError as error:
            return self._fail(load, error, now)
        if not is_new:
            return []
        if load.state is LoadState.FOLLOWING:
            return self._advance(load, now)
        if load.asked is not None:
            return []  # progress of the prompt does not bring chunks that were lost
        self._give_until(load, now + self._progress_timeout_s)
        should_notify = load.should_notify(event.link, is_streamed=self._stream)
        return self._notify_prefill_started(load) if should_notify else []

    def _notify_prefill_started(self, load: Load) -> list[Command]:
        """Let the engine ask for the load, once."""
        is_first = load.asked is None and not load.has_begun
        load.has_begun = True
        return [cmd.NotifyPrefillStarted(load.request_id)] if is_first else []

    def _load_asked(self, event: LoadRequest, now: float) -> list[Command]:
        load = self._loads.get(event.request_id)
        if load is None:
            raise UnknownRequestError("a load needs a wanted request", request=event.request_id)
        load.accept(event, now)
        error = load.ask(event, now)
        if error is not None:
            return self._close(load, error, now)
        self._asked[load.request_id] = load
        loads = load.engine.loads
        loads.depending[load] = None
        if load.engine.is_ready:
            return self._advance(load, now)
        loads.connecting[load] = None
        self._give_until(load, now + self._engines.patience_s(load.engine.name))
        load.move(LoadState.CONNECTING)
        return []

    def _advance(self, load: Load, now: float) -> list[Command]:
        """Open one read per rank of the ready producer that has something for us which was not read for yet."""
        engine = load.engine
        links = [worker.link for worker in engine.workers.values()] if load.is_followed else []
        try:
            chunk_bytes = engine.chunk_bytes(self._chunk_bytes)
            reads = load.take_ready(engine.routes, links, chunk_bytes=chunk_bytes)
            if not reads and load.is_complete(links) and not load.is_read:
                raise RemoteProtocolError("the producer has fewer tokens than are to be loaded")
        except KVConnectorError as error:
            return self._close(load, error, now)
        if not reads:
            if load.is_complete(links):
                return self._close(load, None, now)
            # where one rank has computed all of the prompt, the others are about to report that
            is_ending = any(each.is_complete for each in load.progress.values())
            patience_s = self._timeout_s if is_ending else self._progress_timeout_s
            self._give_until(load, now + patience_s)
            load.move(LoadState.FOLLOWING)
            return []
        self._give_until(load, now + self._timeout_s)
        load.move(LoadState.READING)
        return [self._reads.open(load, source, now) for source in reads]

    def _receive_posted(self, event: ev.ReceivePosted, now: float) -> list[Command]:
        read = self._reads[event.read_id]
        if read.is_stopped:  # the peer will never know of this read
            return [cmd.DrainReceive(event.read_id, None if read.is_peer_over else 0)]
        load = read.load
        load.accept(event, now)
        read.is_asked = load.trace.is_packed = True
        self._give_until(load, now + self._timeout_s)
        return [cmd.SendMessage(read.link, read_message(read, event))]

    def _receive_advanced(self, event: ev.ReceiveAdvanced, now: float) -> list[Command]:
        read = self._reads[event.read_id]
        if read.load.state is LoadState.READING:
            read.share = event.share
            self._give_until(read.load, now + self._timeout_s)
        return []

    def _receive_finished(self, event: ev.ReceiveFinished, now: float) -> list[Command]:
        commands: list[Command] = []
        read = self._reads[event.read_id]
        if not read.is_stopped and now >= read.worker.deadline:
            # this worker was paused longer than its timeout: the producer may have given it up and reused its slots
            lost = PeerLostError("this worker was silent too long")
            commands += self._lose(read.link, lost, now)
            commands += self._fail_if_lost(read, now)
        load = self._reads.close(event.read_id).load
        load.accept(event, now)
        del load.reads[event.read_id]
        load.trace.finished(event, read.source.total_bytes, read.link)
        return commands + self._after_read(load, now)

    def _receive_stopped(
        self, event: ev.ReceiveStopped | ev.ReceiveFailed, now: float
    ) -> list[Command]:
        """The data plane writes nothing more for a read that is incomplete."""
        read = self._reads[event.read_id]
        load = read.load
        load.accept(event, now)
        commands = self._reads.stop(read, now)
        del load.reads[event.read_id]
        if isinstance(event, ev.ReceiveFailed) and load.state is LoadState.READING:
            event.error.context["rank"] = str(read.source.source)
            return commands + self._fail(load, event.error, now)
        return commands + self._after_read(load, now)

    def _receive_drained(self, event: ev.ReceiveDrained, now: float) -> list[Command]:
        self._reads.close(event.read_id)
        return []

    def _after_read(self, load: Load, now: float) -> list[Command]:
        if load.reads:
            return []
        if load.error is not None or not load.is_followed:
            return self._close(load, load.error, now)
        load.note_filled()
        return self._advance(load, now)  # the loss of its engine would be the load's error

    def _read_cut_short(
        self, event: ev.FromPeer[m.ReadRefused | m.ReadEnded], now: float
    ) -> list[Command]:
        ended = event.message
        read = self._reads.at_peer(event.link, ended.read_id)
        if read is None:
            return []
        sent_chunks = ended.sent_chunks if isinstance(ended, m.ReadEnded) else 0
        commands = self._reads.peer_over(read, sent_chunks, now)
        if not read.is_stopped:
            read.load.accept(event, now)
            error = refusal_error(ended.refusal, ended.text, rank=str(read.source.source))
            commands += self._fail(read.load, error, now)
        return commands

    def _engine_changed(self, event: ev.EngineReady | ev.EngineLost, now: float) -> list[Command]:
        """Begin what waits for an engine that is ready, or fail what depends on one that is lost."""
        engine, commands = event.engine, []
        begin, engine.loads.connecting = engine.loads.connecting, {}
        if isinstance(event, ev.EngineReady):
            self._backlog.append((event, iter(begin)))
            return self._work_off(now)
        fail, engine.loads.depending = engine.loads.depending, {}
        self._backlog.append((event, iter(fail)))
        for read in engine.reads.values():
            read.is_peer_over = True
        for read in engine.reads.values():
            if read.is_asked:  # no more than there are slots
                commands += self._fail_if_lost(read, now)
                commands += self._reads.peer_over(read, None, now)
        return commands + self._work_off(now)

    def _fail_if_lost(self, read: cmd.StartReceive, now: float) -> list[Command]:
        """Fail a load before its turn whose engine was lost, since something happens to its read."""
        lost = read.load.engine.loss
        if lost is None or not read.is_peer_over or read.is_stopped:
            return []
        read.load.accept(lost, now)
        return self._fail(read.load, lost.error, now)

    def _work_off(self, now: float) -> list[Command]:
        """Begin or fail some of the loads whose engine is ready, or lost: there may be thousands of them."""
        commands: list[Command] = []
        left = MAX_AT_ONCE
        while self._backlog and left:
            event, loads = self._backlog[0]
            load = next(loads, None)
            if load is None:
                self._backlog.popleft()
                continue
            left -= 1
            if load not in load.engine.loads.turns:
                continue  # it has ended in the meantime
            if isinstance(event, ev.EngineLost):
                load.accept(event, now)
                commands += self._fail(load, event.error, now)
            elif load.engine.is_ready and load.state is LoadState.CONNECTING:
                load.accept(event, now)
                commands += self._advance(load, now)
        if self._backlog:
            self._agenda.plan(self, AT_ONCE)
        return commands

    def _lose(self, link: LinkId, error: KVConnectorError, now: float) -> list[Command]:
        """Give the engine at `link` up."""
        return self._engines.handle(ev.LinkLost(link, error), now)

    def _withdrawn(self, event: DropRequest, now: float) -> list[Command]:
        load = self._loads.get(event.request_id)
        if load is None:
            return []  # it finished in the meantime
        load.accept(event, now)
        error = TransferAbortedError("the request was aborted here", request=load.request_id)
        if load.state is LoadState.READING:
            return self._fail(load, error, now)
        if load.state is LoadState.DRAINING:
            return []
        return self._close(load, error, now)

    def _tick(self, event: ev.Tick, now: float) -> list[Command]:
        commands: list[Command] = []
        for thing in self._agenda.due(now):
            if isinstance(thing, Load):
                commands += self._load_due(thing, event, now)
            elif isinstance(thing, cmd.StartReceive):
                commands += self._read_due(thing, now)
            elif isinstance(thing, RemoteEngine):
                commands += self._engines.tick(thing, event, now)
            else:
                commands += self._work_off(now)
        return commands

    def _read_due(self, read: cmd.StartReceive, now: float) -> list[Command]:
        """Lose a peer that did not end a cancelled read in time."""
        if read.deadline > now:
            self._agenda.plan(read, read.deadline)
            return []
        lost = PeerLostError("a producer rank did not end a read that was cancelled")
        return self._lose(read.link, lost, now) + self._reads.peer_over(read, None, now)

    def _load_due(self, load: Load, event: ev.Tick, now: float) -> list[Command]:
        """Give a load up whose deadline has passed."""
        is_asking = any(read.is_asked for read in load.reads.values())
        is_waiting = load.state is LoadState.READING and load.deadline <= now and not is_asking
        if is_waiting:  # other reads have all slots: no failure while any of them makes progress
            load.deadline = self._progress_at + self._timeout_s
        if load.deadline > now:
            self._give_until(load, load.deadline)
            return []
        load.accept(event, now)
        return self._fail(load, load.timeout_error(waits_for_slots=is_waiting), now)

    def _fail(self, load: Load, error: KVConnectorError, now: float) -> list[Command]:
        """Stop every read that is left; the load ends once none writes its blocks, and it was asked for."""
        error.context.setdefault("engine", load.engine.name.engine_id)
        load.error = error
        load.deadline = NEVER
        self._agenda.forget(load)
        load.engine.loads.give_up(load)
        if load.asked is None:
            return self._notify_prefill_started(load)
        commands = [c for read in load.reads.values() for c in self._reads.stop(read, now)]
        if not load.reads:
            return commands + self._close(load, error, now)
        load.move(LoadState.DRAINING)
        return commands

    def _close(self, load: Load, error: KVConnectorError | None, now: float) -> list[Command]:
        """End the load: report it to the engine, if it asked for it, then to the producer's ranks, which can wait."""
        ending = load.end(error)
        self._agenda.forget(load)
        load.engine.loads.give_up(load)
        self._asked.pop(load.request_id, None)
        del self._loads[load.request_id]
        commands: list[Command] = []
        if load.asked is not None:
            commands.append(load.finished(error))
        return commands + self._engines.end_transfer(load.engine.name, ending, now)

    _HANDLERS: ClassVar[dict[type, Callable[..., list[Command]]]] = {
        WantRequest: _wanted,
        LoadRequest: _load_asked,
        DropRequest: _withdrawn,
        m.Progress: _progressed,
        ev.ReceivePosted: _receive_posted,
        ev.ReceiveAdvanced: _receive_advanced,
        ev.ReceiveFinished: _receive_finished,
        ev.ReceiveStopped: _receive_stopped,
        ev.ReceiveFailed: _receive_stopped,
        ev.ReceiveDrained: _receive_drained,
        m.ReadRefused: _read_cut_short,
        m.ReadEnded: _read_cut_short,
        ev.Tick: _tick,
    }
