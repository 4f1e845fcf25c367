"""What operators see of one SGLang rank: metrics in SGLang's own files, and a line a minute."""

import os
import subprocess
import sys
from types import SimpleNamespace

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvconnector.ids import Rank
from kvconnector.integrations.sglang.rank import seconds_of
from kvconnector.integrations.sglang.stats import REPORT_S, RankStats
from kvconnector.session import RequestTrace, WorkerStats
from kvconnector.session.completion import Phase
from tests.support.spans import HEADERS, SPAN_ID, TRACE_ID, record_spans

MIB = 1 << 20
SCRAPE = """
import sys
from types import SimpleNamespace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from kvconnector.ids import Rank
from kvconnector.integrations.sglang.stats import RankStats
from kvconnector.session import RequestTrace, WorkerStats

requests = SimpleNamespace(num_loading=2, held={"a": 1})
stats = RankStats("sglang-decode-x-dp1", Rank(0, 1), 1, requests, has_metrics=True)
trace = RequestTrace(request_id="r", kind="load", outcome="done", phases=(), nbytes=512, path="direct", seconds=0.004)
stats.observe(WorkerStats(traces=[trace], failures={"PeerLostError": 2}), 1.0)
requests.num_loading = 3  # and nothing has ended
stats.set_gauges()
registry = CollectorRegistry()
MultiProcessCollector(registry)
sys.stdout.write(generate_latest(registry).decode())
"""


def _load(seconds, nbytes=MIB, path="direct"):
    return RequestTrace(
        request_id="r",
        kind="load",
        outcome="done",
        phases=(),
        nbytes=nbytes,
        path=path,
        seconds=seconds,
    )


def _stats():
    return RankStats("e", Rank(0, 0), 0, SimpleNamespace(num_loading=0, held=()), has_metrics=False)


def test_sglangs_metrics_have_ours_by_their_usual_names(tmp_path):
    environ = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = subprocess.run(
        [sys.executable, "-c", SCRAPE],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = found.stdout.splitlines()
    assert lines, found.stderr
    values = {
        "kvconnector_transfer_bytes_total": "512.0",
        "kvconnector_transfer_seconds_count": "1.0",
        "kvconnector_loads_in_flight": "3.0",
        "kvconnector_requests_held": "1.0",
    }
    for name, value in values.items():
        (line,) = [each for each in lines if each.startswith(name + "{")]
        assert line.endswith(f" {value}")
        for label in ('engine="sglang-decode-x-dp1"', 'dp_rank="1"', 'tp_rank="1"', 'pp_rank="0"'):
            assert label in line
    failed = [line for line in lines if 'cause="PeerLostError"' in line]
    assert [line.split()[-1] for line in failed] == ["2.0"]


def test_one_line_a_minute_says_what_moved_and_what_failed():
    stats = _stats()
    assert stats.observe(WorkerStats(traces=[_load(0.001)] * 9), 10.0) == ""
    traces = [_load(0.009, path="packed")]
    assert stats.observe(WorkerStats(traces=traces), 10.0 + REPORT_S / 2) == ""
    line = stats.observe(WorkerStats(failures={"PeerLostError": 3}), 11.0 + REPORT_S)
    assert "10 loads (9 direct, 1 packed), 10.0 MiB, p50 1.0 ms, p90 9.0 ms" in line
    assert "3 failed: PeerLostError" in line
    line = stats.observe(WorkerStats(traces=[_load(0.002)]), 12.0 + 2 * REPORT_S)
    assert "1 loads (1 direct), 1.0 MiB" in line
    assert "failed" not in line


def test_spans_are_in_the_traces_of_their_requests(monkeypatch):
    spans = record_spans(monkeypatch)
    requests = SimpleNamespace(num_loading=0, held=())
    stats = RankStats("e-dp1", Rank(0, 0), 1, requests, has_metrics=False, has_spans=True)
    stats.note_trace(5, TraceContextTextMapPropagator().extract(HEADERS))
    stats.note_trace(6, "no context")
    phases = (Phase("want", 10.0, 11.0), Phase("read", 11.0, 12.0))
    traces = [
        RequestTrace(request_id=each, kind="load", outcome="done", phases=phases)
        for each in ("room-5.17", "room-6.18")
    ]
    stats.observe(WorkerStats(traces=traces), 1.0)
    load, alone = (span for span in spans() if span.name == "kvconnector.load")
    assert load.attributes["kvconnector.request"] == "room-5"
    assert load.attributes["kvconnector.engine"] == "e-dp1"
    assert f"{load.context.trace_id:032x}" == TRACE_ID
    assert f"{load.parent.span_id:016x}" == SPAN_ID
    assert alone.parent is None


def test_a_transfer_takes_from_its_first_read_to_the_last_confirmation():
    phases = (Phase("fill", 1.0, 5.0), Phase("hold", 5.0, 9.0), Phase("send", 4.0, 8.0))
    trace = RequestTrace(request_id="r", kind="hold", outcome="released", phases=phases)
    assert seconds_of(trace) == 5.0
    assert seconds_of(RequestTrace(request_id="r", kind="hold", outcome="x", phases=())) == 0.0
