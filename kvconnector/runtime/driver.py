"""The driver: a worker's only loop. It is the only owner of the links, the data path and the sessions.

Theory of operation
-------------------
One turn: wait in the data path until something happens; take new work (the data path's events, messages over the
transport, then those from the control channel and the engine's orders); give each to the sessions; send each peer its
messages, as one batch. What has ended or came over the transport is handled before anything else is looked at, since
a peer or the engine waits for it. Sessions are pure: they get events and the time, and call their ports (see
`executor`). The consequences of a call come back as events of the same turn, until nothing is queued.

Threads and ownership. A driver is not bound to a thread: whoever holds the driver lock (see
kernels/native/driver_lock.c) calls it. That is the driver's thread, in `turn`, or an engine's thread, in
`progress_inline`, while the former sleeps or waits for the GIL. Only this owner calls a driver's methods, except `put`,
which appends orders to a deque, and `in_flight`, which copies what it reads because the owner may change it. Results
leave by the outbox.

Clock. The driver reads `clock` once per event, and the sessions' deadlines are times of that clock. When the first
deadline has passed, the sessions get a `Tick`; a turn never sleeps beyond that.

Blocking. Only `DataPath.pump` sleeps, without the GIL. Greetings take long (they map a peer's memory, compile kernels,
open endpoints): an engine's thread stops before the first event in `_SLOW` and leaves it, and all after it, to the
driver's thread, so order is kept. A turn decodes messages and handles events for `pacing.WORK_S` at most, then passes
through the data path, which releases the GIL.

Fair shares. `Links` yields one message of each peer in turn, and keeps the rest. The driver queues few of them at a
time (`MAX_QUEUED_EVENTS`, `MAX_TAKEN_BYTES`). So however much one peer has sent, another peer's message waits for one
of it, and the engine's orders and reports of the data path wait for a bounded number.

Order. A peer's messages count before its loss, which the control channel reports after its own, and `Links` after those
that came over the transport. The driver handles events in the order in which it took them. It closes a link after it
has sent the messages that a session left for it.

What breaks if this changes: a second caller at a time corrupts everything here; a call that waits stops all transfers
of the worker, and the engine too if it is inline; an event that bypasses the queue may overtake one that a session
relies on.

Failure. An unexpected exception in a session ends one request or one link, see `session.containment`; one in a peer's
message, before a session has it, ends the link. A `WorkerFault`, and any exception of the data path or the transport,
ends the worker, see `driver_thread`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, get_args

from kvconnector.config import ConnectorConfig
from kvconnector.control.zmq import ControlChannel
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump import pacing
from kvconnector.errors import KVConnectorError, PeerLostError, UnknownRequestError
from kvconnector.ids import Incarnation, Rank
from kvconnector.runtime.cuda_context import CudaContext
from kvconnector.runtime.executor import hello_of, hello_reply, session_ports
from kvconnector.runtime.intake import Blocks, orders_with_blocks
from kvconnector.runtime.links import Links
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import ConsumerSession, LoadInFlight, ProducerSession
from kvconnector.session import events as ev
from kvconnector.session.containment import failure_of, guarded
from kvconnector.session.link import Link, kind_of
from kvconnector.session.orders import HoldRequest, LoadRequest, Order, ProducerOrder
from kvconnector.topology import EngineGeometry
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire import decode, messages_of
from kvconnector.wire import messages as m

if TYPE_CHECKING:
    import torch

    from kvconnector.datapath.pump.datapath import DataPath

logger = logging.getLogger(__name__)

PostedStep: TypeAlias = tuple[Sequence[Order], list[Blocks], "torch.cuda.Event | None"]
"""A step's orders, the blocks of their requests, and the mark after which these may be copied."""

MAX_ROUNDS = 64
"""A data path with many small chunks always has something to report, so the control channel and the engine's orders
must not wait for it to fall silent.
"""
MAX_QUEUED_EVENTS = 128
"""With this many events queued, a turn takes no more messages from peers. A turn's time is enough for about as many."""
MAX_TAKEN_BYTES = 256 << 10
"""After this many bytes of messages a turn takes no more of them before it has handled these."""


