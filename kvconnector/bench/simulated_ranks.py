"""The threads, links and data paths around the sessions of a simulated cluster. See `simulation`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Protocol

import msgspec

from kvconnector.agenda import NEVER
from kvconnector.config import ConnectorConfig, PeerConfig
from kvconnector.datapath.staging import slots_within
from kvconnector.errors import KVConnectorError, PeerLostError
from kvconnector.ids import Incarnation
from kvconnector.runtime.directory import answer_to
from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.session import events as ev
from kvconnector.session.lease import Send
from kvconnector.session.link import Link
from kvconnector.session.load import Load, RankRead, RemoteWorker
from kvconnector.session.port import DataPathPort, EnginePort, LinkPort, Ports
from kvconnector.session.trace import LeaseTrace
from kvconnector.topology import EngineGeometry, RankGeometry, Segment
from kvconnector.wire import encode
from kvconnector.wire import messages as m
from kvconnector.wire.packed_geometry import PackedGeometry

CONFIG = ConnectorConfig.from_mapping(
    {"engine_id": "simulated", "role": "consumer", "control": {"insecure": True}}
)
CHUNK_BYTES = CONFIG.chunk_bytes("cuda")
NUM_SLOTS = slots_within(CONFIG.staging.budget_bytes, CHUNK_BYTES, directions=1)
INCARNATION = Incarnation("simulated")
UCX_ADDRESS = bytes(256)
"""It has the length of a UCX address with a few lanes."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of what a cluster does. The defaults come from docs/benchmarks, but a link's are assumptions.

    A driver's thread takes `turn_s` for each event that it handles and each message that it sends: 2 MiB between two
    GPUs take 0.29 ms more than a plain copy, in about six such steps. It takes `endpoint_s` for each endpoint that it
    opens: the first request of two vLLM engines takes 20 to 24 ms more than the next, with an endpoint on either side.
    """

    turn_s: float = 50e-6
    endpoint_s: float = 10e-3
    latency_s: float = 20e-6
    bytes_per_s: float = 400e9 / 8


class World(Protocol):
    """What threads need of the simulation: the time, what things cost, and where to report."""

    costs: Costs
    now: float
    messages: Counter[str]
    message_bytes: int
    listening: dict[str, Thread]
    """By engine, its directory's thread."""

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule `action`."""

    def handle(self, session: ProducerSession | ConsumerSession, event: object, now: float) -> None:
        """Have a rank's session handle an event."""

    def loaded(self, request_id: str, error: KVConnectorError | None, at_s: float) -> None:
        """Record that a consumer rank has ended its part of a request."""

    def released(self, request_id: str) -> None:
        """Record that a producer rank has freed a request's blocks."""


class Thread(ABC):
    """A thread that takes one message after the other. Links that others open have negative numbers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.free_at = 0.0
        self.busy_s = 0.0
        self.links: dict[Link, tuple[Thread, Link, float]] = {}
        """By our end of each link: the other thread, its end, and when the link is up."""
        self.peak_links = 0
        self._incoming = count(1)

    def spend(self, seconds: float) -> None:
        """Work for `seconds`, now or after the thread's present work."""
        self.free_at = max(self.free_at, self.world.now) + seconds
        self.busy_s += seconds

    def connect(self, link: Link, peer: Thread) -> None:
        """Open a link, which takes a round trip."""
        theirs = Link(-next(peer._incoming))
        self.links[link] = peer, theirs, self.free_at + 2 * self.world.costs.latency_s
        peer.links[theirs] = self, link, 0.0
        for thread in (self, peer):
            thread.peak_links = max(thread.peak_links, len(thread.links))

    def close_link(self, link: Link) -> None:
        """End a link, and notify the other side."""
        if link in self.links:
            peer, theirs, _ = self.links.pop(link)
            world = self.world
            world.at(self.free_at + world.costs.latency_s, partial(peer.lost, theirs))

    def lost(self, link: Link) -> None:
        self.links.pop(link, None)

    def send(self, link: Link, message: m.Message) -> None:
        """Send a message, unless the link is gone."""
        if link not in self.links:
            return
        world = self.world
        self.spend(world.costs.turn_s)
        world.messages[type(message).__name__] += 1
        world.message_bytes += len(encode(message))
        peer, theirs, up_at = self.links[link]
        world.at(
            max(self.free_at, up_at) + world.costs.latency_s, partial(peer.arrived, theirs, message)
        )

    @abstractmethod
    def arrived(self, link: Link, message: m.Message) -> None:
        """Take a message."""


