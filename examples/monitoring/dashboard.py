"""Writes the Grafana dashboard: `python dashboard.py > dashboard.json`. It needs grafana-foundation-sdk.

It shows what `kvconnector.integrations.prometheus.EngineMetrics` exports, and the same of vLLM, under vLLM's names.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
WHERE = 'engine=~"$engine"'
VLLM_WHERE = 'instance=~"$vllm"'
EXPOSED = "kvconnector_exposed_handover_seconds"
VLLM = "vllm:kvconnector"


class Graph(NamedTuple):
    """A panel: the query of each line, by its legend, and the unit."""

    title: str
    unit: str
    queries: dict[str, str]


def quantile(share: float, seconds: str = "kvconnector_transfer_seconds") -> str:
    """Return a quantile of a histogram of seconds, by engine."""
    buckets = f"rate({seconds}_bucket{{{WHERE}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (engine, le) ({buckets}))"


def largest(metric: str, change: str = "") -> str:
    """Return a count of requests by engine, or its increase. Each rank of SGLang counts the same ones."""
    counted = f"{metric}{{{WHERE}}}"
    return f"max by (engine) ({f'{change}({counted}[$__rate_interval])' if change else counted})"


def rate(metric: str, label: str) -> str:
    """Return a counter's rate by engine and one more label."""
    return f"sum by (engine, {label}) (rate({metric}{{{WHERE}}}[$__rate_interval]))"


def vllm_rate(metric: str, *labels: str) -> str:
    """Return the rate of a counter of vLLM by instance, data-parallel rank and other labels."""
    by = ", ".join(("instance", "engine", *labels))
    return f"sum by ({by}) (rate({VLLM}_{metric}{{{VLLM_WHERE}}}[$__rate_interval]))"


def vllm_quantile(share: float, metric: str) -> str:
    """Return a quantile of a histogram of vLLM."""
    return f"histogram_quantile({share}, {vllm_rate(f'{metric}_bucket', 'le')})"


GRAPHS = (
    Graph(
        "Bandwidth",
        "Bps",
        {"{{engine}} {{path}}": rate("kvconnector_transfer_bytes_total", "path")},
    ),
    Graph(
        "Loads", "ops", {"{{engine}} {{path}}": rate("kvconnector_transfer_seconds_count", "path")}
    ),
    Graph(
        "Time of a load", "s", {"{{engine}} p50": quantile(0.5), "{{engine}} p99": quantile(0.99)}
    ),
    Graph(
        "Exposed handover",
        "s",
        {"{{engine}} p50": quantile(0.5, EXPOSED), "{{engine}} p99": quantile(0.99, EXPOSED)},
    ),
    Graph(
        "Failures",
        "ops",
        {"{{engine}} {{cause}}": rate("kvconnector_transfer_failures_total", "cause")},
    ),
    Graph("Loads in flight", "short", {"{{engine}}": largest("kvconnector_loads_in_flight")}),
    Graph(
        "Requests held for a consumer",
        "short",
        {
            "{{engine}}": largest("kvconnector_requests_held"),
            "{{engine}} expired": largest("kvconnector_leases_expired_total", "increase"),
        },
    ),
    Graph(
        "vLLM: bandwidth",
        "Bps",
        {"{{instance}} {{engine}}": vllm_rate("bytes_transferred_sum")},
    ),
    Graph(
        "vLLM: loads", "ops", {"{{instance}} {{path}}": vllm_rate("num_transfers_total", "path")}
    ),
    Graph(
        "vLLM: time of a load",
        "s",
        {
            "{{instance}} p50": vllm_quantile(0.5, "xfer_time_seconds"),
            "{{instance}} p99": vllm_quantile(0.99, "xfer_time_seconds"),
        },
    ),
    Graph(
        "vLLM: failures",
        "ops",
        {
            "{{instance}} {{cause}}": vllm_rate("num_failed_transfers_total", "cause"),
            "{{instance}} lease expired": vllm_rate("num_kv_expired_reqs_total"),
        },
    ),
)


def build() -> str:
    """Return the dashboard as JSON."""
    engines = QueryVariable("engine").datasource(SOURCE).multi(True).include_all(True)
    servers = QueryVariable("vllm").datasource(SOURCE).multi(True).include_all(True)
    board = (
        Dashboard("KV cache transfers")
        .uid("kvconnector")
        .tags(["kvconnector"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(DatasourceVariable("datasource").type("prometheus"))
        .with_variable(engines.query("label_values(kvconnector_requests_held, engine)"))
        .with_variable(servers.query(f"label_values({VLLM}_num_transfers_total, instance)"))
    )
    for graph in GRAPHS:
        panel = Panel().title(graph.title).unit(graph.unit).datasource(SOURCE).min(0).span(12)
        for legend, query in graph.queries.items():
            panel.with_target(Dataquery().expr(query).legend_format(legend))
        board.with_panel(panel)
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


if __name__ == "__main__":
    sys.stdout.write(build())
