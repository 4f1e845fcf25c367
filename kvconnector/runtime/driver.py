"""The driver: the one loop of a worker. It owns the sockets, the data path and the sessions, and nothing else does.

Each turn waits for something to happen, tells the sessions, and carries out what they command. The engine's thread
leaves steps in an inbox and takes results from an outbox. While the driver's own thread sleeps, or waits for the GIL,
the engine's may make progress inline: that saves waking one thread and then the other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from kvconnector.control.base import ControlChannel, Disconnected, PeerHandle, Received
from kvconnector.control.refusals import Refusals
from kvconnector.errors import KVConnectorError, PeerLostError, UnknownRequestError
from kvconnector.runtime.executor import Executor
from kvconnector.runtime.outgoing import Outgoing
from kvconnector.runtime.tagged_control import TaggedControl
from kvconnector.session import ConsumerSession, LoadInFlight, ProducerSession
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.session.orders import HoldRequest, LoadRequest, WithdrawRequest
from kvconnector.session.trace import HoldTrace
from kvconnector.wire import decode_batch, encode
from kvconnector.wire import messages as m

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath
    from kvconnector.wire.export import PoolExport

logger = logging.getLogger(__name__)

BUSY_PUMP_S = 5e-3
MAX_ROUNDS = 64
"""A data path with many small chunks always has something: the control channel and the engine get their turns, too."""
MAX_WORK_S = 2e-3
"""How long a turn handles events and commands. The next one begins in the data path, which releases the GIL."""
MAX_QUEUED_EVENTS = 1024
"""With more than these a turn takes no further messages of peers."""
MAX_SLEEP_S = 0.5
"""A transport may notice some losses only when it is looked at."""


class Links:
    """Which control connection is which session link. Sessions number the links they open from 1; links that peers
    open get negative numbers. `mappers` are consumers that may have mapped this worker's CUDA memory, by name;
    `outgoing` is what a turn has to say, and ends up at `send(link, payload)`.
    """

    def __init__(self, send: Callable[[LinkId, bytes], None]) -> None:
        self.outgoing = Outgoing(send)
        self.by_handle: dict[PeerHandle, LinkId] = {}
        self.by_link: dict[LinkId, PeerHandle] = {}
        self.mappers: dict[LinkId, str] = {}
        self._incoming = count(1)

    def add(self, link: LinkId, handle: PeerHandle) -> None:
        """A connection that a session opened."""
        self.by_handle[handle] = link
        self.by_link[link] = handle

    def of_incoming(self, handle: PeerHandle) -> LinkId:
        """The link of a connection on which a message came."""
        if handle not in self.by_handle:
            self.add(LinkId(-next(self._incoming)), handle)
        return self.by_handle[handle]

    def remove(self, link: LinkId) -> PeerHandle | None:
        """Forget a link; its connection, if it had one."""
        self.outgoing.forget(link)
        self.mappers.pop(link, None)
        handle = self.by_link.pop(link, None)
        if handle is not None:
            del self.by_handle[handle]
        return handle


class Driver:
    """Runs one worker's sessions. `turn` is the loop's body; the caller decides in which thread it runs.

    `producer` or `consumer` is None where the worker has only the other role. `intake` is called in every turn, once
    the wait is over: it submits what the engine's thread has left.
    """

    def __init__(
        self,
        *,
        control: ControlChannel,
        tagged: TaggedControl,
        datapath: DataPath,
        executor: Callable[[Driver], Executor],
        producer: ProducerSession | None,
        consumer: ConsumerSession | None,
        intake: Callable[[Driver], None],
        clock: Callable[[], float],
    ) -> None:
        self.control = control
        self.tagged = tagged
        self.datapath = datapath
        self.links = Links(self._post)
        self.producer = producer
        self.consumer = consumer
        self.clock = clock
        self.refusals = Refusals(logger)
        self._events: deque[object] = deque()
        self._commands: deque[cmd.Command] = deque()
        self._is_enough: Callable[[], bool] = _never
        self._late_at = 0.0
        self._dropped: set[PeerHandle] = set()
        self._actions = executor(self).actions()
        self._intake = intake

    def submit(self, *events: object) -> None:
        """Queue events for the sessions; they are handled in this turn, in order."""
        self._events += events

    def in_flight(self) -> tuple[LoadInFlight, ...]:
        """The loads that are read now. Any thread may ask."""
        return () if self.consumer is None else self.consumer.in_flight(self.clock())

    @property
    def num_queued(self) -> int:
        """Events that no session has seen yet, and commands that are not carried out."""
        return len(self._events) + len(self._commands)

    def turn(self, timeout_s: float, is_enough: Callable[[], bool] | None = None) -> None:
        """Wait at most `timeout_s` for something to do, and do it. Once it `is_enough` for a thread that makes progress
        inline, the rest is left for the next turn.
        """
        self._is_enough = is_enough or _never
        self.datapath.pump(self._pump_s(timeout_s), self.control.filenos())
        self._late_at = self.clock() + MAX_WORK_S
        self._look()

    def progress_inline(self, is_enough: Callable[[], bool], *, orders_only: bool = False) -> None:
        """Do what there is to do, without waiting for more, in another thread than the driver's. What takes long, and
        all that comes after it, is left for that; so is the rest once it `is_enough`, and with `orders_only` all but
        what the engine's thread has left. So is what would keep the engine's thread for long.
        """
        self._is_enough = is_enough
        self._late_at = self.clock() + MAX_WORK_S
        if orders_only:
            self._intake(self)
            self.work(inline=True)
        else:
            self.datapath.poll_once()
            self._look(inline=True)
        if not is_enough() and self.datapath.poll_once():
            self.work(inline=True)

    def end_inline(self) -> None:
        """Give the driver's thread its place back."""
        self.datapath.release(self._pump_s(MAX_SLEEP_S))

    def _look(self, *, inline: bool = False) -> None:
        """Take what is there, and handle it."""
        # before all else: a peer waits for what comes of a message, and what a peer has sent counts before its loss
        if len(self._events) < MAX_QUEUED_EVENTS:
            self._take_tagged()
        self._events.extend(self.datapath.step())
        if not (self._carry_out(inline) or self._is_late()):
            return
        self.datapath.clear_pending()
        self._dropped.clear()
        for arrival in self.control.poll(0.0):
            if arrival.handle in self._dropped:
                continue  # it came before we gave the connection up in this turn
            if isinstance(arrival, Received):
                self._on_message(arrival)
            else:
                # what the peer said before it left may still wait in the transport
                self._take_tagged(progress=True)
                self._on_disconnect(arrival)
        self._intake(self)
        self.work(inline=inline)

    def work(self, *, inline: bool = False) -> None:
        """Handle what is queued, and what follows from it, until nothing moves, it is enough, or it has gone on for
        long. Inline only as far as the first command that takes long.
        """
        for _ in range(MAX_ROUNDS):
            if not self._carry_out(inline):
                break
            self._events.extend(self.datapath.step())
            deadline = self._next_deadline()
            if deadline is not None and deadline <= self.clock():
                self._events.append(ev.Tick())
            if not self._events:
                break

    def _is_late(self) -> bool:
        return self.clock() > self._late_at

    def _carry_out(self, inline: bool) -> bool:
        """Handle what is queued, and send what is to be said. Returns True if that was all, and is not enough."""
        is_all = self._carry_out_queued(inline)
        self.links.outgoing.flush()
        return is_all

    def _carry_out_queued(self, inline: bool) -> bool:
        while self._commands or self._events:
            if self._is_late():
                return False
            if not self._commands:
                self._handle(self._events.popleft())
                continue
            if inline and type(self._commands[0]) in _SLOW:
                return False
            command = self._commands.popleft()
            self._actions[type(command)](command)
            if type(command) in _ENDINGS and self._is_enough():
                if not self.num_queued:
                    # the loop tells only once of what ends: queued, the driver's thread takes it at once
                    self._events.extend(self.datapath.step())
                return False
        return True

    def say_goodbye(self) -> None:
        """Tell the consumers that this worker leaves in order. Each lets go of its pools, then disconnects: until then
        it is one of `links.mappers`. Producers see this worker disconnect, for which it need not wait for them.
        """
        goodbye = encode(m.Bye(text="the worker is closing"))
        for link in list(self.links.by_link):
            if link < 0:
                self.links.outgoing.add(link, goodbye)
        self.links.outgoing.flush()

    def _post(self, link: LinkId, payload: bytes) -> None:
        """Send a message, or a batch, by the way that the link's messages take by now."""
        handle = self.links.by_link.get(link)
        if handle is None:
            return  # the link was lost: the sessions know, or will
        try:
            if not self.tagged.send(link, payload):
                self.control.send(handle, payload)
        except KVConnectorError as error:
            self.drop_link(link, error)

    def disconnect(self, link: LinkId) -> None:
        """Forget a link, and end its connection, if it has one."""
        handle = self._forget(link)
        if handle is not None:
            self.control.disconnect(handle)
            self._dropped.add(handle)

    def _forget(self, link: LinkId) -> PeerHandle | None:
        self.tagged.remove(link)
        return self.links.remove(link)

    def _pump_s(self, timeout_s: float) -> float:
        """How long to stay in the data path: what the control channel does not show is asked for soon."""
        if self._events or self._commands or self.tagged.has_more:
            return 0.0
        timeout_s = min(timeout_s, MAX_SLEEP_S if self.control.is_settled else BUSY_PUMP_S)
        deadline = self._next_deadline()
        return timeout_s if deadline is None else min(timeout_s, max(0.0, deadline - self.clock()))

    def _next_deadline(self) -> float | None:
        """The first of the sessions'."""
        sessions = [session for session in (self.producer, self.consumer) if session is not None]
        deadlines = [session.next_deadline() for session in sessions]
        return min((at for at in deadlines if at is not None), default=None)

    def peer_of(self, link: LinkId) -> str:
        """The address of the peer at a link, for texts."""
        handle = self.links.by_link.get(link)
        return "a lost peer" if handle is None else self.control.peer_of(handle)

    def _on_message(self, arrival: Received) -> None:
        link = self.links.of_incoming(arrival.handle)
        for message in self._take_messages(link, arrival.payload):
            if isinstance(message, m.Hello | m.HelloReply):
                # this way only: the control channel has proved who the peer is
                self.tagged.set_peer_inbox(link, message.control)
            if isinstance(message, m.Hello) and _is_cuda(self.datapath.export()):
                name = f"{message.geometry.engine_id} rank ({message.pp_rank}, {message.tp_rank})"
                self.links.mappers[link] = name

    def _take_tagged(self, *, progress: bool = False) -> None:
        for link, content in self.tagged.receive(progress=progress):
            if link not in self.links.by_link:
                continue  # the link ended with a message before this one
            if isinstance(content, bytes):
                self._take_messages(link, content)
            else:
                self.drop_link(link, content)

    def _take_messages(self, link: LinkId, payload: bytes) -> tuple[m.Message, ...]:
        """Queue what a peer has said for the sessions; it, unless that ended the link."""
        try:
            messages = decode_batch(payload)
            events = [ev.event_of(link, message) for message in messages]
        except KVConnectorError as error:
            self.drop_link(link, error)
            return ()
        if self.producer is not None:
            self.producer.heard(link, self.clock())
        for message, event in zip(messages, events, strict=True):
            if isinstance(message, m.Heartbeat) and not message.maps_pools:
                self.links.mappers.pop(link, None)  # it could not, or did not want to
            if event is not None:
                self._events.append(event)
            elif isinstance(message, m.Bye):
                left = PeerLostError(f"the peer said goodbye: {message.text}")
                self.drop_link(link, left, has_left=True)
                return ()
        return messages

    def _on_disconnect(self, arrival: Disconnected) -> None:
        link = self.links.by_handle.get(arrival.handle)
        if link is not None:
            self._forget(link)
            self.submit(ev.LinkLost(link, arrival.error))

    def drop_link(self, link: LinkId, error: KVConnectorError, *, has_left: bool = False) -> None:
        """End a connection whose peer misbehaved, was lost, or `has_left` with a goodbye, and tell the sessions. One
        that a session opened ends with its `CloseLink`, after whatever else that ends.
        """
        reason, peer = type(error).__name__, self.peer_of(link)
        if not isinstance(error, PeerLostError):
            self.refusals.note(f"{peer}'s connection", reason, error)
        else:
            self.refusals.counts[reason] += 1
            if has_left or link > 0:  # the loads that fail say why
                logger.debug("%s is lost: %s", peer, error)
            else:
                self.refusals.warn(peer, f"the connection to {peer} is given up: {error}")
        handle = self.links.by_link.get(link)
        if handle is not None and link > 0:
            self._dropped.add(handle)
        elif handle is not None:
            if not has_left:
                # over ZMQ, which outlives what was lost: only the side that connected can close a connection
                with suppress(KVConnectorError):
                    self.control.send(handle, encode(m.Bye(text=error.statement[:4096])))
            self.disconnect(link)
        self.submit(ev.LinkLost(link, error))

    def _handle(self, event: object) -> None:
        """Tell the sessions that the event is for, and queue what they command."""
        now = self.clock()
        kind = type(event)
        link: LinkId | None = getattr(event, "link", None)
        is_producers = kind in _PRODUCER_ORDERS if link is None else link < 0
        for_producer = self.producer if is_producers or kind is ev.Tick else None
        for session in (for_producer, None if is_producers else self.consumer):
            if session is None:
                continue
            try:
                self._commands += session.handle(event, now)
            except KVConnectorError as error:
                self._refuse(event, link, error)

    def _refuse(self, event: object, link: LinkId | None, error: KVConnectorError) -> None:
        """The engine's mistake, a peer's message at the wrong time, or a bug: nothing changed, the rest goes on."""
        peer = "this engine" if link is None else self.peer_of(link)
        self.refusals.note(f"{peer}'s {ev.kind_of(event).__name__}", type(error).__name__, error)
        if isinstance(event, LoadRequest) and isinstance(error, UnknownRequestError):
            # the engine waits for it, and no session will answer
            self._commands.append(cmd.FinishLoad(event.request_id, error))
        elif isinstance(event, HoldRequest) and event.is_complete:
            self._release_refused(event)

    def _release_refused(self, hold: HoldRequest) -> None:
        """A lease that was not granted never ends, so its engine gets the blocks back now; not those of a lease that
        it has under the same name, whose end answers for both.
        """
        if self.producer is None or not self.producer.holds(hold.request_id):
            now = self.clock()
            self._commands.append(
                cmd.ReleaseBlocks(hold.request_id, "aborted", HoldTrace(now, now))
            )


def _never() -> bool:
    return False


def _is_cuda(export: PoolExport | None) -> bool:
    return export is not None and export.device == "cuda"


_ENDINGS = frozenset({cmd.FinishLoad, cmd.ReleaseBlocks, cmd.NotifyPrefillStarted})
"""What tells the engine something of a request."""
_PRODUCER_ORDERS = frozenset({HoldRequest, WithdrawRequest})
_SLOW = frozenset({cmd.OpenExport, cmd.OpenEndpoint, cmd.ConnectBack})
"""What maps a peer's memory, compiles kernels for it, or opens an endpoint to it."""
