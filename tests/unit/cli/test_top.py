"""`kvconnector top` over real metrics pages."""

import json
import socket
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvconnector.cli import main
from kvconnector.cli import top as top_module
from kvconnector.cli.top import MAX_LOADS, read_snapshots
from kvconnector.integrations import prometheus
from kvconnector.integrations.prometheus import EngineMetrics
from kvconnector.session import LoadInFlight, WorkerStats
from kvconnector.session.completion import RequestTrace


class Gauges:
    """The part of a scheduler half that EngineMetrics uses."""

    num_loading = 3
    held = frozenset({"a", "b"})


@contextmanager
def serving(pages, transfers=None):
    """Serve one page after the other, and the last one forever. Yields the endpoint's HOST:PORT."""

    def answer(handler):
        page = transfers
        if handler.path == "/metrics":
            page = pages.pop(0) if len(pages) > 1 else pages[0]
        handler.send_response(404 if page is None else 200)
        handler.end_headers()
        handler.wfile.write(page or b"not here")

    with answering(answer) as endpoint:
        yield endpoint


@contextmanager
def answering(answer):
    """Let `answer(handler)` answer every request. Yields the endpoint's HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def under_way(request_id, **changes):
    values = {"rank": "pp0tp0", "peer": "p0", "path": "packed", "nbytes": 0, "total_bytes": 4 << 20}
    return LoadInFlight(request_id=request_id, **{**values, "seconds": 0.25, **changes})


class Together(list):
    """A page that is served once as many engines as there are parties have been asked for theirs."""

    def __init__(self, page, barrier):
        super().__init__([page])
        self._barrier = barrier

    def __getitem__(self, index):
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait()
        return super().__getitem__(index)


def test_engines_are_asked_at_once_so_that_a_silent_one_does_not_delay_the_others(capsys):
    registry, barrier = CollectorRegistry(), threading.Barrier(2, timeout=20)
    EngineMetrics("d0", Gauges(), registry=registry)
    page = generate_latest(registry)
    with serving(Together(page, barrier)) as first, serving(Together(page, barrier)) as second:
        assert main(["top", first, second, "--count", "1", "--json"]) == 0
    assert not barrier.broken
    found = json.loads(capsys.readouterr().out)
    assert [[*each] for each in found.values()] == [["d0"], ["d0"]]


def test_a_page_that_never_ends_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr(top_module, "TIMEOUT_S", 0.3)
    is_over = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):
            while not is_over.wait(0.02):
                handler.wfile.write(b"#")

    with answering(drip) as endpoint:
        assert main(["top", endpoint, "--count", "1"]) == 1
        is_over.set()
    assert "the page did not come within 0.3 s" in capsys.readouterr().out


@pytest.mark.parametrize("page", [b"\xff\xfe", b"<html>", b"kvconnector_loads_in_flight x\n"])
def test_a_page_without_metrics_is_named_with_the_reason(page, capsys):
    with serving([page]) as endpoint:
        assert main(["top", endpoint, "--count", "1"]) == 1
    assert f"{endpoint}/metrics: " in capsys.readouterr().out


def test_loads_under_way_are_shown_with_their_progress(capsys):
    registry = CollectorRegistry()
    metrics = EngineMetrics("d0", Gauges(), registry=registry)
    loads = under_way("late", nbytes=1 << 20, seconds=1.5), under_way("over"), under_way("new")
    metrics.observe(WorkerStats(loading=loads))
    metrics.observe(WorkerStats(traces=[load(1, 0.1, request_id="over")]))
    transfers = msgspec.json.encode(metrics.in_flight())
    with serving([generate_latest(registry)], transfers) as endpoint:
        assert main(["top", endpoint, "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "over" not in shown
    rows = [line.split() for line in shown.splitlines() if "p0" in line]
    assert [row[1] for row in rows] == ["late", "new"]
    assert {"pp0tp0", "packed", "1", "4", "MiB", "1.50"} <= set(rows[0])


def test_failed_loads_are_forgotten_even_if_nobody_reads_loads_under_way(monkeypatch):
    metrics = EngineMetrics("d0", Gauges(), registry=CollectorRegistry())
    now_s = [0.0]
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for request_id, now_s[0] in (("failed", 0.0), ("later", 2 * prometheus.FRESH_S)):
        metrics.observe(WorkerStats(loading=(under_way(request_id),)))
    now_s[0] = 0.0  # stored values are fresh again
    assert [each.request_id for each in metrics.in_flight()] == ["later"]


def load(nbytes, seconds, path="direct", request_id="r"):
    moved = {"nbytes": nbytes, "seconds": seconds, "path": path}
    return RequestTrace(request_id=request_id, kind="load", outcome="done", phases=(), **moved)


def pages_of_an_engine():
    registry = CollectorRegistry()
    metrics = EngineMetrics("d0", Gauges(), registry=registry)
    metrics.observe(WorkerStats(traces=[load(10**6, 0.5)]))
    first = generate_latest(registry)
    loads = [load(10**9, 0.004, "packed")] * 9
    metrics.observe(
        WorkerStats(traces=[*loads, load(5, 0.09)], failures={"PeerLostError": 2}, leases_expired=1)
    )
    return [first, generate_latest(registry)]


def shown(capsys, monkeypatch, *arguments):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", "--count", "2", "--interval", "0.1", *arguments]) == 0
    return capsys.readouterr().out


def test_loads_between_two_refreshes_become_rates_times_paths_and_failures(
    capsys, monkeypatch, tmp_path
):
    picture = tmp_path / "top.svg"
    with serving(pages_of_an_engine()) as endpoint:
        out = shown(capsys, monkeypatch, endpoint, "--svg", str(picture))
    counted = ("packed 9", "direct 2", "PeerLostError 2 (+2)", "leases expired 1 (+1)")
    assert "doctor --peer" in out
    assert out.endswith("\n")
    for text in ("d0", "< 5 ms", "< 100 ms", *counted):
        assert text in out
    # loads before the first refresh do not count
    assert "500 ms" not in out
    assert "PeerLostError" in picture.read_text()


def test_why_reads_are_packed_is_a_line_for_each_reason(capsys, monkeypatch):
    registry = CollectorRegistry()
    packed = {"the pools are another host's": 2}
    stats = WorkerStats(traces=[load(1, 0.1, "packed")], packed=packed)
    EngineMetrics("d0", Gauges(), registry=registry).observe(stats.merged(stats))
    with serving([generate_latest(registry)] * 2) as endpoint:
        out = shown(capsys, monkeypatch, endpoint)
    assert "d0: reads from 4 producer ranks are packed: the pools are another host's" in out
    assert "doctor --peer" not in out


def test_vllms_metrics_are_read_too():
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    name = "vllm:kvconnector_"
    histogram = Histogram(f"{name}xfer_time_seconds", "-", labels, registry=registry)
    histogram.labels("m", "0").observe(0.02)
    Histogram(f"{name}bytes_transferred", "-", labels, registry=registry).labels("m", "0").observe(
        77
    )
    for kind, label, value in (
        ("num_transfers", "path", "direct"),
        ("num_failed_transfers", "cause", "X"),
    ):
        counter = Counter(name + kind, "-", [*labels, label], registry=registry)
        counter.labels("m", "0", value).inc(4)
    engine = read_snapshots(generate_latest(registry).decode(), 0.0)["0"]
    assert (engine.nbytes, engine.loads, engine.failures) == (77, {"direct": 4}, {"X": 4})
    assert engine.in_flight is None


def test_the_ranks_of_an_engine_add_up_but_count_the_same_requests():
    page = b""
    options = {"kind": "load", "outcome": "done", "phases": (), "path": "direct", "nbytes": 100}
    for rank in range(2):
        registry = CollectorRegistry()
        labels = {"tp_rank": str(rank)}
        metrics = EngineMetrics("d0", Gauges(), registry=registry, labels=labels)
        metrics.observe(WorkerStats(traces=[RequestTrace(request_id="r", **options)]))
        page += generate_latest(registry)
    engine = read_snapshots(page.decode(), 0.0)["d0"]
    assert (engine.nbytes, engine.loads) == (200, {"direct": 2})
    assert (engine.in_flight, engine.held) == (3, 2)


def test_each_refresh_is_a_line_of_json(capsys, monkeypatch):
    with serving(pages_of_an_engine()) as endpoint:
        lines = shown(capsys, monkeypatch, endpoint, "127.0.0.1:1", "--json").splitlines()
    first, last = (json.loads(line) for line in lines)
    (engine,) = last[f"http://{endpoint}/metrics"].values()
    assert engine["failures"] == {**dict.fromkeys(engine["failures"], 0), "PeerLostError": 2}
    assert "refused" in first["http://127.0.0.1:1/metrics"]


def test_an_engine_that_cannot_be_seen_is_a_line_with_the_reason(capsys, monkeypatch):
    with serving([b"# nothing of ours\n"]) as other, serving(pages_of_an_engine()) as endpoint:
        out = shown(capsys, monkeypatch, "127.0.0.1:1", other, endpoint)
    assert "refused" in out
    assert "no kvconnector metrics here" in out
    assert "d0" in out


PAGE = """# TYPE kvconnector_transfer_seconds histogram
kvconnector_transfer_seconds_bucket{{engine="d0",{label}}} {count}
"""


@pytest.mark.parametrize(
    "page, error",
    [
        (PAGE.format(label='other="1"', count="1"), "KeyError: 'le'"),
        (PAGE.format(label='le="soon"', count="1"), "ValueError: "),
        (PAGE.format(label='le="1"', count="+Inf"), "OverflowError: "),
    ],
)
def test_a_page_that_no_engine_exports_is_a_line_with_the_reason(capsys, monkeypatch, page, error):
    with serving([page.encode()]) as other, serving(pages_of_an_engine()) as endpoint:
        out = shown(capsys, monkeypatch, other, endpoint)
    assert f"http://{other}/metrics: {error}" in out
    assert "d0" in out


def test_a_server_without_http_is_a_line_with_the_reason_and_a_status_of_1(capsys):
    """The address may be the port of another service."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            stranger, _ = server.accept()
            stranger.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            stranger.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert main(["top", f"127.0.0.1:{server.getsockname()[1]}", "--count", "1"]) == 1
        thread.join()
    assert "BadStatusLine" in capsys.readouterr().out


