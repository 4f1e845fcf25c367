"""`sessions`: what one event costs a worker while very many requests are queued, and the longest one.

A producer's and a consumer's session talk to each other in this process; nothing is sent and no byte is moved. A router
asks for all requests at once. A few are served, an interval of heartbeats passes, and the consumer gives up the rest.
What Python's garbage collector takes to go through what the requests are made of is a figure of its own.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.results import CaseResult, Measurement, ShowProgress
from kvconnector.bench.shapes import EngineShape, ModelShape, engine_geometry
from kvconnector.config import ConnectorConfig
from kvconnector.ids import EngineAddress, EngineId
from kvconnector.layout import NO_TOKENS, GroupBlocks
from kvconnector.planning import Segment
from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    WantRequest,
)
from kvconnector.wire import decode, encode
from kvconnector.wire import messages as m
from kvconnector.wire.packed_geometry import PackedGeometry

COUNTS = (100, 1_000, 10_000, 100_000)
NUM_TOKENS = 256
CHUNK_BYTES = 2 << 20
SECRET = "5" * 32
CONFIG = ConnectorConfig.from_mapping({"engine_id": "sessions", "control": {"insecure": True}})
ADDRESS = EngineAddress(EngineId("p"), "tcp://p")
DIRECTORY, TO_PRODUCER, TO_CONSUMER = LinkId(1), LinkId(2), LinkId(-1)


def run(options: BenchOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Every number of requests, offered one after the other and streamed."""
    for is_streamed in (False, True):
        for count in COUNTS:
            how = (
                "asked at both engines at once"
                if is_streamed
                else "computed before they are wanted"
            )
            case = f"{count} requests, {how}"
            progress(case)
            pair = _Pair(options.model, count, is_streamed=is_streamed)
            yield CaseResult(case, (pair.measure(options.iterations),))


