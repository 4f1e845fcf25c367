"""`sessions`: a worker's time for one event, in the median and at most, while very many requests are queued.

A producer's and a consumer's session talk to each other in this process; nothing is sent and no byte moves. A router
asks for all requests at once. A few are served, an interval of heartbeats passes, and the consumer aborts the rest. The
time that Python's garbage collector takes to traverse the requests' objects is a figure of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial
from math import inf

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.results import CaseResult, Measurement, ShowProgress
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.bench.simulated_ranks import CONFIG, Costs, SessionThread
from kvconnector.bench.simulation import SECRET, Cluster, Simulation
from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineAddress, EngineId
from kvconnector.layout import NO_TOKENS, GroupBlocks
from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    WantRequest,
)

COUNTS = (100, 1_000, 10_000, 100_000)
NUM_TOKENS = 256
SHAPE = EngineShape(block=16)
FREE = Costs(turn_s=0.0, endpoint_s=0.0, latency_s=0.0, bytes_per_s=inf)
PRODUCER = EngineAddress(EngineId("p0"), "p0")
"""`Simulation` gives the first producer this name."""


def run(options: BenchOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield a case for each number of requests, computed before they are wanted, and streamed."""
    for is_streamed in (False, True):
        for count in COUNTS:
            how = (
                "asked at both engines at once"
                if is_streamed
                else "computed before they are wanted"
            )
            case = f"{count} requests, {how}"
            progress(case)
            queue = _Queue(options.model, count, is_streamed=is_streamed)
            yield CaseResult(case, (queue.measure(options.iterations),))


class _Queue(Simulation):
    """Two ranks in a world where nothing costs virtual time. It measures how long this thread works for each event."""

    def __init__(self, model: ModelShape, count: int, *, is_streamed: bool) -> None:
        super().__init__(Cluster(model=model, prefill=SHAPE, decode=SHAPE, costs=FREE), [])
        self._producer, self._consumer = self.producers[0][0], self.consumers[0][0]
        self._is_streamed = is_streamed
        self._names = [f"request-{number}" for number in range(count)]
        self._blocks = (GroupBlocks.of(range(NUM_TOKENS // SHAPE.block)),)
        self._took_s: list[float] = []
        self._collecting_s = self._collection_began = 0.0
        self._longest_collection_s = 0.0
        self._loaded: set[str] = set()
        self._released: set[str] = set()

    def handle(self, session: ProducerSession | ConsumerSession, event: object, now: float) -> None:
        began, collecting_s = time.thread_time(), self._collecting_s
        session.handle(event, now)
        session.next_deadline()
        collecting_s = self._collecting_s - collecting_s
        self._took_s.append(time.thread_time() - began - collecting_s)

    def loaded(self, request_id: str, error: KVConnectorError | None, at_s: float) -> None:
        if error is None:
            self._loaded.add(request_id)

    def released(self, request_id: str) -> None:
        self._released.add(request_id)

    def measure(self, num_served: int) -> Measurement:
        """Return the times of the events in which a few requests are served, and the other figures.

        Raises:
            ResultMismatchError: A request was not served, or its blocks were not freed.
        """
        gc.collect()
        gc.freeze()  # as engines do, so that the rest of the process does not count
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
        self._ask_for_all()
        asking, self._took_s = self._took_s, []
        served = self._names[:: max(1, len(self._names) // num_served)]
        for name in served:
            self._serve(name)
        serving, self._took_s = self._took_s, []
        if self._loaded != {*served}:
            raise ResultMismatchError("requests were not loaded", loaded=len(self._loaded))
        self.advance(self.now + CONFIG.peer.heartbeat_interval_s)
        beating, self._took_s = self._took_s, []
        for name in self._names:
            if name not in self._loaded:
                self._order(self._consumer, DropRequest(name))
        self.advance(self.now)
        if self._is_streamed:  # their leases have no blocks yet, so none is released
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

    def _ask_for_all(self) -> None:
        """Ask both engines for all requests, before they have greeted each other."""
        for name in self._names:
            self._order(
                self._consumer, WantRequest(name, name, SECRET, PRODUCER, self._is_streamed)
            )
            begun = GrowRequest(name, name, SECRET, (GroupBlocks.of(()),), NO_TOKENS)
            self._order(self._producer, begun if self._is_streamed else self._hold(name))
        self.advance(self.now)

    def _serve(self, name: str) -> None:
        if self._is_streamed:
            self._order(self._producer, self._hold(name))
            self.advance(self.now)
        remote = () if self._is_streamed else self._blocks
        load = LoadRequest(name, ((0, NUM_TOKENS),), self._blocks, remote)
        self._order(self._consumer, load)
        self.advance(self.now)

    def _order(self, rank: SessionThread, order: object) -> None:
        self.at(self.now, partial(rank.take, order))

    def _hold(self, name: str) -> HoldRequest:
        return HoldRequest(name, name, SECRET, self._blocks, NUM_TOKENS)
