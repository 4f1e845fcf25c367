"""Prometheus metrics for engines other than vLLM, whose own metrics interface `integrations.vllm.stats` uses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kvconnector.errors import InternalError, RemoteError, TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sized

    from kvconnector.session import LoadInFlight, WorkerStats


class Requests(Protocol):
    """What a scheduler half knows of its requests."""

    @property
    def num_loading(self) -> int:
        """Return the number of requests whose KV cache is being loaded."""

    @property
    def held(self) -> Sized:
        """Return the finished requests whose blocks are kept for a consumer."""


T = TypeVar("T", Counter, Gauge, Histogram)

FRESH_S = 2.0
"""Seconds for which a worker's report on a load under way stays valid. Workers report twice a second."""
TIME_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)


def known_causes() -> list[str]:
    """Return the sorted names of the errors with which a load can end for reasons outside this worker."""
    found, kinds = set(), [InternalError, RemoteError, TransportError]
    while kinds:
        kind = kinds.pop()
        found.add(kind.__name__)
        kinds += kind.__subclasses__()
    return sorted(found)


class EngineMetrics:
    """The metrics of one engine's transfers, labelled with its id. Needs the extra `metrics`.

    `observe` takes the statistics of each step, and gauges ask the scheduler. Loads are counted once per worker.

    Args:
        engine_id: The engine's id.
        scheduler: What knows how many requests are loaded and held.
        registry: Where the metrics are registered.
        labels: More labels that all of them have, with their values.
        is_multiprocess: True where prometheus_client writes values to files for another process, which can ask no
            gauge: `set_gauges` and `observe` set them.
    """

    def __init__(
        self,
        engine_id: str,
        scheduler: Requests,
        *,
        registry: CollectorRegistry = REGISTRY,
        labels: Mapping[str, str] | None = None,
        is_multiprocess: bool = False,
    ) -> None:
        more = labels or {}
        self._of_engine = engine_id, *more.values()
        self._scheduler, self._is_multiprocess = scheduler, is_multiprocess
        self._loading: dict[tuple[str, str], tuple[LoadInFlight, float]] = {}
        self._counts = (-1, -1)

        def metric(kind: type[T], name: str, documentation: str, *labels: str, **options: Any) -> T:
            names = ["engine", *more, *labels]
            return kind(f"kvconnector_{name}", documentation, names, registry=registry, **options)

        self._seconds = metric(
            Histogram,
            "transfer_seconds",
            "Seconds of a KV cache load, per worker, by the path that it took.",
            "path",
            buckets=TIME_BUCKETS_S,
        )
        self._exposed = metric(
            Histogram,
            "exposed_handover_seconds",
            "Seconds that blocks waited for their load, per worker; of a streamed prompt, for its last part.",
            buckets=TIME_BUCKETS_S,
        ).labels(*self._of_engine)
        text = "Bytes of KV cache loaded, by the path that they took."
        self._bytes = metric(Counter, "transfer_bytes", text, "path")
        text = "KV cache loads that failed, per worker, by cause."
        self._failures = metric(Counter, "transfer_failures", text, "cause")
        text = "Requests whose lease ended before a consumer had read their KV cache."
        self._expired = metric(Counter, "leases_expired", text).labels(*self._of_engine)
        text = "Producer ranks that a worker greeted and cannot read directly, by the reason."
        self._packed = metric(Counter, "packed_producers", text, "reason")
        text = "Unexpected exceptions, each of which ended one request or one connection, by type."
        self._contained = metric(Counter, "contained_exceptions", text, "type")
        summed = {"multiprocess_mode": "livesum"} if is_multiprocess else {}
        text = "Requests whose KV cache is being loaded."
        self._in_flight = metric(Gauge, "loads_in_flight", text, **summed).labels(*self._of_engine)
        text = "Finished requests whose blocks are kept for a consumer."
        self._held = metric(Gauge, "requests_held", text, **summed).labels(*self._of_engine)
        if not is_multiprocess:
            self._in_flight.set_function(lambda: scheduler.num_loading)
            self._held.set_function(lambda: len(scheduler.held))
        # Prometheus computes a rate only for a counter that exists before the first failure
        for cause in known_causes():
            self._failures.labels(*self._of_engine, cause)

    def in_flight(self) -> list[LoadInFlight]:
        """Return the loads under way, by worker. `kvconnector top` expects them as JSON under `/transfers`."""
        self._forget_stale()
        return [load for load, _ in self._loading.values()]

    def _forget_stale(self) -> None:
        since_s = time.monotonic() - FRESH_S
        self._loading = {key: seen for key, seen in self._loading.items() if seen[1] > since_s}

    def set_gauges(self) -> None:
        """Write the numbers of requests for another process, where that is needed and they have changed."""
        counts = self._scheduler.num_loading, len(self._scheduler.held)
        if self._is_multiprocess and counts != self._counts:
            self._counts = counts
            self._in_flight.set(counts[0])
            self._held.set(counts[1])

    def observe(self, stats: WorkerStats) -> None:
        """Count the transfers and failures in `WorkerOutput.stats`."""
        self.set_gauges()
        if stats.loading:
            self._forget_stale()  # failed loads, which appear in no `transfers`, even if `in_flight` is never called
        for each in stats.loading:
            self._loading[each.request_id, each.rank] = each, time.monotonic()
        ended = {load.request_id for load in stats.transfers}
        if ended and self._loading:
            self._loading = {k: seen for k, seen in self._loading.items() if k[0] not in ended}
        for load in stats.transfers:
            self._seconds.labels(*self._of_engine, load.path).observe(load.seconds)
            self._bytes.labels(*self._of_engine, load.path).inc(load.nbytes)
        for trace in stats.traces:
            if (trace.kind, trace.outcome) == ("load", "done"):
                self._exposed.observe(trace.waited_s)
        for cause, count in stats.failures.items():
            self._failures.labels(*self._of_engine, cause).inc(count)
        self._expired.inc(stats.leases_expired)
        for reason, count in stats.packed.items():
            self._packed.labels(*self._of_engine, reason).inc(count)
        for name, count in stats.contained.items():
            self._contained.labels(*self._of_engine, name).inc(count)
