"""A cluster in virtual time: the real sessions of every rank, with models in place of threads, links and copies.

A rank's thread handles one event after the other, a link has a latency, and a rank's network interface carries one read
after the other. The sessions decide which messages go where and when; nothing is sent.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import msgspec
import numpy as np

from kvconnector.bench.results import fewest_samples
from kvconnector.bench.shapes import EngineShape, ModelShape, engine_geometry
from kvconnector.bench.simulated_ranks import (
    ConsumerRank,
    Costs,
    ProducerRank,
    SimulatedDirectory,
    Thread,
)
from kvconnector.config import PeerConfig
from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineAddress, EngineId
from kvconnector.planning import GroupBlocks
from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.session.orders import HoldRequest, LoadRequest, WantRequest
from kvconnector.wire.packed_geometry import PackedGeometry

SECRET = "5" * 32


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that engine `producer` has computed at `at_s`, when engine `consumer` asks for it."""

    at_s: float
    num_tokens: int
    producer: int
    consumer: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a simulation, of any number. Idle ones disconnect after `idle_timeout_s`."""

    model: ModelShape
    prefill: EngineShape
    decode: EngineShape
    costs: Costs = Costs()
    idle_timeout_s: float = PeerConfig().idle_timeout_s


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation, whose last request and lease ended after `elapsed_s`.

    `failures` counts requests by error, `messages` control messages by kind. `peak_links` is the largest number of
    connections of a thread, `peak_slots` that of staging slots in use on a consumer rank, and `busiest_s` the time that
    the busiest thread worked. The times to completion are None if no request succeeded.
    """

    engines: int
    requests: int
    succeeded: int
    released: int
    failures: dict[str, int]
    messages: dict[str, int]
    message_bytes: int
    peak_links: int
    peak_slots: int
    busiest_s: float
    elapsed_s: float
    p50_ms: float | None
    p99_ms: float | None

    @property
    def messages_per_request(self) -> float:
        """Control messages of all kinds, including heartbeats and greetings."""
        return sum(self.messages.values()) / self.requests

    @property
    def messages_per_s(self) -> float:
        """Control messages of all kinds in each second of the run."""
        return sum(self.messages.values()) / self.elapsed_s


class Simulation:
    """Runs one cluster until every request has ended on all ranks and every lease is over."""

    def __init__(
        self,
        cluster: Cluster,
        requests: Sequence[Request],
        *,
        num_producers: int = 1,
        num_consumers: int = 1,
    ) -> None:
        self.costs = cluster.costs
        self.now = 0.0
        self.messages: Counter[str] = Counter()
        self.message_bytes = 0
        self.listening: dict[str, Thread] = {}
        self._numbers = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._requests = requests
        self._open = {f"r{i}": len(cluster.decode.ranks) for i in range(len(requests))}
        self._held = {f"r{i}": len(cluster.prefill.ranks) for i in range(len(requests))}
        self._errors: dict[str, KVConnectorError] = {}
        self._completion_s: dict[str, float] = {}
        self._model = cluster.model
        self._shapes = cluster.prefill, cluster.decode
        self.producers: list[list[ProducerRank]] = []
        for i in range(num_producers):
            engine = engine_geometry(cluster.model, cluster.prefill, f"p{i}")
            packed = PackedGeometry.of(engine)
            ranks = [ProducerRank(self, engine, packed, rank) for rank in engine.ranks]
            self.producers.append(ranks)
            self.listening[f"p{i}"] = SimulatedDirectory(self, packed, ranks)
        peer = PeerConfig(idle_timeout_s=cluster.idle_timeout_s)
        self.consumers: list[list[ConsumerRank]] = []
        for i in range(num_consumers):
            engine = engine_geometry(cluster.model, cluster.decode, f"d{i}")
            packed = PackedGeometry.of(engine)
            self.consumers.append(
                [ConsumerRank(self, engine, packed, rank, peer) for rank in engine.ranks]
            )
        for i, request in enumerate(requests):
            self.at(request.at_s, partial(self._ask, f"r{i}", request))

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule `action`."""
        heapq.heappush(self._agenda, (time_s, next(self._numbers), action))

    def advance(self, until_s: float) -> None:
        """Run all actions that are due until `until_s`."""
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = until_s

    def handle(self, session: ProducerSession | ConsumerSession, event: object, now: float) -> None:
        """Have a rank's session handle an event."""
        session.handle(event, now)

    def run(self) -> Outcome:
        """Simulate to the end. The same requests have the same outcome."""
        while (self._open or self._held) and self._agenda:
            self.advance(self._agenda[0][0])
        consumers = [rank for engine in self.consumers for rank in engine]
        threads: list[Thread] = [*self.listening.values(), *consumers]
        times_ms = [time_s * 1e3 for time_s in self._completion_s.values()]
        return Outcome(
            engines=len(self.producers) + len(self.consumers),
            requests=len(self._requests),
            succeeded=len(self._completion_s),
            released=len(self._requests) - len(self._held),
            failures=dict(Counter(type(error).__name__ for error in self._errors.values())),
            messages=dict(sorted(self.messages.items())),
            message_bytes=self.message_bytes,
            peak_links=max(thread.peak_links for thread in threads),
            peak_slots=max(rank.peak_slots for rank in consumers),
            busiest_s=max(thread.busy_s for thread in threads),
            elapsed_s=self.now,
            p50_ms=float(np.percentile(times_ms, 50)) if times_ms else None,
            p99_ms=float(np.percentile(times_ms, 99))
            if len(times_ms) >= fewest_samples(99)
            else None,
        )

    def loaded(self, request_id: str, error: KVConnectorError | None, at_s: float) -> None:
        """Record that a consumer rank has ended its part of a request."""
        if error is not None:
            self._errors.setdefault(request_id, error)
        self._open[request_id] -= 1
        if not self._open[request_id]:
            del self._open[request_id]
            if request_id not in self._errors:
                asked_s = self._requests[int(request_id[1:])].at_s
                self._completion_s[request_id] = at_s - asked_s

    def released(self, request_id: str) -> None:
        """Record that a producer rank has freed a request's blocks."""
        self._held[request_id] -= 1
        if not self._held[request_id]:
            del self._held[request_id]

    def _ask(self, name: str, request: Request) -> None:
        num_tokens = request.num_tokens
        theirs, ours = (
            tuple(
                GroupBlocks.of(range(number), first)
                for first, number in shape.first_blocks(self._model, num_tokens)
            )
            for shape in self._shapes
        )
        ranges = tuple((each.start, each.stop) for each in self._model.ranges(range(num_tokens)))
        producer = f"p{request.producer}"
        granted = HoldRequest(name, name, SECRET, theirs, request.num_tokens)
        for rank in self.producers[request.producer]:
            rank.take(granted)
        asked = LoadRequest(name, ranges, ours, theirs)
        for consumer in self.consumers[request.consumer]:
            consumer.take(
                WantRequest(name, name, SECRET, EngineAddress(EngineId(producer), producer))
            )
            consumer.take(asked)
