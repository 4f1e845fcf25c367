"""The consumer's session: the loads of one worker and the engines they come from, as a pure state machine.

A load is over when all of its reads have finished, or when one has failed and nothing writes to the request's blocks
any more. Chunks that the peer still sends for a stopped read are drained into staging memory and dropped, so a late
chunk never lands in blocks that belong to another request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, ClassVar

from kvconnector.agenda import AT_ONCE, MAX_AT_ONCE, NEVER, Agenda
from kvconnector.config import PeerConfig
from kvconnector.errors import (
    KVConnectorError,
    LocalError,
    OtherPromptError,
    PeerLostError,
    TransferAbortedError,
    UnknownRequestError,
)
from kvconnector.ids import Rank
from kvconnector.planning import SourceRead
from kvconnector.session import events as ev
from kvconnector.session.completion import LoadInFlight
from kvconnector.session.containment import (
    failure_of,
    guarded,
    handled,
)
from kvconnector.session.engines import RemoteEngines
from kvconnector.session.link import FromPeer, Link, kind_of
from kvconnector.session.load import Load, LoadState, RankRead, RemoteEngine
from kvconnector.session.machine import Table, staying
from kvconnector.session.orders import ConsumerOrder, DropRequest, LoadRequest, WantRequest
from kvconnector.session.port import Ports
from kvconnector.topology import EngineGeometry, TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error

_S = LoadState
_ENDED = frozenset({_S.FAILED, _S.ABORTED})

LOAD_TABLE: Table[LoadState] = Table(
    "load",
    _S.WANTED,
    {
        _S.WANTED: {
            LoadRequest: frozenset(
                {_S.CONNECTING, _S.FOLLOWING, _S.READING, _S.DONE, _S.FAILED, _S.ABORTED}
            ),
            DropRequest: frozenset({_S.DONE, _S.ABORTED}),
            **staying(_S.WANTED, m.Progress, ev.EngineLost, ev.Tick),
        },
        _S.CONNECTING: {
            ev.EngineReady: frozenset({_S.FOLLOWING, _S.READING, _S.DONE, _S.FAILED}),
            ev.EngineLost: frozenset({_S.FAILED}),
            m.Progress: frozenset({_S.CONNECTING, _S.FAILED, _S.ABORTED}),
            DropRequest: frozenset({_S.ABORTED}),
            ev.Tick: frozenset({_S.FAILED}),
        },
        _S.FOLLOWING: {
            m.Progress: frozenset({_S.FOLLOWING, _S.READING, _S.DONE, _S.FAILED, _S.ABORTED}),
            ev.EngineLost: frozenset({_S.FAILED}),
            DropRequest: frozenset({_S.ABORTED}),
            ev.Tick: frozenset({_S.FAILED}),
        },
        _S.READING: {
            ev.ReceivePosted: frozenset({_S.READING}),
            m.Progress: frozenset({_S.READING, _S.DRAINING}),
            ev.ReceiveFinished: frozenset({_S.READING, _S.FOLLOWING, _S.DONE, _S.FAILED}),
            ev.ReceiveFailed: frozenset({_S.DRAINING, _S.FAILED}),
            m.ReadRefused: frozenset({_S.DRAINING}),
            m.ReadEnded: frozenset({_S.DRAINING}),
            ev.EngineLost: frozenset({_S.DRAINING}),
            DropRequest: frozenset({_S.DRAINING}),
            ev.Tick: frozenset({_S.DRAINING}),
        },
        _S.DRAINING: {
            ev.ReceiveFinished: _ENDED | {_S.DRAINING},
            ev.ReceiveFailed: _ENDED | {_S.DRAINING},
            ev.ReceiveStopped: _ENDED | {_S.DRAINING},
            DropRequest: frozenset({_S.DRAINING}),
        },
        _S.DONE: {},
        _S.FAILED: {},
        _S.ABORTED: {},
    },
)


class ConsumerSession:
    """All loads of one consumer worker. All events come in through `handle`.

    `element_orders[group, family]` is the order in which this worker unpacks a segment fastest. `stream`: read prompts
    that are still being computed. The next `Tick` must come by `next_deadline()`, which may be earlier than anything is
    due.
    """

    def __init__(
        self,
        geometry: EngineGeometry,
        rank: Rank,
        peer: PeerConfig,
        ports: Ports,
        *,
        chunk_bytes: int,
        element_orders: Mapping[tuple[int, int], str],
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
        self._data, self._links, self._engine = ports.data, ports.links, ports.engine
        self._reads = Reads(ports, self._agenda, drain_timeout_s=self._timeout_s)
        topology = TpKVTopology(geometry, rank)
        self._engines = RemoteEngines(
            topology, peer, element_orders, self._agenda, ports, on_change=self._engine_changed
        )

    def handle(self, event: object, now: float) -> None:
        """Handle an event. No other method changes loads and engines. An unexpected exception ends one load or the
        links to one engine: see `containment`.

        Raises:
            LocalError: the engine asked for a load twice, or for a load of an unknown request; nothing has changed.
            WorkerFault: the worker cannot go on.
        """
        handled(self._contain, self._handle, event, now)

    def _handle(self, event: object, now: float) -> None:
        if isinstance(event, ev.OfReceive):
            self._progress_at = now
            self._fail_if_lost(event.read, now)
        handler = self._HANDLERS.get(kind_of(event))
        if handler is None:  # the event concerns a link
            self._engines.handle(event, now)
        else:
            handler(self, event, now)

    def in_flight(self, now: float) -> tuple[LoadInFlight, ...]:
        """Return the loads that are being read. Any thread may call this."""
        rank, asked = str(self._rank), list(self._asked.values())
        being_read = [load for load in asked if load.trace.first_read_s is not None]
        return tuple([load.in_flight(rank, now) for load in being_read])

    def _give_until(self, load: Load, deadline: float) -> None:
        """Give up a load at `deadline`, unless it makes progress before."""
        load.deadline = deadline
        self._agenda.plan(load, deadline)

    def _wanted(self, event: WantRequest, now: float) -> None:
        if event.request_id in self._loads:
            raise LocalError("a request was wanted twice", request=event.request_id)
        engine = self._engines.engine_of(event.engine)
        self._engines.lose_if_silent(engine, now)
        load = Load(LOAD_TABLE, event, engine, now)
        self._loads[load.request_id] = load
        engine.loads.add(load)
        if load.is_followed:
            self._give_until(load, now + self._progress_timeout_s)
        self._engines.want(event, now)

    def _progressed(self, event: FromPeer[m.Progress], now: float) -> None:
        engine = self._engines.ready_at(event.link)
        loads = () if engine is None else engine.loads.following(event.message.transfer_id)
        for load in loads:
            if event.message.secret in ("", load.key.secret):
                guarded(partial(self._end_load, load, now), self._take_report, load, event, now)

    def _take_report(self, load: Load, event: FromPeer[m.Progress], now: float) -> None:
        load.accept(event, now)
        try:
            is_new = load.record_progress(event.link.number, event.message)
        except KVConnectorError as error:
            self._fail(load, error, now)
            return
        if not is_new:
            return
        if load.state is LoadState.FOLLOWING:
            self._advance(load, now)
        elif load.order is None:  # a growing prompt does not mean that the chunks of a read arrive
            self._give_until(load, now + self._progress_timeout_s)
            if load.should_notify(event.link.number, is_streamed=self._stream):
                self._notify_producer_started(load)

    def _notify_producer_started(self, load: Load) -> None:
        """Report once that the engine may ask for the load."""
        is_first = load.order is None and not load.producer_started
        load.producer_started = True
        if is_first:
            self._engine.producer_started(load.request_id)

    def _load_asked(self, event: LoadRequest, now: float) -> None:
        load = self._loads.get(event.request_id)
        if load is None:
            raise UnknownRequestError(
                "the request of a load is not known to this worker", request=event.request_id
            )
        load.accept(event, now)
        error = load.ask(event, now)
        if error is not None:
            self._close(load, error, now)
            return
        self._asked[load.request_id] = load
        load.engine.loads.fail_on_loss[load] = None
        if load.engine.is_ready:
            self._advance(load, now)
            return
        self._give_until(load, now + self._engines.patience_s(load.engine))
        load.move(LoadState.CONNECTING)

    def _advance(self, load: Load, now: float) -> None:
        """From each rank of a ready producer that has tokens for us which no read covers yet, begin one read."""
        engine = load.engine
        workers = engine.workers.values() if load.is_followed else ()
        links = [worker.link.number for worker in workers]
        try:
            reads = load.take_ready(engine.routes, links, chunk_bytes=engine.chunk_bytes)
            if not reads and load.is_complete(links) and not load.is_read:
                raise OtherPromptError("the prefill engine computed a shorter prompt")
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
            self._data.drain_receive(read, None if read.is_peer_over else 0)
            return
        load = read.load
        load.accept(event, now)
        load.trace.is_packed = True
        self._give_until(load, now + self._timeout_s)
        self._links.send(read.worker.link, read.message())
        read.is_asked = True

    def _receive_advanced(self, event: ev.ReceiveAdvanced, now: float) -> None:
        load = event.read.load
        if load.state is LoadState.READING:
            self._give_until(load, now + self._timeout_s)

    def _receive_finished(self, event: ev.ReceiveFinished, now: float) -> None:
        read = event.read
        if not read.is_stopped and now >= read.worker.deadline:
            # this worker was silent for longer than its timeout: the producer may have reused the blocks meanwhile
            self._lose(read.worker.link, PeerLostError("this worker was silent for too long"), now)
            self._fail_if_lost(read, now)
        self._reads.close(read)
        load = read.load
        load.accept(event, now)
        load.remove_read(read)
        load.trace.finished(read.source.total_bytes, event.seconds, event.path, event.phases)
        self._after_read(load, now)

    def _receive_stopped(self, event: ev.ReceiveStopped | ev.ReceiveFailed, now: float) -> None:
        """End an incomplete read that no longer writes to our blocks."""
        read = event.read
        load = read.load
        load.accept(event, now)
        self._reads.stop(read, now)
        load.remove_read(read)
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

    def _read_cut_short(self, event: FromPeer[m.ReadRefused | m.ReadEnded], now: float) -> None:
        ended, read = event.message, self._read_named(event)
        # a peer may end a read only once, and only after we have asked for the read
        if read is None or not read.is_asked or read.is_peer_over:
            return
        self._peer_ended(read, ended, now)
        if not read.is_stopped:
            read.load.accept(event, now)
            error = refusal_error(ended.refusal, ended.text, rank=str(read.source.source))
            self._fail(read.load, error, now)

    def _read_named(self, event: FromPeer[Any]) -> RankRead | None:
        """Return the read that a producer worker reports as ended, if the read is from that worker."""
        if not isinstance(event.message, m.ReadRefused | m.ReadEnded):
            return None
        engine = self._engines.ready_at(event.link)
        read = None if engine is None else engine.reads.get(event.message.read_id)
        return read if read is not None and read.worker.link is event.link else None

    def _peer_ended(self, read: RankRead, ended: m.ReadRefused | m.ReadEnded, now: float) -> None:
        sent_chunks = ended.sent_chunks if isinstance(ended, m.ReadEnded) else 0
        self._reads.peer_over(read, sent_chunks, now)

    def _engine_changed(self, event: ev.EngineReady | ev.EngineLost, now: float) -> None:
        """Begin the loads that wait for an engine that is ready, or fail those that depend on one that is lost."""
        engine = event.engine
        self._backlog.append((event, iter([*engine.loads.fail_on_loss])))
        if isinstance(event, ev.EngineReady):
            limits = [worker.max_chunk_bytes for worker in engine.workers.values()]
            engine.chunk_bytes = min([self._chunk_bytes, *filter(None, limits)])
        else:
            for read in engine.reads.values():
                read.is_peer_over = True
            for read in [*engine.reads.values()]:
                if read.is_asked:  # these have slots, so there are few of them
                    guarded(partial(self._end_load, read.load, now), self._fail_if_lost, read, now)
                    self._reads.peer_over(read, None, now)
        self._work_off(now)

    def _fail_if_lost(self, read: RankRead, now: float) -> None:
        """If the engine of `read` was lost, fail its load now, without waiting for its turn in the backlog."""
        engine = read.load.engine
        if engine.loss is not None and read.is_peer_over and not read.is_stopped:
            read.load.accept(ev.EngineLost(engine, engine.loss), now)
            self._fail(read.load, engine.loss, now)

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
            if load in load.engine.loads.heartbeat_queue:  # otherwise it ended in the meantime
                guarded(
                    partial(self._end_load, load, now), self._engine_changed_for, load, event, now
                )
        if self._backlog:
            self._agenda.plan(self, AT_ONCE)

    def _engine_changed_for(
        self, load: Load, event: ev.EngineReady | ev.EngineLost, now: float
    ) -> None:
        """Begin a load whose engine is ready, or fail it with its engine."""
        if isinstance(event, ev.EngineLost):
            load.accept(event, now)
            self._fail(load, event.error, now)
        elif load.engine.is_ready and load.state is LoadState.CONNECTING:
            load.accept(event, now)
            self._advance(load, now)

    def _lose(self, link: Link, error: KVConnectorError, now: float) -> None:
        """Give up the engine at `link`."""
        self._engines.handle(ev.LinkLost(link, error), now)

    def _dropped(self, event: DropRequest, now: float) -> None:
        load = self._loads.get(event.request_id)
        if load is None:
            return  # it finished in the meantime
        load.accept(event, now)
        if event.needs_none and load.order is None:
            self._close(load, None, now)
            return
        error = TransferAbortedError("the request was aborted here", request=load.request_id)
        if load.state is LoadState.READING:
            self._fail(load, error, now)
        elif load.state is not LoadState.DRAINING:
            self._close(load, error, now)

    def _tick(self, event: ev.Tick, now: float) -> None:
        for thing in self._agenda.due(now):
            if isinstance(thing, Load):
                guarded(partial(self._end_load, thing, now), self._load_due, thing, event, now)
            elif isinstance(thing, RankRead):
                guarded(partial(self._give_up_peer, thing, now), self._read_due, thing, now)
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
        engine = load.engine
        if load.order is None and engine.is_ready and not engine.workers:
            load.deadline = NEVER  # no producer rank has anything for this one, or reports to it
            return
        is_moving = any(read.is_asked or read.is_moving for read in load.reads.values())
        is_waiting = load.state is LoadState.READING and load.deadline <= now and not is_moving
        if is_waiting:  # other reads hold all slots, and the load waits while they make progress
            load.deadline = self._progress_at + self._timeout_s
        if load.deadline > now:
            self._give_until(load, load.deadline)
            return
        load.accept(event, now)
        self._fail(load, load.timeout_error(waits_for_slots=is_waiting), now)

    def _fail(self, load: Load, error: KVConnectorError, now: float) -> None:
        """Stop all reads of a load. The load ends once none of them writes to its blocks and the engine has asked for
        it.
        """
        error.context.setdefault("engine", load.engine.name.engine_id)
        load.error = error
        load.deadline = NEVER
        self._agenda.forget(load)
        load.engine.loads.remove(load)
        if load.order is None:
            self._notify_producer_started(load)
            return
        if not isinstance(error, PeerLostError):
            # an engine that took its blocks back may have written other data to them before its worker ended the lease
            load.forget_reads(load.order)
        for read in load.reads.values():
            self._reads.stop(read, now)
        if load.reads:
            load.move(LoadState.DRAINING)
        else:
            self._close(load, error, now)

    def _close(self, load: Load, error: KVConnectorError | None, now: float) -> None:
        """End a load: report it to the engine, if the engine asked for it, and then to the producer's ranks."""
        ending = load.end(error)
        if load.order is not None:
            self._engine.finish_load(load, error)
        load.is_reported = True
        self._forget(load)
        self._engines.end_transfer(load.engine.name, ending, now)

    def _forget(self, load: Load) -> None:
        """Remove a load that is over. Idempotent."""
        self._agenda.forget(load)
        load.engine.loads.remove(load)
        if self._loads.get(load.request_id) is load:
            del self._loads[load.request_id]
            self._asked.pop(load.request_id, None)

    # -- containment --

    def _contain(self, event: object, now: float, error: Exception) -> None:
        """End what an event was about, whose handler has raised an unexpected exception."""
        if isinstance(event, ev.OfReceive):
            self._report_counts(event, now)
            self._end_load(event.read.load, now, error)
        elif isinstance(event, ConsumerOrder):
            self._contain_order(event, error, now)
        elif isinstance(event, FromPeer) and isinstance(event.message, m.Progress):
            self._engine.note_contained(f"progress of {event.message.transfer_id}", error)
            engine = self._engines.ready_at(event.link)
            for load in () if engine is None else engine.loads.following(event.message.transfer_id):
                self._stop_load(load, now, error)
        elif isinstance(event, FromPeer) and (read := self._read_named(event)) is not None:
            if read.is_asked and not read.is_peer_over:
                self._peer_ended(read, event.message, now)
            self._end_load(read.load, now, error)
        else:
            self._engine.note_contained(f"a {kind_of(event).__name__}", error)

    def _contain_order(self, order: ConsumerOrder, error: Exception, now: float) -> None:
        load = self._loads.get(order.request_id)
        if load is not None:
            if isinstance(order, LoadRequest) and load.order is None:
                load.order = order
            self._end_load(load, now, error)
            if isinstance(order, DropRequest) and load.order is None:  # nobody will ask for it
                self._forget(load)
                load.is_reported = True
                self._engines.end_transfer(load.engine.name, load.abort(), now)
            return
        self._engine.note_contained(f"request {order.request_id}", error)
        if isinstance(order, LoadRequest):
            self._engine.fail_load(order.request_id, failure_of(error))
        elif isinstance(order, WantRequest) and order.is_followed:
            self._engine.producer_started(
                order.request_id
            )  # its load then fails, as this worker does not know the request

    def _report_counts(self, event: ev.OfReceive, now: float) -> None:
        """Apply what a report of the data path says about a read, no matter how much of it its handler has applied.
        Idempotent.
        """
        read = event.read
        if isinstance(event, ev.ReceiveFinished | ev.ReceiveStopped | ev.ReceiveFailed):
            read.load.remove_read(read)
        if isinstance(event, ev.ReceiveFinished | ev.ReceiveDrained):
            self._reads.close(read)
        elif isinstance(event, ev.ReceivePosted) and not read.is_asked:
            self._reads.stop(read, now)
            self._data.drain_receive(read, None if read.is_peer_over else 0)
        elif not isinstance(event, ev.ReceiveAdvanced):
            self._stop_or_lose(read, now)

    def _end_load(self, load: Load, now: float, error: Exception) -> None:
        """End a load whose handler raised an exception, and note the exception."""
        self._engine.note_contained(f"request {load.request_id}", error)
        self._stop_load(load, now, error)

    def _stop_load(self, load: Load, now: float, error: Exception) -> None:
        """End a torn load: see `containment`. Each step may be repeated."""
        if load.is_reported:
            self._forget(load)
            return
        if load.error is None:
            load.error = failure_of(error)
        load.deadline = NEVER
        self._agenda.forget(load)
        load.engine.loads.remove(load)
        for read in [*load.reads.values()]:
            self._stop_or_lose(read, now)
        if load.order is None:
            load.producer_started = True
            if load.is_followed:
                self._engine.producer_started(load.request_id)
        elif load.reads:
            load.force(LoadState.DRAINING, now)
        else:
            self._forget(load)
            load.force(LoadState.FAILED, now)
            self._engine.fail_load(load.request_id, load.error)
            load.is_reported = True
            self._engines.end_transfer(load.engine.name, load.abort(), now)

    def _stop_or_lose(self, read: RankRead, now: float) -> None:
        """Stop a read. If its peer cannot be asked to stop sending, give up the peer. If the peer was already
        given up, a failure ends the worker, because something may still write to the read's blocks.
        """
        if read.is_peer_over:
            self._reads.stop(read, now)
            return
        guarded(partial(self._give_up_peer, read, now), self._reads.stop, read, now)

    def _give_up_peer(self, read: RankRead, now: float, error: Exception) -> None:
        """Give up the engine of a read that cannot be ended there, and free the read's slots."""
        self._engines.contain(read.worker.engine, now, error)
        self._reads.peer_over(read, None, now)

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