def test_names_with_brackets_are_shown_as_they_are(capsys, tmp_path):
    registry = CollectorRegistry()
    metrics = EngineMetrics("[/d0]", Gauges(), registry=registry)
    metrics.observe(WorkerStats(loading=(under_way("[/r]"),)))
    transfers = msgspec.json.encode(metrics.in_flight())
    picture = tmp_path / "top.svg"
    with serving([generate_latest(registry)], transfers) as endpoint:
        assert main(["top", endpoint, "--count", "1", "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "[/d0]" in out
    assert "[/r]" in out
    assert "[/d0]" in picture.read_text()


@pytest.mark.parametrize(
    "endpoint", ["", "http://", "ftp://x", "127.0.0.1:x", "127.0.0.1:99999", "http://[::1"]
)
def test_an_invalid_endpoint_is_one_line(capsys, endpoint):
    assert main(["top", endpoint, "--count", "1"]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_an_engine_that_was_restarted_has_no_rates_until_the_next_look(capsys, monkeypatch):
    """Its counters begin again: differences would be negative."""
    first, last = pages_of_an_engine()
    with serving([last, first]) as endpoint:
        out = shown(capsys, monkeypatch, endpoint)
    row = [line for line in out.splitlines() if "d0" in line][-1]
    assert [cell.strip() for cell in row.split("│")[4:8]] == ["", "", "", ""]
    assert "direct 1" in row
    with serving([first, last]) as endpoint:
        out = shown(capsys, monkeypatch, endpoint)
    row = [line for line in out.splitlines() if "d0" in line][-1]
    assert float(row.split("│")[4]) > 0


def test_of_many_loads_under_way_the_oldest_are_listed(capsys):
    registry = CollectorRegistry()
    metrics = EngineMetrics("d0", Gauges(), registry=registry)
    ages = [0.1 * number for number in range(MAX_LOADS + 5)]
    metrics.observe(
        WorkerStats(loading=tuple(under_way(f"r{n}", seconds=age) for n, age in enumerate(ages)))
    )
    transfers = msgspec.json.encode(metrics.in_flight())
    with serving([generate_latest(registry)], transfers) as endpoint:
        assert main(["top", endpoint, "--count", "1"]) == 0
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "pp0tp0" in line]
    assert rows == [f"r{number}" for number in reversed(range(5, MAX_LOADS + 5))]


def test_only_loads_that_succeeded_count_as_exposed_time():
    registry = CollectorRegistry()
    metrics = EngineMetrics("d0", Gauges(), registry=registry)
    failed = msgspec.structs.replace(load(5, 0.09), outcome="failed")
    metrics.observe(WorkerStats(traces=[load(5, 0.09), failed]))
    name = "kvconnector_exposed_handover_seconds_count"
    assert registry.get_sample_value(name, {"engine": "d0"}) == 1