class _Pair:
    """The two sessions, and how long each event took of this thread's time."""

    def __init__(self, model: ModelShape, count: int, *, is_streamed: bool) -> None:
        shape = EngineShape(block=16)
        theirs, ours = (engine_geometry(model, shape, name) for name in ("p", "d"))
        rank = ours.ranks[0]
        reply = m.HelloReply(
            incarnation="one",
            max_chunk_bytes=CHUNK_BYTES,
            timeout_ms=m.stated_timeout_ms(CONFIG.peer.timeout_s),
            lease_ms=m.stated_timeout_ms(CONFIG.lease.duration_s),
        )
        self.producer = ProducerSession(
            theirs, rank.rank, reply, CONFIG.lease, CONFIG.peer.timeout_s
        )
        orders = {
            (index, family): "NHD"
            for index, group in enumerate(rank.groups)
            for family in range(len(group.families))
        }
        self.consumer = ConsumerSession(
            ours, rank.rank, CONFIG.peer, chunk_bytes=CHUNK_BYTES, orders=orders
        )
        self._geometries = PackedGeometry.of(theirs), PackedGeometry.of(ours)
        self._is_streamed = is_streamed
        self._names = [f"request-{number}" for number in range(count)]
        self._blocks = (GroupBlocks.of(range(NUM_TOKENS // shape.block)),)
        self._now = 0.0
        self._queue: deque[tuple[ProducerSession | ConsumerSession, object]] = deque()
        self._took_s: list[float] = []
        self._collecting_s = self._collection_began = 0.0
        self._longest_collection_s = 0.0
        self._loaded: set[str] = set()
        self._released: set[str] = set()

    def measure(self, num_served: int) -> Measurement:
        """The times of the events in which a few requests are served, and what else there is.

        Raises:
            ResultMismatchError: a request was not served, or not given back.
        """
        gc.collect()
        gc.freeze()  # as engines do: the rest of the process is no matter
        gc.callbacks.append(self._collected)
        try:
            return self._measure(num_served)
        finally:
            gc.callbacks.remove(self._collected)
            gc.unfreeze()

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._collection_began = now
        else:
            took_s = now - self._collection_began
            self._collecting_s += took_s
            self._longest_collection_s = max(self._longest_collection_s, took_s)

    def _measure(self, num_served: int) -> Measurement:
        self._ask()
        asking, self._took_s = self._took_s, []
        served = self._names[:: max(1, len(self._names) // num_served)]
        for name in served:
            self._serve(name)
        serving, self._took_s = self._took_s, []
        if self._loaded != {*served}:
            raise ResultMismatchError("requests were not loaded", loaded=len(self._loaded))
        self._pass_an_interval()
        beating, self._took_s = self._took_s, []
        for name in self._names:
            if name not in self._loaded:
                self._queue.append((self.consumer, DropRequest(name)))
        self._settle()
        if self._is_streamed:  # their leases have no blocks yet, so none is given back
            self._released |= {name for name in self._names if name not in self._loaded}
        if len(self._released) != len(self._names):
            raise ResultMismatchError("leases were not given back", released=len(self._released))
        longest = max(max(part) for part in (asking, serving, beating, self._took_s) if part)
        figures = {
            "longest event_s": longest,
            "longest garbage collection_s": self._longest_collection_s,
            "heartbeats of an interval_s": sum(beating),
            "asking for all_s": sum(asking),
            "giving up all_s": sum(self._took_s),
        }
        return Measurement("kvconnector", "ours", tuple(serving), figures=figures)

    def _ask(self) -> None:
        """Both engines are asked for all requests, before they have met."""
        for name in self._names:
            want = WantRequest(name, name, SECRET, ADDRESS, self._is_streamed)
            self._queue.append((self.consumer, want))
            begun = GrowRequest(name, name, SECRET, (GroupBlocks.of(()),), NO_TOKENS)
            self._queue.append((self.producer, begun if self._is_streamed else self._held(name)))
        self._settle()

    def _serve(self, name: str) -> None:
        if self._is_streamed:
            self._queue.append((self.producer, self._held(name)))
            self._settle()
        remote = () if self._is_streamed else self._blocks
        load = LoadRequest(name, ((0, NUM_TOKENS),), self._blocks, remote)
        self._queue.append((self.consumer, load))
        self._settle()

    def _pass_an_interval(self) -> None:
        until = self._now + CONFIG.peer.heartbeat_interval_s
        while (at := self._next_deadline()) <= until:
            self._now = max(self._now, at)
            self._settle()
        self._now = until

    def _held(self, name: str) -> HoldRequest:
        return HoldRequest(name, name, SECRET, self._blocks, NUM_TOKENS)

    def _next_deadline(self) -> float:
        deadlines = self.producer.next_deadline(), self.consumer.next_deadline()
        return min((at for at in deadlines if at is not None), default=cmd.NEVER)

    def _settle(self) -> None:
        """Handle what is queued, and what follows from it, until nothing is due."""
        while self._queue or self._next_deadline() <= self._now:
            if not self._queue:
                self._queue += [(self.producer, ev.Tick()), (self.consumer, ev.Tick())]
            session, event = self._queue.popleft()
            if isinstance(event, ev.FromPeer) and session is self.producer:
                self.producer.keep_alive(event.link, self._now)
            began, collecting_s = time.thread_time(), self._collecting_s
            commands = session.handle(event, self._now)
            session.next_deadline()
            collecting_s = self._collecting_s - collecting_s
            self._took_s.append(time.thread_time() - began - collecting_s)
            for command in commands:
                self._carry_out(session, command)

    def _carry_out(self, session: ProducerSession | ConsumerSession, command: cmd.Command) -> None:
        match command:
            case cmd.SendMessage(link, message):
                self._send(session, link, message)
            case cmd.ExpectWarmUp(link, segments):
                self._send(session, link, self._hello(segments))
            case cmd.OpenEndpoint(link):
                self._queue.append((self.producer, ev.EndpointOpened(link)))
                self._queue.append((self.consumer, ev.WarmedUp(TO_PRODUCER)))
            case cmd.StartReceive(read_id=read_id):
                self._queue.append((self.consumer, ev.ReceivePosted(read_id, 4, read_id << 20)))
            case cmd.StartSend(link, read):
                self._queue.append((self.producer, ev.SendFinished(link, read.read_id)))
                self._queue.append((self.consumer, ev.ReceiveFinished(read.read_id)))
            case cmd.FinishLoad(name, error):
                if error is None:
                    self._loaded.add(name)
            case cmd.ReleaseBlocks(name):
                self._released.add(name)

    def _send(
        self, session: ProducerSession | ConsumerSession, link: LinkId, message: m.Message
    ) -> None:
        if isinstance(message, m.DirectoryRequest):
            entry = m.WorkerEntry(
                pp_rank=0, tp_rank=0, control_address="tcp://p0", public_key="", incarnation="one"
            )
            directory = m.Directory(geometry=self._geometries[0], workers=(entry,))
            self._queue.append((self.consumer, ev.FromPeer(DIRECTORY, directory)))
            return
        arrived = decode(encode(message))
        if session is self.consumer:
            self._queue.append((self.producer, ev.FromPeer(TO_CONSUMER, arrived)))
        else:
            self._queue.append((self.consumer, ev.FromPeer(TO_PRODUCER, arrived)))

    def _hello(self, segments: tuple[Segment, ...]) -> m.Hello:
        return m.Hello(
            geometry=self._geometries[1],
            pp_rank=0,
            tp_rank=0,
            incarnation="two",
            transport_address=b"d",
            warm_up_tag=1,
            warm_up_bytes=8,
            segments=segments,
            timeout_ms=m.stated_timeout_ms(CONFIG.peer.timeout_s),
        )