class Reads:
    """Begins and ends reads. Each read is listed by its load and by its engine."""

    def __init__(self, ports: Ports, agenda: Agenda[Any], *, drain_timeout_s: float) -> None:
        self._data, self._links = ports.data, ports.links
        self._drain_timeout_s = drain_timeout_s
        self._numbers = count(1)
        self._agenda = agenda

    def begin(self, load: Load, source: SourceRead, now: float) -> None:
        """Begin a read from the worker that `source` names."""
        assert load.order is not None  # nothing is read before
        worker = load.engine.workers[source.route.peer]
        theirs = (
            load.progress[worker.link.number].blocks
            if load.is_followed
            else load.order.remote_blocks
        )
        read = RankRead(next(self._numbers), load, worker, source, load.order.local_blocks, theirs)
        trace = load.trace
        trace.first_read_s, trace.last_read_s = trace.first_read_s or now, now
        trace.total_bytes += source.total_bytes
        load.reads[read.read_id] = load.engine.reads[read.read_id] = read
        self._data.start_receive(read)

    def close(self, read: RankRead) -> None:
        """Forget a read whose slots are free. Idempotent."""
        self._agenda.forget(read)
        read.load.engine.reads.pop(read.read_id, None)

    def stop(self, read: RankRead, now: float) -> None:
        """Stop writing a read's chunks, and cancel it at its peer if that may still be sending. Idempotent."""
        if read.is_stopped:
            return
        read.is_stopped = True
        self._data.stop_receive(read)
        if read.is_asked and not read.is_peer_over:
            self._await_end(read, now)
            self._links.send(read.worker.link, m.CancelRead(read_id=read.read_id))

    def peer_over(self, read: RankRead, sent_chunks: int | None, now: float) -> None:
        """Drain a read, of which the peer sends only the first `sent_chunks` chunks; None: the peer is lost."""
        read.is_peer_over = True
        if sent_chunks is None:
            read.deadline = NEVER
        else:
            self._await_end(read, now)
        self._data.drain_receive(read, sent_chunks)

    def _await_end(self, read: RankRead, now: float) -> None:
        read.deadline = now + self._drain_timeout_s
        self._agenda.plan(read, read.deadline)
