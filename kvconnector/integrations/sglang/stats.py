"""What one SGLang rank reports of its transfers: metrics, spans, and a line in the log for each minute with transfers.

SGLang runs prometheus_client in its multiprocess mode, in which every metric of a process is written to a file that
SGLang's `/metrics` reads. So a registry of our own is enough, and gauges have to be set.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvconnector.ids import Rank
    from kvconnector.integrations.prometheus import EngineMetrics, Requests
    from kvconnector.integrations.tracing import RequestSpans
    from kvconnector.session import WorkerStats

logger = logging.getLogger(__name__)

REPORT_S = 60.0
"""Seconds between two lines in the log."""
MIB = 1 << 20


def request_name(room: int) -> str:
    """Return how spans, logs and orders name the request of a room; orders add a number after a dot."""
    return f"room-{room}"


class RankStats:
    """The statistics of one rank.

    Args:
        engine_id: The engine's id, with its data-parallel rank.
        rank: The rank's place in the engine.
        dp_rank: The engine's data-parallel rank in its server.
        requests: What knows how many requests are loaded and held.
        has_metrics: True if SGLang runs with `--enable-metrics`.
        has_spans: True if it runs with `--enable-trace`.
    """

    def __init__(
        self,
        engine_id: str,
        rank: Rank,
        dp_rank: int,
        requests: Requests,
        *,
        has_metrics: bool,
        has_spans: bool = False,
    ) -> None:
        self._metrics: EngineMetrics | None = None
        self.spans: RequestSpans | None = None
        if has_spans:
            from kvconnector.integrations.tracing import RequestSpans

            self.spans = RequestSpans(engine_id)
        self._seconds: list[float] = []
        self._nbytes = 0
        self._failures: Counter[str] = Counter()
        self._paths: Counter[str] = Counter()
        self._due_s = 0.0
        if not has_metrics:
            return
        try:
            from prometheus_client import CollectorRegistry

            from kvconnector.integrations.prometheus import EngineMetrics
        except ImportError:
            logger.warning(
                'metrics of KV transfers need prometheus-client: pip install "kvconnector[metrics]"'
            )
            return
        labels = {
            "dp_rank": str(dp_rank),
            "tp_rank": str(rank.tp_rank),
            "pp_rank": str(rank.pp_rank),
        }
        self._metrics = EngineMetrics(
            engine_id,
            requests,
            registry=CollectorRegistry(),
            labels=labels,
            is_multiprocess=True,
        )

    def note_trace(self, room: int, context: object) -> None:
        """Record the OpenTelemetry context of a request, whose transfers' spans will be in its trace."""
        if self.spans is not None:
            from kvconnector.integrations.tracing import headers_of

            self.spans.on_new_request(request_name(room), headers_of(context))

    def set_gauges(self) -> None:
        """Write how many requests are loaded and held, if that has changed."""
        if self._metrics is not None:
            self._metrics.set_gauges()

    def observe(self, stats: WorkerStats, now_s: float) -> str:
        """Count what a worker reports.

        Args:
            stats: The worker's statistics since the last call.
            now_s: The monotonic clock.

        Returns:
            A line for the log if one is due, else "".
        """
        if self._metrics is not None:
            self._metrics.observe(stats)
        if self.spans is not None:
            named = (
                msgspec.structs.replace(each, request_id=each.request_id.partition(".")[0])
                for each in stats.traces
            )
            self.spans.export([*named])
        for load in stats.transfers:
            self._seconds.append(load.seconds)
            self._nbytes += load.nbytes
            self._paths[load.path] += 1
        self._failures.update(stats.failures)
        if now_s < self._due_s or not (self._seconds or self._failures):
            return ""
        line = self._line() if self._due_s else ""  # the first transfer starts the first minute
        if line:
            self._seconds, self._nbytes = [], 0
            self._failures.clear()
            self._paths.clear()
        self._due_s = now_s + REPORT_S
        return line

    def _line(self) -> str:
        parts = []
        if self._seconds:
            ordered = sorted(self._seconds)
            median, high = (ordered[len(ordered) * part // 10] for part in (5, 9))
            paths = ", ".join(f"{count} {path}" for path, count in sorted(self._paths.items()))
            parts.append(
                f"{len(self._seconds)} loads ({paths}), {self._nbytes / MIB:.1f} MiB,"
                f" p50 {median * 1e3:.1f} ms, p90 {high * 1e3:.1f} ms"
            )
        failures = sorted(self._failures.items())
        parts += [f"{count} failed: {cause}" for cause, count in failures]
        return "KV transfers of the last minute: " + "; ".join(parts)