class SessionThread(Thread, LinkPort, DataPathPort, EnginePort):
    """A rank's thread. It runs `session`, and stands in for its data path."""

    session: ProducerSession | ConsumerSession

    def __init__(self, world: World, packed: PackedGeometry, holding: RankGeometry) -> None:
        super().__init__(world)
        self.packed = packed
        self.holding = holding
        self.address = f"{packed.engine_id}/{holding.rank}"
        self.interface_free_at = 0.0
        self._tick_at: float | None = None
        world.listening[self.address] = self

    def take(self, event: object) -> None:
        """Have the session handle an event."""
        self.spend(self.world.costs.turn_s)
        self.world.handle(self.session, event, self.free_at)
        self._plan_tick()

    def take_soon(self, event: object, at_s: float | None = None) -> None:
        """Have the session handle an event after the thread's present work, or at `at_s`."""
        self.world.at(at_s or max(self.free_at, self.world.now), partial(self.take, event))

    def arrived(self, link: Link, message: m.Message) -> None:
        if link not in self.links:
            return  # it ended before the message arrived
        event = ev.event_of(link, message)
        if isinstance(self.session, ProducerSession):
            self.session.keep_alive(link, self.world.now)
        self.take(event or ev.LinkLost(link, PeerLostError("the peer ended the connection")))

    def lost(self, link: Link) -> None:
        if self.links.pop(link, None) is not None:
            self.take(ev.LinkLost(link, PeerLostError("the peer disconnected")))

    def _plan_tick(self) -> None:
        deadline = self.session.next_deadline()
        if deadline < (NEVER if self._tick_at is None else self._tick_at):
            self._tick_at = deadline
            self.world.at(max(deadline, self.world.now), partial(self._tick, deadline))

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return  # an earlier one has been planned since
        self._tick_at = None
        if self.session.next_deadline() <= max(self.world.now, self.free_at):
            self.take(ev.Tick())
        else:
            self._plan_tick()


class ProducerRank(SessionThread):
    """A rank that serves reads."""

    def __init__(
        self, world: World, engine: EngineGeometry, packed: PackedGeometry, rank: RankGeometry
    ) -> None:
        reply = m.HelloReply(
            incarnation=INCARNATION,
            transport_address=UCX_ADDRESS,
            max_chunk_bytes=CHUNK_BYTES,
            timeout_ms=m.stated_timeout_ms(CONFIG.peer.timeout_s),
            lease_ms=m.stated_timeout_ms(CONFIG.lease.duration_s),
        )
        super().__init__(world, packed, rank)
        lease, timeout_s = CONFIG.lease, CONFIG.peer.timeout_s
        self.session = ProducerSession(
            engine, rank.rank, reply, lease, timeout_s, ports=Ports(self, self, self)
        )

    def open_endpoint(self, link: Link, hello: m.Hello) -> None:
        self.spend(self.world.costs.endpoint_s)
        self.take_soon(ev.EndpointOpened(link))
        consumer, theirs = self._consumer(link)
        consumer.take_soon(ev.WarmedUp(theirs), self.free_at + self.world.costs.latency_s)

    def release(
        self,
        request_id: str,
        outcome: str,
        trace: LeaseTrace | None,
        error: KVConnectorError | None = None,
    ) -> None:
        self.world.released(request_id)

    def _consumer(self, link: Link) -> tuple[ConsumerRank, Link]:
        consumer, theirs, _ = self.links[link]
        assert isinstance(consumer, ConsumerRank)  # only these greet, and read
        return consumer, theirs

    def start_send(self, send: Send) -> None:
        """Have both interfaces carry the read, after those before it."""
        costs, read_id = self.world.costs, send.read.read_id
        consumer, _ = self._consumer(send.link)
        start = max(self.free_at, self.interface_free_at, consumer.interface_free_at)
        end = start + consumer.nbytes_of(read_id) / costs.bytes_per_s
        self.interface_free_at = consumer.interface_free_at = end
        self.world.at(end, partial(self.take, ev.SendOver(send)))
        self.world.at(end + costs.latency_s, partial(consumer.received, read_id))


