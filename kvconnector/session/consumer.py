"""The consumer's session: the loads of one worker and the engines they come from, as a pure state machine.

A load is over when every read of it is unpacked, or when one failed and nothing writes the request's blocks any more.
What the peer still sends for a stopped read is drained into staging memory and dropped, so a late chunk can never land
in blocks that belong to somebody else by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from kvconnector.errors import (
    KVConnectorError,
    LocalError,
    TransferAbortedError,
    TransferTimeoutError,
    UnknownRequestError,
)
from kvconnector.ids import EngineId, RequestId
from kvconnector.planning import GroupBlocks, SourceRead
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import Command, LinkId
from kvconnector.session.engines import PeerSettings, RemoteEngines
from kvconnector.session.load import Load, LoadState
from kvconnector.session.remote_engine import RemoteEngine
from kvconnector.topology import EngineGeometry
from kvconnector.wire import messages as m


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Durations in seconds. `orders[group, family]` is the element order that this worker unpacks fastest."""

    peer: PeerSettings
    transfer_timeout_s: float
    chunk_bytes: int
    orders: Mapping[tuple[int, int], str]


@dataclass(slots=True)
class _OpenRead:
    """One read at one producer rank. A complete read is forgotten at once; a stopped one when neither the data plane
    writes for it (it left its load's `reads`) nor the peer may still send (`peer_is_over`)."""

    request_id: RequestId
    engine_id: EngineId
    link: LinkId
    source: SourceRead
    is_stopped: bool = False
    peer_is_over: bool = True


