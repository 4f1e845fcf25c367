"""Transfer statistics in vLLM's three forms: a container that travels to the scheduler, a log line, and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvconnector.session import WorkerStats

MIB = 1 << 20
FAILURE_PREFIX = "failed: "
TIME_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
SIZE_BUCKETS_BYTES = tuple(1 << exponent for exponent in range(12, 36, 2))


@dataclass
class TransferStats(KVConnectorStats):
    """Loads of one interval, as lists by name, so that merging is concatenation.

    Seconds, bytes and the number of producer ranks of every load, and one entry per failure under its error's name.
    """

    @classmethod
    def of(cls, stats: WorkerStats) -> TransferStats:
        """What one worker did."""
        data: dict[str, list[float]] = {
            "transfer_duration": [load.seconds for load in stats.transfers],
            "bytes_transferred": [load.nbytes for load in stats.transfers],
            "num_reads": [load.reads for load in stats.transfers],
            "num_kv_expired_reqs": [1] * stats.leases_expired,
        }
        for error, count in stats.failures.items():
            data[FAILURE_PREFIX + error] = [1] * count
        return cls(data={name: values for name, values in data.items() if values})

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's or interval's."""
        for name, values in other.data.items():
            self.data[name] = [*self.data.get(name, []), *values]
        return self

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """The log line's names and values."""
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
        line["Num failed transfers"] = num_failures(self.data)
        line["Num KV expired reqs"] = len(self.data.get("num_kv_expired_reqs", ()))
        for name, values in sorted(self.data.items()):
            if name.startswith(FAILURE_PREFIX):
                line[f"Num {name}"] = len(values)
        return line


def num_failures(data: dict[str, Any]) -> int:
    """Failed loads of every kind."""
    return sum(len(values) for name, values in data.items() if name.startswith(FAILURE_PREFIX))


class PromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, one set per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seconds = self._create(
            self._histogram_cls,
            "xfer_time_seconds",
            "Seconds from the posted receive to the unpacked last chunk of a KV cache load.",
            buckets=TIME_BUCKETS_S,
        )
        self._bytes = self._create(
            self._histogram_cls,
            "bytes_transferred",
            "Bytes of a KV cache load, per worker.",
            buckets=SIZE_BUCKETS_BYTES,
        )
        self._failed = self._create(
            self._counter_cls, "num_failed_transfers", "KV cache loads that failed, per worker."
        )
        self._expired = self._create(
            self._counter_cls,
            "num_kv_expired_reqs",
            "Requests whose lease ended before a consumer had read their KV cache (on the producer).",
        )

    def _create(self, kind: Any, name: str, documentation: str, **options: Any) -> dict[int, Any]:
        metric = kind(
            name=f"vllm:kvconnector_{name}",
            documentation=documentation,
            labelnames=self._labelnames,
            **options,
        )
        per_engine: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return per_engine

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's `TransferStats.data`."""
        for value in transfer_stats_data.get("transfer_duration", ()):
            self._seconds[engine_idx].observe(value)
        for value in transfer_stats_data.get("bytes_transferred", ()):
            self._bytes[engine_idx].observe(value)
        self._failed[engine_idx].inc(num_failures(transfer_stats_data))
        self._expired[engine_idx].inc(len(transfer_stats_data.get("num_kv_expired_reqs", ())))