class Driver:
    """Runs one worker's sessions. `turn` is the loop's body; the caller decides in which thread it runs.

    `producer` or `consumer` is None where the worker has only the other role. On a GPU, `context` marks the end of the
    work in the engine's stream that an order's blocks depend on.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        engine: EngineGeometry,
        rank: Rank,
        incarnation: Incarnation,
        pools: Pools,
        control: ControlChannel,
        transport: UcxTransport,
        datapath: DataPath,
        outbox: Outbox,
        context: CudaContext | None = None,
    ) -> None:
        self.datapath = datapath
        datapath.state.watch(control.fd)
        self.clock = datapath.clock
        self._events = datapath.events  # the consequences of a session's call come here, too
        self.links = Links(control, transport, config.control, report=self._events.append)
        self.ports = session_ports(
            self.links,
            datapath,
            outbox,
            hello=hello_of(engine, rank, incarnation, config, transport),
            slow_load_s=config.slow_load_s,
        )
        self.producer: ProducerSession | None = None
        self.consumer: ConsumerSession | None = None
        if config.role != "consumer":
            self._make_reply = partial(hello_reply, config, pools, transport, datapath, incarnation)
            self.producer = ProducerSession(
                engine,
                rank,
                self._make_reply(),
                config.lease,
                config.peer.timeout_s,
                named_within_s=config.peer.heartbeat_interval_s,
                ports=self.ports,
            )
        if config.role != "producer":
            self.consumer = ConsumerSession(
                engine,
                rank,
                config.peer,
                self.ports,
                chunk_bytes=config.chunk_bytes(pools.device, pools.largest_row_bytes),
                element_orders=pools.element_orders(),
                stream=config.stream,
            )
        self.num_turns = 0
        """Turns that were begun. A thread that drives begins one after `pacing.MAX_SLEEP_S` at most."""
        self._outbox = outbox
        self._context = context
        self._posted_steps: deque[PostedStep] = deque()
        self._stop_after_report = False
        self._late_at = 0.0
        self._is_ticking = False
        self._is_hurrying = False
        """True if the last look ended early, so that the first chunk of a send was posted sooner."""

    def __repr__(self) -> str:
        return f"<Driver {self.num_queued} events, {self.links!r}>"

    def in_flight(self) -> tuple[LoadInFlight, ...]:
        """Return the loads that are being read. Any thread may call this."""
        return () if self.consumer is None else self.consumer.in_flight(self.clock())

    @property
    def num_queued(self) -> int:
        """Number of events that no session has seen yet."""
        return len(self._events) + len(self._posted_steps)

    def withdraw_pools(self) -> None:
        """Let consumers unmap the pools' memory if it is mapped segment by segment, before the engine takes it away.
        Until they have they are among `Links.mappers`. Idempotent.
        """
        if self.datapath.withdraw():
            self._change_reply()

    def renew_pools(self) -> None:
        """Let consumers map the pools' memory, which is new or has grown. Idempotent."""
        if self.datapath.renew():
            self._change_reply()

    def _change_reply(self) -> None:
        assert self.producer is not None  # otherwise the data path exports nothing
        reply = self._make_reply()
        for link in self.producer.change_reply(reply, self.links):
            try:
                self.ports.links.send(link, reply)
            except KVConnectorError as error:
                self.links.lose(link, error)  # it would keep using what it has mapped
        self.links.flush()

    def put(self, orders: Sequence[Order]) -> None:
        """Leave orders for the next turn; for the engine's thread. Their blocks are copied after the work queued on its
        current stream.
        """
        blocks: list[Blocks] = []
        if self._context is not None:
            orders, blocks = orders_with_blocks(orders, self._outbox.note_contained)
        mark = self._context.make_mark() if self._context is not None and blocks else None
        self._posted_steps.append((orders, blocks, mark))

    def turn(self, timeout_s: float, *, stop_after_report: bool = False) -> None:
        """Wait at most `timeout_s` for work, and do it. With `stop_after_report`, for an engine's thread, it leaves the
        rest for the next turn as soon as it has reported something to the engine.
        """
        self.num_turns += 1
        self._stop_after_report = stop_after_report
        self.datapath.pump(self.pump_s(timeout_s))
        self._late_at = self.clock() + pacing.WORK_S
        self._look()

    def progress_inline(self, limit_s: float, *, orders_only: bool = False) -> None:
        """Do the work that there is, without waiting for more, in an engine's thread.

        It leaves to the driver's thread the first event of `_SLOW` and all events after it, work that is not done after
        `limit_s`, and work after a report to the engine.

        Args:
            limit_s: The most seconds for which to handle events.
            orders_only: Handle only the engine's orders and their consequences.
        """
        self.num_turns += 1
        self._stop_after_report = True
        self._late_at = self.clock() + limit_s
        if orders_only:
            self._take_orders()
            self._work(inline=True)
        else:
            self.datapath.poll_once()
            self._look(inline=True)
        if not self._outbox.is_filled and self.datapath.poll_once():
            self._work(inline=True)

    def pump_s(self, timeout_s: float) -> float:
        """Return how long to stay in the data path, in seconds: not long while the control channel may have messages
        that its descriptor does not show.
        """
        if self._events or self._posted_steps or self.links.with_unsent or self.links.has_arrived:
            return 0.0
        is_settled = self.links.control.is_settled
        longest_s = pacing.MAX_SLEEP_S if is_settled else pacing.LOOK_AGAIN_S
        timeout_s = min(timeout_s, longest_s)
        return min(timeout_s, max(0.0, self._deadline() - self.clock()))

    def _look(self, *, inline: bool = False) -> None:
        """Take the work that is there, and handle it. Work that others wait for comes first: reads that have ended,
        then messages over the transport, most of which ask for a read. Looking at everything else takes as long as
        beginning a read, and longer than a GPU takes to pack the read's first chunk, which the loop posts. So after
        beginning one, every other look ends at once. What it has left keeps the loop's next run short, see `pump_s`.
        """
        events, num_begun = self._events, self.datapath.sends.num_begun
        self.datapath.step(may_check=bool(events))
        if (events or self.links.with_unsent) and not self._work(inline=inline, ticks=False):
            return
        self.datapath.lock.clear_pending()
        self._take_arrived(self.links.poll_transport())
        if events and not self._work(inline=inline, ticks=False):
            return
        self._is_hurrying = not self._is_hurrying and self.datapath.sends.num_begun > num_begun
        if self._is_hurrying:
            return
        self._take_arrived(self.links.poll())
        self._take_orders()
        self._tick_if_due()  # also if peers' messages take all of every turn
        self._work(inline=inline)

    def _take_arrived(self, arrived: Iterable[tuple[Link, bytes]]) -> None:
        """Queue messages for the sessions, as many as there is room and time for. The links keep the rest."""
        if len(self._events) >= MAX_QUEUED_EVENTS:
            return
        nbytes = 0
        for link, payload in arrived:
            nbytes += len(payload)
            message = self._take_message(link, payload)
            if type(message) in _GREETINGS:
                guarded(partial(self._lose, link), self._greet, link, message)
            is_full = len(self._events) >= MAX_QUEUED_EVENTS or nbytes >= MAX_TAKEN_BYTES
            if is_full or self.clock() > self._late_at:
                break

    def _take_orders(self) -> None:
        """Queue the orders that the engine's thread has left."""
        while self._posted_steps:
            orders, blocks, mark = self._posted_steps[0]
            if mark is not None and self._context is not None:
                self.datapath.copies.order_after(mark, blocks)
                self._context.give_back(mark)
            self._events += orders
            self._posted_steps.popleft()  # last, so that `num_queued` always counts them

    def _work(self, *, inline: bool, ticks: bool = True) -> bool:
        """Handle queued events and their consequences, until nothing moves or the time is over, and send the sessions'
        messages. If `ticks`, deadlines that have passed count, too.

        Returns False if the caller must stop: inline, before an event that takes long; with `stop_after_report`, after
        a report to the engine.
        """
        events, num_reports = self._events, self._outbox.num_reports
        for _ in range(MAX_ROUNDS):
            while events and (now := self.clock()) <= self._late_at:
                if inline and kind_of(events[0]) in _SLOW:
                    self.links.flush()
                    return False
                had_unsent = bool(self.links.with_unsent)
                self._handle(events.popleft(), now)
                if self._stop_after_report and self._outbox.num_reports > num_reports:
                    if not events:
                        # the loop reports an ending only once, so queue it for the driver's thread
                        self.datapath.step()
                    if had_unsent:  # otherwise all messages are about ended transfers, and can wait
                        self.links.flush()
                    return False
            self.links.flush()
            if events:
                break  # it is late
            self.datapath.step()
            if ticks:
                self._tick_if_due()
            if not events:
                break
        return True

    def _tick_if_due(self) -> None:
        """Queue a tick, after the events that came before the deadline, unless one is queued."""
        if not self._is_ticking and self._deadline() <= self.clock():
            self._is_ticking = True
            self._events.append(ev.Tick())

    def _deadline(self) -> float:
        """Return the sessions' earliest deadline."""
        sessions = (self.producer, self.consumer)
        return min([each.next_deadline() for each in sessions if each is not None])

    def _lose(self, link: Link, error: Exception) -> None:
        """End a link because of an unexpected exception."""
        self._outbox.note_contained(f"the connection to {self.links.peer_of(link)}", error)
        self.links.lose(link, failure_of(error))

    def _greet(self, link: Link, greeting: m.Hello | m.HelloReply) -> None:
        """Take the fields of a greeting that are for links."""
        self.links.limit_messages(link, greeting.max_message_bytes)
        self.links.set_peer_inbox(link, greeting.control)
        if isinstance(greeting, m.Hello):
            rank = f"({greeting.pp_rank}, {greeting.tp_rank})"
            self.links.name_consumer(link, f"{greeting.geometry.engine_id} rank {rank}")

    def _take_message(self, link: Link, payload: bytes) -> m.Message | None:
        """Queue a peer's message for the sessions, the first one if they are a batch. Returns it, None if it ended the
        link.
        """
        try:
            return self._queue_message(link, payload)
        except KVConnectorError as error:
            self.links.lose(link, error)
        except Exception as error:
            self._lose(link, error)
        return None

    def _queue_message(self, link: Link, payload: bytes) -> m.Message | None:
        message = decode(payload)
        if type(message) is m.Batch:
            first, *others = messages_of(message)
            self.links.put_back(link, others)
            message = decode(first)
        event = ev.event_of(link, message)
        if self.producer is not None and link.number < 0:
            self.producer.keep_alive(link, self.clock())
        if type(message) is m.Heartbeat:
            # False: it could not map our pools, chose not to, or has unmapped them
            self.links.note_mapping(link, may_map=message.maps_pools)
        if event is not None:
            self._events.append(event)
        elif isinstance(message, m.Bye):
            left = PeerLostError(f"the peer ended the connection: {message.text}")
            self.links.lose(link, left, has_left=True)
            return None
        return message

    def _handle(self, event: object, now: float) -> None:
        """Hand an event to the sessions that it is for."""
        kind = type(event)
        if kind is ev.Tick:
            self._is_ticking = False
        link: Link | None = getattr(event, "link", None)
        is_producers = kind in _PRODUCER_EVENTS if link is None else link.number < 0
        for_producer = self.producer if is_producers or kind is ev.Tick else None
        for session in (for_producer, None if is_producers else self.consumer):
            if session is None:
                continue
            try:
                session.handle(event, now)
            except KVConnectorError as error:
                self._refuse(event, link, error)

    def _refuse(self, event: object, link: Link | None, error: KVConnectorError) -> None:
        """Log an event that a session refused: the engine's mistake, a peer's message at the wrong time, or a bug. The
        session has not changed, and continues.
        """
        peer = "this engine" if link is None else self.links.peer_of(link)
        self.links.refusals.note(f"{peer}'s {kind_of(event).__name__}", type(error).__name__, error)
        if isinstance(event, LoadRequest) and isinstance(error, UnknownRequestError):
            # the engine waits for the request's end, and no session will report it
            self._outbox.load_ended(event.request_id, error)
        elif isinstance(event, HoldRequest) and not (
            self.producer is not None and self.producer.holds(event.request_id)
        ):
            # a lease that was not granted never ends, so its engine gets the blocks back now, unless it has another
            # lease under that name, whose end is reported for both
            self._outbox.released(event.request_id, "aborted", error=error)


_GREETINGS = frozenset({m.Hello, m.HelloReply})
_PRODUCER_EVENTS = frozenset({*get_args(ProducerOrder), ev.SendOver})
"""Events without a link that are for the producer's session; the others are for the consumer's."""
_SLOW = frozenset({m.Directory, m.Hello, m.HelloReply, ev.PoolsUnmapped})
"""Messages whose handling may map a peer's memory, compile kernels for it, or open connections to it."""
