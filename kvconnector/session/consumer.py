"""The consumer's session: the loads of one worker and the engines they come from, as a pure state machine.

A load is over when every read of it is unpacked, or when one failed and nothing writes the request's blocks any more.
What the peer still sends for a stopped read is drained into staging memory and dropped, so a late chunk can never land
in blocks that belong to somebody else by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from kvconnector.config import PeerConfig
from kvconnector.errors import (
    KVConnectorError,
    LocalError,
    PeerLostError,
    RemoteProtocolError,
    TransferAbortedError,
    TransferTimeoutError,
    UnknownRequestError,
)
from kvconnector.ids import EngineAddress, Rank
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import NEVER, Command
from kvconnector.session.completion import LoadInFlight
from kvconnector.session.engines import ENGINE_EVENTS, RemoteEngines
from kvconnector.session.load import Load, LoadState
from kvconnector.session.orders import DropRequest, LoadRequest, WantRequest
from kvconnector.session.reads import OpenReads, read_message
from kvconnector.session.remote_engine import RemoteEngine
from kvconnector.topology import EngineGeometry, TpKVTopology
from kvconnector.wire import error_of
from kvconnector.wire import messages as m


class ConsumerSession:
    """All loads of one consumer worker. `handle` is the only way in; `load.py` has the table of states.

    `orders[group, family]` is what this worker unpacks fastest. `stream`: read prompts that are still computed.
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
        self._chunk_bytes = chunk_bytes
        self._stream = stream
        self._rank = rank
        self._loads: dict[str, Load] = {}
        self._progress_at = 0.0
        self._reads = OpenReads(drain_timeout_s=self._timeout_s)
        topology = TpKVTopology(geometry, rank)
        self._engines = RemoteEngines(topology, peer, self._wants, self._reads.any_at, orders)

    def handle(self, event: object, now: float) -> list[Command]:
        """What to do about `event`. The only method that changes loads and engines.

        Raises:
            LocalError: the engine asked for a load twice, or for one of an unknown request.
        """
        commands: list[Command] = []
        kind = ev.kind_of(event)
        if isinstance(event, ev.OfReceive):
            self._progress_at = now
        handler = self._HANDLERS.get(kind)
        if handler is not None:
            commands += handler(self, event, now)
        if kind in ENGINE_EVENTS:
            commands += self._tell_engines(event, now)
        return commands

    def _tell_engines(self, event: object, now: float) -> list[Command]:
        commands: list[Command] = []
        for answer in self._engines.handle(event, now):
            if isinstance(answer, (ev.EngineReady, ev.EngineLost)):
                commands += self._HANDLERS[type(answer)](self, answer, now)
            else:
                commands.append(answer)
        return commands

    def next_deadline(self) -> float | None:
        """When to send the next `Tick`, at the latest."""
        soonest = self._engines.next_deadline()
        for load in self._loads.values():
            soonest = min(soonest, load.deadline)
        for read in self._reads.values():
            soonest = min(soonest, read.deadline)
        return None if soonest == NEVER else soonest

    def in_flight(self, now: float) -> tuple[LoadInFlight, ...]:
        """The loads that are read now. Any thread may ask."""
        return tuple(
            each
            for load in list(self._loads.values())
            for each in load.trace.in_flight(load.request_id, str(self._rank), now)
        )

    def _wants(self, engine: EngineAddress) -> Iterator[m.TransferKey]:
        return (load.key for load in self._loads.values() if load.engine == engine)

    def _wanted(self, event: WantRequest, now: float) -> list[Command]:
        if event.request_id in self._loads:
            raise LocalError("a request was wanted twice", request=event.request_id)
        load = self._loads[event.request_id] = Load(event, now)
        if not load.is_followed:
            return []
        load.deadline = now + self._timeout_s
        return self._follow(load)

    def _follow(self, load: Load) -> list[Command]:
        """Ask all workers of the load's engine how far they are, if they are connected."""
        engine = self._engines.ready(load.engine) if load.is_followed else None
        follow = m.Follow(transfer_id=load.key.transfer_id, secret=load.key.secret)
        workers = engine.workers.values() if engine is not None else ()
        return [cmd.SendMessage(worker.link, follow) for worker in workers]

    def _progressed(self, event: ev.FromPeer[m.Progress], now: float) -> list[Command]:
        engine = self._engines.ready_at(event.link)
        if engine is None:
            return []
        commands: list[Command] = []
        for load in list(self._loads.values()):
            is_meant = load.engine == engine.name and load.is_followed and load.error is None
            if is_meant and load.key.transfer_id == event.message.transfer_id:
                load.accept(event, now)
                commands += self._take_progress(load, engine, event, now)
        return commands

    def _take_progress(
        self, load: Load, engine: RemoteEngine, event: ev.FromPeer[m.Progress], now: float
    ) -> list[Command]:
        assert engine.plan is not None  # it is READY
        try:
            is_news = load.hear(event.link, event.message, engine.plan.num_groups)
        except KVConnectorError as error:
            return self._fail(load, error, now)
        if load.state is LoadState.FOLLOWING and is_news:
            return self._advance(load, engine, now)
        if load.asked is not None:
            return []  # the prompt stands, which does not bring chunks that were lost
        load.deadline = now + self._timeout_s
        is_due = load.is_due(event.link, is_streamed=self._stream)
        return self._tell_begun(load) if is_due else []

    def _tell_begun(self, load: Load) -> list[Command]:
        """Let the engine ask for the load, once."""
        is_news = load.asked is None and not load.has_begun
        load.has_begun = True
        return [cmd.TellBegun(load.request_id)] if is_news else []

    def _load_asked(self, event: LoadRequest, now: float) -> list[Command]:
        load = self._loads.get(event.request_id)
        if load is None:
            raise UnknownRequestError("a load needs a wanted request", request=event.request_id)
        load.accept(event, now)
        load.asked = event
        load.trace.asked_s = now
        load.left = tuple([range(*tokens) for tokens in event.token_ranges])
        error = event.error or load.error
        if error is not None:
            return self._close(load, _ending(error), error, now)
        engine = self._engines.ready(load.engine)
        if engine is None:
            load.deadline = now + self._engines.patience_s(load.engine)
            load.move(LoadState.CONNECTING)
            return []
        return self._advance(load, engine, now)

    def _advance(self, load: Load, engine: RemoteEngine, now: float) -> list[Command]:
        """Open one read per producer rank that has something for us which was not read for yet."""
        assert engine.plan is not None  # it is READY
        links = engine.links if load.is_followed else ()
        try:
            chunk_bytes = engine.chunk_bytes(self._chunk_bytes)
            reads = load.take_ready(engine.plan, links, chunk_bytes=chunk_bytes)
            if not reads and load.is_complete(links) and not load.is_read:
                raise RemoteProtocolError("the producer has fewer tokens than are to be loaded")
        except KVConnectorError as error:
            return self._close(load, LoadState.FAILED, error, now)
        load.deadline = now + self._timeout_s
        if not reads:
            if load.is_complete(links):
                return self._close(load, LoadState.DONE, None, now)
            load.move(LoadState.FOLLOWING)
            return []
        load.move(LoadState.READING)
        return [
            self._reads.open(load, engine.workers[source.plan.source], source, now)
            for source in reads
        ]

    def _receive_posted(self, event: ev.ReceivePosted, now: float) -> list[Command]:
        read = self._reads[event.read_id]
        if read.is_stopped:
            return [cmd.DrainReceive(event.read_id, 0)]  # the peer will never hear of this read
        load = self._loads[read.request_id]
        load.accept(event, now)
        read.is_asked = load.trace.is_packed = True
        load.deadline = now + self._timeout_s
        return [cmd.SendMessage(read.link, read_message(read, event))]

    def _receive_advanced(self, event: ev.ReceiveAdvanced, now: float) -> list[Command]:
        load = self._loads.get(self._reads[event.read_id].request_id)
        if load is not None and load.state is LoadState.READING:
            load.trace.advanced(event)
            load.deadline = now + self._timeout_s
        return []

    def _receive_finished(self, event: ev.ReceiveFinished, now: float) -> list[Command]:
        read = self._reads[event.read_id]
        commands: list[Command] = []
        if not read.is_stopped and not self._engines.vouches(read.link, now):
            # this worker was paused for so long that the producer may have given it up and reused its slots
            lost = PeerLostError("this worker was silent too long")
            commands += self._tell_engines(ev.LinkLost(read.link, lost), now)
        load = self._loads[self._reads.pop(event.read_id).request_id]
        load.accept(event, now)
        load.trace.finished(event, read.link)
        del load.reads[event.read_id]
        return commands + self._after_read(load, now)

    def _receive_stopped(
        self, event: ev.ReceiveStopped | ev.ReceiveFailed, now: float
    ) -> list[Command]:
        """The data plane writes nothing more for a read that is incomplete."""
        read = self._reads[event.read_id]
        load = self._loads[read.request_id]
        load.accept(event, now)
        commands = [] if read.is_stopped else self._reads.stop(read, now)
        del load.reads[event.read_id]
        if isinstance(event, ev.ReceiveFailed) and load.state is LoadState.READING:
            event.error.context["rank"] = str(read.source.source)
            return commands + self._fail(load, event.error, now)
        return commands + self._after_read(load, now)

    def _receive_drained(self, event: ev.ReceiveDrained, now: float) -> list[Command]:
        del self._reads[event.read_id]
        return []

    def _after_read(self, load: Load, now: float) -> list[Command]:
        if load.reads:
            return []
        if load.error is not None:
            return self._close(load, _ending(load.error), load.error, now)
        if not load.is_followed:
            return self._close(load, LoadState.DONE, None, now)
        engine = self._engines.ready(load.engine)
        assert engine is not None  # its loss would be the load's error
        return self._advance(load, engine, now)

    def _waits_for_slots(self, load: Load) -> bool:
        """Whether other reads have all slots: that is no failure as long as any of them makes progress."""
        is_asking = any(self._reads[read_id].is_asked for read_id in load.reads)
        return load.state is LoadState.READING and not is_asking

    def _read_cut_short(
        self, event: ev.FromPeer[m.ReadRefused | m.ReadEnded], now: float
    ) -> list[Command]:
        said = event.message
        read = self._reads.at_peer(event.link, said.read_id)
        if read is None:
            return []
        sent_chunks = said.sent_chunks if isinstance(said, m.ReadEnded) else 0
        commands = self._reads.peer_over(read, sent_chunks, now)
        if not read.is_stopped:
            load = self._loads[read.request_id]
            load.accept(event, now)
            error = error_of(said.refusal, said.text, rank=str(read.source.source))
            commands += self._fail(load, error, now)
        return commands

    def _engine_ready(self, event: ev.EngineReady, now: float) -> list[Command]:
        engine = self._engines.ready(event.engine)
        commands: list[Command] = []
        for load in list(self._loads.values()):
            if load.engine != event.engine:
                continue
            commands += self._follow(load)
            if load.state is LoadState.CONNECTING:
                load.accept(event, now)
                assert engine is not None  # it has just told us that it is
                commands += self._advance(load, engine, now)
        return commands

    def _engine_lost(self, event: ev.EngineLost, now: float) -> list[Command]:
        """Fail what depends on the engine, and nothing else."""
        commands: list[Command] = []
        for read in list(self._reads.values()):
            if read.engine == event.engine and read.is_asked:
                commands += self._reads.peer_over(read, None, now)
        for load in list(self._loads.values()):
            is_queued = load.state is LoadState.WANTED and not load.is_followed
            if load.engine == event.engine and load.error is None and not is_queued:
                load.accept(event, now)
                commands += self._fail(load, event.error, now)
        return commands

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
        return self._close(load, LoadState.ABORTED, error, now)

    def _tick(self, event: ev.Tick, now: float) -> list[Command]:
        commands: list[Command] = []
        for read in list(self._reads.values()):
            if read.deadline <= now:
                why = "a producer rank did not end a read that was cancelled"
                commands += self._tell_engines(ev.LinkLost(read.link, PeerLostError(why)), now)
                commands += self._reads.peer_over(read, None, now)
        for load in list(self._loads.values()):
            is_waiting = load.deadline <= now and self._waits_for_slots(load)
            if is_waiting:
                load.deadline = self._progress_at + self._timeout_s
            if load.deadline > now:
                continue
            load.accept(event, now)
            lacks = "got no slots" if is_waiting else "made no progress"
            error = TransferTimeoutError(
                f"the load {lacks} before its deadline",
                request=load.request_id,
                engine=load.engine.engine_id,
                state=load.state.value,
                waiting_for=[str(rank) for rank in load.reads.values()],
            )
            commands += self._fail(load, error, now)
        return commands

    def _fail(self, load: Load, error: KVConnectorError, now: float) -> list[Command]:
        """Stop every read that is left; the load ends once none writes its blocks, and it was asked for."""
        error.context.setdefault("engine", load.engine.engine_id)
        load.error = error
        load.deadline = NEVER
        if load.asked is None:
            return self._tell_begun(load)
        commands = [
            command
            for read_id in load.reads
            if not self._reads[read_id].is_stopped
            for command in self._reads.stop(self._reads[read_id], now)
        ]
        if not load.reads:
            return commands + self._close(load, _ending(error), error, now)
        load.move(LoadState.DRAINING)
        return commands

    def _close(
        self, load: Load, state: LoadState, error: KVConnectorError | None, now: float
    ) -> list[Command]:
        """End the load: tell the engine, if it had given us blocks, and then the producer's ranks, who can wait."""
        load.move(state)
        del self._loads[load.request_id]
        kind = m.Done if state is LoadState.DONE else m.Abort
        ending = kind(transfer_id=load.key.transfer_id, secret=load.key.secret)
        commands: list[Command] = []
        if load.asked is not None:
            commands.append(cmd.FinishLoad(load.request_id, error, load.trace))
        return commands + self._engines.end_transfer(load.engine, ending, now)

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
        ev.EngineReady: _engine_ready,
        ev.EngineLost: _engine_lost,
        ev.Tick: _tick,
    }


def _ending(error: KVConnectorError) -> LoadState:
    return LoadState.ABORTED if isinstance(error, TransferAbortedError) else LoadState.FAILED
