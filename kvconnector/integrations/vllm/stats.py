"""Transfer statistics in vLLM's three forms: a container that workers send to the scheduler, a log line and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvconnector.integrations.prometheus import TIME_BUCKETS_S, known_causes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvconnector.session import WorkerStats

MIB = 1 << 20
GB = 10**9
FAILURE_PREFIX = "failed: "
PATH_PREFIX = "path: "
CONTAINED_PREFIX = "contained: "
SIZE_BUCKETS_BYTES = tuple(1 << exponent for exponent in range(12, 36, 2))
RATE_BUCKETS_GB_PER_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


@dataclass
class ConnectorStats(KVConnectorStats):
    """The loads of one interval, as lists by name, which are merged by concatenation.

    There are lists of every load's seconds and bytes, a list for each path with an entry per load, a list for each
    error with an entry per failure, and one for each type of the unexpected exceptions that ended one request or
    connection.
    """

    @classmethod
    def of(cls, stats: WorkerStats) -> ConnectorStats:
        """Return the statistics of one worker."""
        data: dict[str, list[float]] = {
            "transfer_duration": [load.seconds for load in stats.transfers],
            "bytes_transferred": [load.nbytes for load in stats.transfers],
            "num_kv_expired_reqs": [1] * stats.leases_expired,
        }
        for load in stats.transfers:
            data.setdefault(PATH_PREFIX + load.path, []).append(1)
        for error, count in stats.failures.items():
            data[FAILURE_PREFIX + error] = [1] * count
        for kind, count in stats.contained.items():
            data[CONTAINED_PREFIX + kind] = [1] * count
        return cls(data={name: values for name, values in data.items() if values})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, values in other.data.items():
            self.data[name] = [*self.data.get(name, []), *values]
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        seconds = np.asarray(self.data.get("transfer_duration", ()), dtype=float)
        mebibytes = np.asarray(self.data.get("bytes_transferred", ()), dtype=float) / MIB
        line: dict[str, int | float] = {"Num successful transfers": len(seconds)}
        if len(seconds):
            total_s = float(seconds.sum())
            line |= {
                "Avg xfer time (ms)": round(float(seconds.mean()) * 1e3, 3),
                "P90 xfer time (ms)": round(float(np.percentile(seconds, 90)) * 1e3, 3),
                "Avg MB per transfer": round(float(mebibytes.mean()), 3),
                "Throughput (MB/s)": round(float(mebibytes.sum()) / total_s, 3) if total_s else 0,
            }
        line["Num failed transfers"] = sum(counts(self.data, FAILURE_PREFIX).values())
        line["Num KV expired reqs"] = len(self.data.get("num_kv_expired_reqs", ()))
        for cause, count in counts(self.data, FAILURE_PREFIX).items():
            line[f"Num {FAILURE_PREFIX}{cause}"] = count
        for path, count in counts(self.data, PATH_PREFIX).items():
            line[f"Num {PATH_PREFIX}{path}"] = count
        for kind, count in counts(self.data, CONTAINED_PREFIX).items():
            line[f"Num {CONTAINED_PREFIX}{kind}"] = count
        return line


def counts(data: dict[str, Any], prefix: str) -> dict[str, int]:
    """Return the number of entries of each list whose name starts with `prefix`, by the rest of the name, in order."""
    return {
        name.removeprefix(prefix): len(values)
        for name, values in sorted(data.items())
        if name.startswith(prefix)
    }


class PromMetrics(KVConnectorPromMetrics):
    """The same statistics as Prometheus metrics, one set per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        text = "Seconds from the posted receive to the unpacked last chunk of a KV cache load."
        self._seconds = self._histogram("xfer_time_seconds", text, TIME_BUCKETS_S)
        text = "Bytes of a KV cache load, per worker."
        self._bytes = self._histogram("bytes_transferred", text, SIZE_BUCKETS_BYTES)
        text = "Throughput of a KV cache load, per worker, in 10^9 bytes per second."
        self._rate = self._histogram("xfer_gigabytes_per_second", text, RATE_BUCKETS_GB_PER_S)
        text = "Requests whose lease ended before a consumer had read their KV cache (on the producer)."
        self._expired = self._per_engine(self._counter("num_kv_expired_reqs", text))
        text = "KV cache loads, per worker, by the data path that they took."
        self._transfers = self._counter("num_transfers", text, "path")
        text = "KV cache loads that failed, per worker, by cause."
        self._failed = self._counter("num_failed_transfers", text, "cause")
        text = "Unexpected exceptions, per worker, each of which ended one request or connection, by type."
        self._contained = self._counter("num_contained_exceptions", text, "type")
        # Prometheus computes a rate only for a counter that exists before the first failure
        for engine_idx in per_engine_labelvalues:
            for cause in known_causes():
                self._count(self._failed, engine_idx, cause, 0)

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        per_engine: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return per_engine

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> dict[int, Any]:
        return self._per_engine(
            self._histogram_cls(
                name=f"vllm:kvconnector_{name}",
                documentation=text,
                labelnames=self._labelnames,
                buckets=buckets,
            )
        )

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        """Return a counter with our labels after vLLM's."""
        return self._counter_cls(
            name=f"vllm:kvconnector_{name}",
            documentation=text,
            labelnames=[*self._labelnames, *labels],
        )

    def _count(self, counter: Any, engine_idx: int, value: str, count: int) -> None:
        counter.labels(*self.per_engine_labelvalues[engine_idx], value).inc(count)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        seconds = transfer_stats_data.get("transfer_duration", ())
        sizes_bytes = transfer_stats_data.get("bytes_transferred", ())
        for duration_s, nbytes in zip(seconds, sizes_bytes, strict=True):
            self._seconds[engine_idx].observe(duration_s)
            self._bytes[engine_idx].observe(nbytes)
            if duration_s > 0:
                self._rate[engine_idx].observe(nbytes / duration_s / GB)
        for path, count in counts(transfer_stats_data, PATH_PREFIX).items():
            self._count(self._transfers, engine_idx, path, count)
        for cause, count in counts(transfer_stats_data, FAILURE_PREFIX).items():
            self._count(self._failed, engine_idx, cause, count)
        for kind, count in counts(transfer_stats_data, CONTAINED_PREFIX).items():
            self._count(self._contained, engine_idx, kind, count)
        self._expired[engine_idx].inc(len(transfer_stats_data.get("num_kv_expired_reqs", ())))