class ConsumerRank(SessionThread):
    """A rank that reads into staging slots."""

    def __init__(
        self,
        world: World,
        engine: EngineGeometry,
        packed: PackedGeometry,
        rank: RankGeometry,
        peer: PeerConfig,
    ) -> None:
        element_orders = {
            (index, family): "NHD"
            for index, group in enumerate(rank.groups)
            for family in range(len(group.families))
        }
        super().__init__(world, packed, rank)
        self.session = ConsumerSession(
            engine,
            rank.rank,
            peer,
            Ports(self, self, self),
            chunk_bytes=CHUNK_BYTES,
            element_orders=element_orders,
        )
        self._timeout_s = peer.timeout_s
        self._num_free_slots = NUM_SLOTS
        self._waiting: deque[RankRead] = deque()
        self._with_slots: dict[int, RankRead] = {}
        """Reads that have slots, by their numbers."""
        self._over: set[RankRead] = set()
        self.peak_slots = 0

    def nbytes_of(self, read_id: int) -> int:
        """Return the bytes of a read that has slots; a stopped read may have lost them."""
        return self._with_slots[read_id].source.total_bytes if read_id in self._with_slots else 0

    def received(self, read_id: int) -> None:
        if read_id not in self._with_slots:
            return
        read = self._with_slots[read_id]
        if read.is_stopped:
            self._drained(read)
        else:
            self._free(read)
            self.take(ev.ReceiveFinished(read))

    def _drained(self, read: RankRead) -> None:
        if read.read_id in self._with_slots:
            self._free(read)
            self.take_soon(ev.ReceiveDrained(read))

    def _free(self, read: RankRead) -> None:
        self._num_free_slots += self._with_slots.pop(read.read_id).window
        self._admit()

    def _admit(self) -> None:
        """Give slots to reads in their order: at least one to each, at most its window, and no more than are free."""
        while self._waiting and self._num_free_slots:
            read = self._waiting.popleft()
            read.window = min(CONFIG.staging.window, read.source.num_chunks, self._num_free_slots)
            read.first_tag = read.read_id << m.CHUNK_TAG_BITS
            self._num_free_slots -= read.window
            self.peak_slots = max(self.peak_slots, NUM_SLOTS - self._num_free_slots)
            self._with_slots[read.read_id] = read
            self.take_soon(ev.ReceivePosted(read))

    def open_link(self, link: Link, address: str, public_key: str, version: int) -> None:
        self.connect(link, self.world.listening[address])

    def send_hello(
        self, link: Link, segments: tuple[Segment, ...], max_message_bytes: int = 0
    ) -> None:
        self.send(link, self._hello(segments))

    def connect_back(self, worker: RemoteWorker, reply: m.HelloReply) -> None:
        self.spend(self.world.costs.endpoint_s)

    def start_receive(self, read: RankRead) -> None:
        self._waiting.append(read)
        self._admit()

    def stop_receive(self, read: RankRead) -> None:
        self.take_soon(ev.ReceiveStopped(read))
        if read in self._over:
            self._drained(read)
        elif read in self._waiting:
            self._waiting.remove(read)
            self.take_soon(ev.ReceiveDrained(read))

    def drain_receive(self, read: RankRead, sent_chunks: int | None) -> None:
        if not sent_chunks:
            self._over.add(read)
            if read.is_stopped:
                self._drained(read)

    def finish_load(self, load: Load, error: KVConnectorError | None) -> None:
        self.world.loaded(load.request_id, error, self.free_at)

    def _hello(self, segments: tuple[Segment, ...]) -> m.Hello:
        return m.Hello(
            geometry=self.packed,
            pp_rank=self.holding.pp_rank,
            tp_rank=self.holding.tp_rank,
            incarnation=INCARNATION,
            transport_address=UCX_ADDRESS,
            warm_up_tag=1,
            warm_up_bytes=CHUNK_BYTES,
            segments=segments,
            timeout_ms=m.stated_timeout_ms(self._timeout_s),
        )


class SimulatedDirectory(Thread):
    """A producer engine's directory service."""

    def __init__(self, world: World, packed: PackedGeometry, ranks: Sequence[ProducerRank]) -> None:
        super().__init__(world)
        entries = tuple(
            m.WorkerEntry(
                pp_rank=rank.holding.pp_rank,
                tp_rank=rank.holding.tp_rank,
                control_address=rank.address,
                public_key="",
                incarnation=INCARNATION,
            )
            for rank in ranks
        )
        self._directory = m.Directory(geometry=packed, workers=entries)

    def arrived(self, link: Link, message: m.Message) -> None:
        assert isinstance(message, m.DirectoryRequest)  # only these messages are sent here
        self.spend(self.world.costs.turn_s)
        self.send(link, answer_to(message, self._directory))