class ConsumerSession:
    """All loads of one consumer worker. `handle` is the only way in; see the tables in `load.py` and
    `remote_engine.py`."""

    def __init__(self, geometry: EngineGeometry, rank: Rank, settings: ConsumerSettings) -> None:
        self._settings = settings
        self._engines = RemoteEngines(geometry, rank, settings.peer)
        self._loads: dict[RequestId, Load] = {}
        self._reads: dict[int, _OpenRead] = {}
        self._read_numbers = count(1)

    def handle(self, event: object, now: float) -> list[Command]:
        """What to do about `event`. The only method that changes loads and engines.

        Raises:
            LocalError: the engine asked for a load twice, or for one of an unknown request.
        """
        commands: list[Command] = []
        handler = self._HANDLERS.get(type(event))
        if handler is not None:
            commands += handler(self, event, now)
        if type(event) in _ENGINE_EVENTS:
            for answer in self._engines.handle(event, now, self._wants):
                if isinstance(answer, (ev.EngineReady, ev.EngineLost)):
                    commands += self._HANDLERS[type(answer)](self, answer, now)
                else:
                    commands.append(answer)
        return commands

    def heard(self, link: LinkId, now: float) -> None:
        """Any message came on `link`: the worker there lives."""
        self._engines.heard(link, now)

    def knows(self, link: LinkId) -> bool:
        """Whether `link` leads to a producer engine that this session opened."""
        return self._engines.knows(link)

    def next_deadline(self) -> float | None:
        """When to send the next `Tick`, at the latest."""
        times = [load.deadline for load in self._loads.values()]
        engines = self._engines.next_deadline()
        if engines is not None:
            times.append(engines)
        soonest = min(times, default=None)
        return None if soonest == float("inf") else soonest

    @property
    def num_loads(self) -> int:
        """Requests that are wanted or being loaded."""
        return len(self._loads)

    def validate(self) -> None:
        """Check the invariants between the collections; tests call it after every event."""
        self._engines.validate()
        for load in self._loads.values():
            in_flight = load.state in (LoadState.READING, LoadState.DRAINING)
            assert bool(load.reads) == in_flight, (load.state, load.reads)
            assert set(load.reads) <= set(self._reads)
            assert (load.error is not None) == (load.state is LoadState.DRAINING)

    def _wants(self, engine_id: EngineId) -> Iterator[m.TransferKey]:
        return (load.key for load in self._loads.values() if load.engine_id == engine_id)

    def _wanted(self, event: ev.Wanted, now: float) -> list[Command]:
        if event.request_id in self._loads:
            raise LocalError("a request was wanted twice", request=event.request_id)
        self._loads[event.request_id] = Load(event)
        return []

    def _load_asked(self, event: ev.LoadAsked, now: float) -> list[Command]:
        load = self._loads.get(event.request_id)
        if load is None:
            raise UnknownRequestError("a load needs a wanted request", request=event.request_id)
        load.accept(event)
        load.asked = event
        load.deadline = now + self._settings.peer.hello_timeout_s
        engine = self._engines.ready(load.engine_id)
        if engine is None:
            load.move(event, LoadState.CONNECTING, now)
            return []
        return self._start(load, engine, event, now)

    def _start(self, load: Load, engine: RemoteEngine, event: object, now: float) -> list[Command]:
        """Open one read per producer rank that has something for us."""
        # a READY engine has a plan, and only an asked load starts
        assert engine.plan is not None and load.asked is not None
        try:
            plan = engine.plan.plan(
                load.asked.token_ranges, chunk_bytes=self._settings.chunk_bytes
            )
        except KVConnectorError as error:
            return self._close(load, LoadState.FAILED, error, event, now)
        if not plan.reads:
            return self._close(load, LoadState.DONE, None, event, now)
        commands: list[Command] = []
        for source in plan.reads:
            read_id = next(self._read_numbers)
            link = engine.workers[source.source].link
            self._reads[read_id] = _OpenRead(load.request_id, load.engine_id, link, source)
            load.reads[read_id] = source.source
            commands.append(
                cmd.StartReceive(read_id, load.request_id, source, load.asked.local_blocks)
            )
        load.deadline = float("inf")  # until the receives are posted: a full staging pool is no failure
        load.move(event, LoadState.READING, now)
        return commands

    def _receive_posted(self, event: ev.ReceivePosted, now: float) -> list[Command]:
        read = self._reads[event.read_id]
        load = self._loads.get(read.request_id)
        engine = self._engines.ready(read.engine_id)
        if read.is_stopped or load is None or load.asked is None or engine is None:
            return [cmd.DrainReceive(event.read_id, 0)]  # the peer will never hear of this read
        load.accept(event)
        read.peer_is_over = False
        load.deadline = now + self._settings.transfer_timeout_s
        load.move(event, LoadState.READING, now)
        worker = engine.workers[read.source.source]
        message = m.Read(
            transfer_id=load.key.transfer_id,
            secret=load.key.secret,
            read_id=event.read_id,
            incarnation=worker.incarnation,
            segments=self._segments(read.source),
            chunks=read.source.chunks.tobytes(),
            blocks=tuple(_wire_blocks(blocks) for blocks in load.asked.remote_blocks),
            window=event.window,
            first_tag=event.first_tag,
        )
        return [cmd.SendMessage(read.link, message)]

    def _segments(self, source: SourceRead) -> tuple[m.ReadSegment, ...]:
        return tuple(
            m.ReadSegment(
                group=s.group,
                family=s.family,
                first_layer=s.layers[0],
                num_layers=len(s.layers),
                head_start=s.head_start,
                head_stop=s.head_stop,
                order=self._settings.orders[s.group, s.family],
            )
            for s in source.segments
        )

    def _receive_advanced(self, event: ev.ReceiveAdvanced, now: float) -> list[Command]:
        read = self._reads.get(event.read_id)
        load = self._loads.get(read.request_id) if read else None
        if load is not None and load.state is LoadState.READING:
            load.deadline = now + self._settings.transfer_timeout_s
        return []

    def _receive_finished(self, event: ev.ReceiveFinished, now: float) -> list[Command]:
        load = self._loads[self._reads.pop(event.read_id).request_id]
        load.accept(event)
        del load.reads[event.read_id]
        return self._after_read(load, event, now)

    def _receive_stopped(
        self, event: ev.ReceiveStopped | ev.ReceiveFailed, now: float
    ) -> list[Command]:
        """The data plane writes nothing more for a read that is incomplete."""
        read = self._reads[event.read_id]
        load = self._loads[read.request_id]
        load.accept(event)
        commands = [] if read.is_stopped else self._stop(event.read_id)
        del load.reads[event.read_id]
        if read.peer_is_over:
            del self._reads[event.read_id]
        if isinstance(event, ev.ReceiveFailed) and load.state is LoadState.READING:
            return commands + self._fail(load, event.error, event, now)
        return commands + self._after_read(load, event, now)

    def _after_read(self, load: Load, event: object, now: float) -> list[Command]:
        if load.reads:
            load.move(event, load.state, now)
            return []
        if load.error is None:
            return self._close(load, LoadState.DONE, None, event, now)
        return self._close(load, _ending(load.error), load.error, event, now)

    def _read_denied(self, event: ev.ReadDenied, now: float) -> list[Command]:
        return self._read_ended(event, 0, now)

    def _read_cut_short(self, event: ev.ReadCutShort, now: float) -> list[Command]:
        return self._read_ended(event, event.sent_chunks, now)

    def _read_ended(
        self, event: ev.ReadDenied | ev.ReadCutShort, sent_chunks: int, now: float
    ) -> list[Command]:
        """The peer will send no more than the first `sent_chunks` chunks."""
        read = self._reads.get(event.read_id)
        if read is None or read.peer_is_over:
            return []
        commands = self._peer_over(event.read_id, sent_chunks)
        if not read.is_stopped:
            load = self._loads[read.request_id]
            load.accept(event)
            commands += self._fail(load, event.error, event, now)
        return commands

    def _peer_over(self, read_id: int, sent_chunks: int | None) -> list[Command]:
        """Nothing more will come for this read than the first `sent_chunks` chunks; None: the peer is gone."""
        read = self._reads[read_id]
        read.peer_is_over = True
        load = self._loads.get(read.request_id)
        if load is None or read_id not in load.reads:
            del self._reads[read_id]
        return [cmd.DrainReceive(read_id, sent_chunks)]

    def _engine_ready(self, event: ev.EngineReady, now: float) -> list[Command]:
        engine = self._engines.ready(event.engine_id)
        commands: list[Command] = []
        for load in list(self._loads.values()):
            if load.engine_id == event.engine_id and load.state is LoadState.CONNECTING:
                load.accept(event)
                assert engine is not None  # it has just told us that it is
                commands += self._start(load, engine, event, now)
        return commands

    def _engine_lost(self, event: ev.EngineLost, now: float) -> list[Command]:
        """Fail what depends on the engine, and nothing else."""
        commands: list[Command] = []
        for read_id, read in list(self._reads.items()):
            if read.engine_id == event.engine_id:
                commands += self._peer_over(read_id, None)
        for load in list(self._loads.values()):
            if load.engine_id != event.engine_id:
                continue
            if load.state is LoadState.CONNECTING:
                load.accept(event)
                commands += self._close(load, LoadState.FAILED, event.error, event, now)
            elif load.state is LoadState.READING:
                load.accept(event)
                commands += self._fail(load, event.error, event, now)
        return commands

    def _withdrawn(self, event: ev.LoadWithdrawn, now: float) -> list[Command]:
        load = self._loads.get(event.request_id)
        if load is None:
            return []  # it finished in the meantime
        load.accept(event)
        error = TransferAbortedError("the request was aborted here", request=load.request_id)
        if load.state is LoadState.READING:
            return self._fail(load, error, event, now)
        if load.state is LoadState.DRAINING:
            load.move(event, LoadState.DRAINING, now)
            return []
        return self._close(load, LoadState.ABORTED, error, event, now)

    def _tick(self, event: ev.Tick, now: float) -> list[Command]:
        commands: list[Command] = []
        for load in list(self._loads.values()):
            if load.deadline > now:
                continue
            load.accept(event)
            error = TransferTimeoutError(
                "the load made no progress before its deadline",
                request=load.request_id,
                engine=load.engine_id,
                state=load.state.value,
                waiting_for=[str(rank) for rank in load.reads.values()],
            )
            if load.state is LoadState.READING:
                commands += self._fail(load, error, event, now)
            else:
                commands += self._close(load, LoadState.FAILED, error, event, now)
        return commands

    def _fail(
        self, load: Load, error: KVConnectorError, event: object, now: float
    ) -> list[Command]:
        """Stop every read that is left; the load ends once none writes its blocks."""
        load.error = error
        load.deadline = float("inf")
        commands = [command for read_id in load.reads for command in self._stop(read_id)]
        if not load.reads:
            return commands + self._close(load, _ending(error), error, event, now)
        load.move(event, LoadState.DRAINING, now)
        return commands

    def _stop(self, read_id: int) -> list[Command]:
        read = self._reads[read_id]
        read.is_stopped = True
        commands: list[Command] = [cmd.StopReceive(read_id)]
        if not read.peer_is_over:
            commands.append(cmd.SendMessage(read.link, m.CancelRead(read_id=read_id)))
        return commands

    def _close(
        self,
        load: Load,
        state: LoadState,
        error: KVConnectorError | None,
        event: object,
        now: float,
    ) -> list[Command]:
        """End the load: tell the producer's ranks, and the engine if it had given us blocks."""
        load.move(event, state, now)
        del self._loads[load.request_id]
        kind = m.Done if state is LoadState.DONE else m.Abort
        ending = kind(transfer_id=load.key.transfer_id, secret=load.key.secret)
        engine = self._engines.ready(load.engine_id)
        workers = engine.workers.values() if engine is not None else ()
        commands: list[Command] = [cmd.SendMessage(worker.link, ending) for worker in workers]
        if load.asked is not None:
            commands.append(cmd.FinishLoad(load.request_id, error))
        return commands

    _HANDLERS: dict[type, Callable[..., list[Command]]] = {
        ev.Wanted: _wanted,
        ev.LoadAsked: _load_asked,
        ev.LoadWithdrawn: _withdrawn,
        ev.ReceivePosted: _receive_posted,
        ev.ReceiveAdvanced: _receive_advanced,
        ev.ReceiveFinished: _receive_finished,
        ev.ReceiveStopped: _receive_stopped,
        ev.ReceiveFailed: _receive_stopped,
        ev.ReadDenied: _read_denied,
        ev.ReadCutShort: _read_cut_short,
        ev.EngineReady: _engine_ready,
        ev.EngineLost: _engine_lost,
        ev.Tick: _tick,
    }


_ENGINE_EVENTS = frozenset(
    {
        ev.Wanted,
        ev.Tick,
        ev.LinkLost,
        ev.DirectoryArrived,
        ev.DirectoryDenied,
        ev.HelloAnswered,
        ev.WarmedUp,
    }
)


def _ending(error: KVConnectorError) -> LoadState:
    return LoadState.ABORTED if isinstance(error, TransferAbortedError) else LoadState.FAILED


def _wire_blocks(blocks: GroupBlocks) -> m.ReadBlocks:
    return m.ReadBlocks(
        first_block=blocks.first_block, block_ids=blocks.block_ids.astype("<i4").tobytes()
    )
