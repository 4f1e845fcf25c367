"""The consumer's session: the loads of one worker and the engines they come from, as a pure state machine.

A load is over when all of its reads have finished, or when one failed and nothing writes the request's blocks any more.
Chunks that the peer still sends for a stopped read are drained into staging memory and dropped, so a late chunk never
lands in blocks that belong to another request.
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
from kvconnector.session import events as ev
from kvconnector.session.agenda import AT_ONCE, MAX_AT_ONCE, Agenda
from kvconnector.session.completion import LoadInFlight
from kvconnector.session.engines import RemoteEngines
from kvconnector.session.link import Link
from kvconnector.session.load import Load, LoadState
from kvconnector.session.orders import DropRequest, LoadRequest, WantRequest
from kvconnector.session.port import NEVER, Port
from kvconnector.session.reads import RankRead, Reads
from kvconnector.session.remote_engine import RemoteEngine
from kvconnector.topology import EngineGeometry, TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error


class ConsumerSession:
    """All loads of one consumer worker. `handle` is the only way in; `load.py` has the table of states.

    `orders[group, family]` is the order in which this worker unpacks a segment fastest. `stream`: read prompts that are
    still being computed. The next `Tick` must come by `next_deadline()`, which may be earlier than anything is due.
    """

    def __init__(
        self,
        geometry: EngineGeometry,
        rank: Rank,
        peer: PeerConfig,
        port: Port,
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
        self._loads: dict[str, Load] = {}
        self._asked: dict[str, Load] = {}
        self._agenda: Agenda[Load | RankRead | RemoteEngine | ConsumerSession] = Agenda()
        self.next_deadline = self._agenda.next_deadline
        self._backlog: deque[tuple[ev.EngineReady | ev.EngineLost, Iterator[Load]]] = deque()
        self._progress_at = 0.0
        self._port = port
        self._reads = Reads(port, self._agenda, drain_timeout_s=self._timeout_s)
        topology = TpKVTopology(geometry, rank)
        self._engines = RemoteEngines(
            topology, peer, orders, self._agenda, port, on_change=self._engine_changed
        )

    def handle(self, event: object, now: float) -> None:
        """Handle an event. No other method changes loads and engines.

        Raises:
            LocalError: the engine asked for a load twice, or for a load of an unknown request.
        """
        if isinstance(event, ev.OfReceive):
            self._progress_at = now
            self._fail_if_lost(event.read, now)
        handler = self._HANDLERS.get(ev.kind_of(event))
        if handler is None:  # the event concerns a link
            self._engines.handle(event, now)
        else:
            handler(self, event, now)

    def in_flight(self, now: float) -> tuple[LoadInFlight, ...]:
        """Return the loads that are being read. Any thread may call this."""
        rank, asked = str(self._rank), list(self._asked.values())
        begun = [load for load in asked if load.trace.first_read_s is not None]
        return tuple([load.in_flight(rank, now) for load in begun])

    def _give_until(self, load: Load, deadline: float) -> None:
        """Give up a load at `deadline`, unless it makes progress before."""
        load.deadline = deadline
        self._agenda.plan(load, deadline)

    def _wanted(self, event: WantRequest, now: float) -> None:
        if event.request_id in self._loads:
            raise LocalError("a request was wanted twice", request=event.request_id)
        load = Load(event, self._engines.engine_of(event.engine), now)
        self._loads[load.request_id] = load
        load.engine.loads.add(load)
        if load.is_followed:
            self._give_until(load, now + self._progress_timeout_s)
        self._engines.want(event, now)

    def _progressed(self, event: ev.FromPeer[m.Progress], now: float) -> None:
        engine = self._engines.ready_at(event.link)
        loads = () if engine is None else engine.loads.following(event.message.transfer_id)
        for load in loads:
            if event.message.secret in ("", load.key.secret):
                load.accept(event, now)
                self._take_report(load, event, now)

    def _take_report(self, load: Load, event: ev.FromPeer[m.Progress], now: float) -> None:
        try:
            is_new = load.record_progress(event.link.number, event.message)
        except KVConnectorError as error:
            self._fail(load, error, now)
            return
        if not is_new:
            return
        if load.state is LoadState.FOLLOWING:
            self._advance(load, now)
        elif load.asked is None:  # a growing prompt does not mean that the chunks of a read arrive
            self._give_until(load, now + self._progress_timeout_s)
            if load.should_notify(event.link.number, is_streamed=self._stream):
                self._notify_prefill_started(load)

    def _notify_prefill_started(self, load: Load) -> None:
        """Report once that the engine may ask for the load."""
        is_first = load.asked is None and not load.has_begun
        load.has_begun = True
        if is_first:
            self._port.begun(load.request_id)

    def _load_asked(self, event: LoadRequest, now: float) -> None:
        load = self._loads.get(event.request_id)
        if load is None:
            raise UnknownRequestError("a load needs a wanted request", request=event.request_id)
        load.accept(event, now)
        error = load.ask(event, now)
        if error is not None:
            self._close(load, error, now)
            return
        self._asked[load.request_id] = load
        load.engine.loads.depending[load] = None
        if load.engine.is_ready:
            self._advance(load, now)
            return
        self._give_until(load, now + self._engines.patience_s(load.engine))
        load.move(LoadState.CONNECTING)

    def _advance(self, load: Load, now: float) -> None:
        """Begin one read from each rank of the ready producer that has tokens for us which no read covers yet."""
        engine = load.engine
        workers = engine.workers.values() if load.is_followed else ()
        links = [worker.link.number for worker in workers]
        try:
            reads = load.take_ready(engine.routes, links, chunk_bytes=engine.chunk_bytes)
            if not reads and load.is_complete(links) and not load.is_read:
                raise RemoteProtocolError("the producer has fewer tokens than are to be loaded")
        except KVConnectorError as error:
            self._close(load, error, now)
            return
        if reads:
            self._give_until(load, now + self._timeout_s)
            load.move(LoadState.READING)
            for source in reads:
                self._reads.begin(load, source, now)
        elif load.is_complete(links):
            self._close(load, None, now)
        else:
            # if one rank has computed the whole prompt, the others are about to report the same
            is_ending = any(each.is_complete for each in load.progress.values())
            patience_s = self._timeout_s if is_ending else self._progress_timeout_s
            self._give_until(load, now + patience_s)
            load.move(LoadState.FOLLOWING)

    def _receive_posted(self, event: ev.ReceivePosted, now: float) -> None:
        read = event.read
        if read.is_stopped:  # the peer never learns of this read
            self._port.drain_receive(read, None if read.is_peer_over else 0)
            return
        load = read.load
        load.accept(event, now)
        read.is_asked = load.trace.is_packed = True
        self._give_until(load, now + self._timeout_s)
        self._port.send(read.worker.link, read.message())

    def _receive_advanced(self, event: ev.ReceiveAdvanced, now: float) -> None:
        load = event.read.load
        if load.state is LoadState.READING:
            self._give_until(load, now + self._timeout_s)

    def _receive_finished(self, event: ev.ReceiveFinished, now: float) -> None:
        read = event.read
        if not read.is_stopped and now >= read.worker.deadline:
            # this worker was silent for longer than its timeout: the producer may have reused the blocks meanwhile
            self._lose(read.worker.link, PeerLostError("this worker was silent too long"), now)
            self._fail_if_lost(read, now)
        self._reads.close(read)
        load = read.load
        load.accept(event, now)
        del load.reads[read.read_id]
        load.trace.finished(event, read.source.total_bytes)
        self._after_read(load, now)

    def _receive_stopped(self, event: ev.ReceiveStopped | ev.ReceiveFailed, now: float) -> None:
        """End an incomplete read that writes our blocks no more."""
        read = event.read
        load = read.load
        load.accept(event, now)
        self._reads.stop(read, now)
        del load.reads[read.read_id]
        if isinstance(event, ev.ReceiveFailed) and load.state is LoadState.READING:
            event.error.context["rank"] = str(read.source.source)
            self._fail(load, event.error, now)
        else:
            self._after_read(load, now)

    def _receive_drained(self, event: ev.ReceiveDrained, now: float) -> None:
        self._reads.close(event.read)

    def _after_read(self, load: Load, now: float) -> None:
        if load.reads:
            return
        if load.error is not None or not load.is_followed:
            self._close(load, load.error, now)
        else:
            load.note_filled()
            self._advance(load, now)  # its engine is ready: a loss would be the load's error

    def _read_cut_short(self, event: ev.FromPeer[m.ReadRefused | m.ReadEnded], now: float) -> None:
        ended, engine = event.message, self._engines.ready_at(event.link)
        read = None if engine is None else engine.reads.get(ended.read_id)
        # a peer may end only its own reads, once, and only after it was asked for them
        if (
            read is None
            or read.worker.link is not event.link
            or not read.is_asked
            or read.is_peer_over
        ):
            return
        sent_chunks = ended.sent_chunks if isinstance(ended, m.ReadEnded) else 0
        self._reads.peer_over(read, sent_chunks, now)
        if not read.is_stopped:
            read.load.accept(event, now)
            error = refusal_error(ended.refusal, ended.text, rank=str(read.source.source))
            self._fail(read.load, error, now)

    def _engine_changed(self, event: ev.EngineReady | ev.EngineLost, now: float) -> None:
        """Begin the loads that wait for an engine that is ready, or fail those that depend on one that is lost."""
        engine = event.engine
        self._backlog.append((event, iter([*engine.loads.depending])))
        if isinstance(event, ev.EngineReady):
            limits = [worker.max_chunk_bytes for worker in engine.workers.values()]
            engine.chunk_bytes = min([self._chunk_bytes, *filter(None, limits)])
        else:
            for read in engine.reads.values():
                read.is_peer_over = True
            for read in engine.reads.values():
                if read.is_asked:  # these have slots, so there are few of them
                    self._fail_if_lost(read, now)
                    self._reads.peer_over(read, None, now)
        self._work_off(now)

    def _fail_if_lost(self, read: RankRead, now: float) -> None:
        """Fail the load of `read` now if its engine was lost, although its turn in the backlog has not come yet."""
        lost = read.load.engine.loss
        if lost is not None and read.is_peer_over and not read.is_stopped:
            read.load.accept(lost, now)
            self._fail(read.load, lost.error, now)

    def _work_off(self, now: float) -> None:
        """Begin or fail at most `MAX_AT_ONCE` of the loads whose engine became ready or was lost."""
        left = MAX_AT_ONCE
        while self._backlog and left:
            event, loads = self._backlog[0]
            load = next(loads, None)
            if load is None:
                self._backlog.popleft()
                continue
            left -= 1
            if load not in load.engine.loads.turns:
                continue  # it ended in the meantime
            if isinstance(event, ev.EngineLost):
                load.accept(event, now)
                self._fail(load, event.error, now)
            elif load.engine.is_ready and load.state is LoadState.CONNECTING:
                load.accept(event, now)
                self._advance(load, now)
        if self._backlog:
            self._agenda.plan(self, AT_ONCE)

    def _lose(self, link: Link, error: KVConnectorError, now: float) -> None:
        """Give up the engine at `link`."""
        self._engines.handle(ev.LinkLost(link, error), now)

    def _dropped(self, event: DropRequest, now: float) -> None:
        load = self._loads.get(event.request_id)
        if load is None:
            return  # it finished in the meantime
        load.accept(event, now)
        error = TransferAbortedError("the request was aborted here", request=load.request_id)
        if load.state is LoadState.READING:
            self._fail(load, error, now)
        elif load.state is not LoadState.DRAINING:
            self._close(load, error, now)

    def _tick(self, event: ev.Tick, now: float) -> None:
        for thing in self._agenda.due(now):
            if isinstance(thing, Load):
                self._load_due(thing, event, now)
            elif isinstance(thing, RankRead):
                self._read_due(thing, now)
            elif isinstance(thing, RemoteEngine):
                self._engines.tick(thing, event, now)
            else:
                self._work_off(now)

    def _read_due(self, read: RankRead, now: float) -> None:
        """Give up a peer that did not end a cancelled read in time."""
        if read.deadline > now:
            self._agenda.plan(read, read.deadline)
            return
        lost = PeerLostError("a producer rank did not end a read that was cancelled")
        self._lose(read.worker.link, lost, now)
        self._reads.peer_over(read, None, now)

    def _load_due(self, load: Load, event: ev.Tick, now: float) -> None:
        """Give up a load whose deadline has passed."""
        is_asking = any(read.is_asked for read in load.reads.values())
        is_waiting = load.state is LoadState.READING and load.deadline <= now and not is_asking
        if is_waiting:  # other reads hold all slots, and the load waits while they make progress
            load.deadline = self._progress_at + self._timeout_s
        if load.deadline > now:
            self._give_until(load, load.deadline)
            return
        load.accept(event, now)
        self._fail(load, load.timeout_error(waits_for_slots=is_waiting), now)

    def _fail(self, load: Load, error: KVConnectorError, now: float) -> None:
        """Stop all reads of a load. It ends once none of them writes its blocks and the engine has asked for it."""
        error.context.setdefault("engine", load.engine.name.engine_id)
        load.error = error
        load.deadline = NEVER
        self._agenda.forget(load)
        load.engine.loads.remove(load)
        if load.asked is None:
            self._notify_prefill_started(load)
            return
        if not isinstance(error, PeerLostError):
            # an engine that took its blocks back may have filled them anew before its worker ended the lease
            load.forget_reads(load.asked)
        for read in load.reads.values():
            self._reads.stop(read, now)
        if load.reads:
            load.move(LoadState.DRAINING)
        else:
            self._close(load, error, now)

    def _close(self, load: Load, error: KVConnectorError | None, now: float) -> None:
        """End a load: report it to the engine, if the engine asked for it, and then to the producer's ranks."""
        ending = load.end(error)
        self._agenda.forget(load)
        load.engine.loads.remove(load)
        self._asked.pop(load.request_id, None)
        del self._loads[load.request_id]
        if load.asked is not None:
            self._port.finish_load(load, error)
        self._engines.end_transfer(load.engine.name, ending, now)

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        WantRequest: _wanted,
        LoadRequest: _load_asked,
        DropRequest: _dropped,
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
