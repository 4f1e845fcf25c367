"""Traces of transfers: the times of their phases in the log and as OpenTelemetry spans."""

import logging
from contextlib import closing

import msgspec
import pytest
from opentelemetry.trace import StatusCode

from kvconnector.errors import PeerLostError
from kvconnector.integrations import tracing
from kvconnector.integrations.tracing import RequestSpans
from kvconnector.session import Phase, RequestTrace
from kvconnector.session.trace import LoadTrace
from tests.integration.runtime_pair import Engine, until
from tests.support.fakes import FakeEngine, attention_model
from tests.support.loopback import LoopbackFaults, LoopbackTransport
from tests.support.spans import HEADERS, SPAN_ID, TRACE_ID, record_spans
from tests.support.world import World

LOAD = RequestTrace(
    request_id="r",
    kind="load",
    outcome="done",
    peer="p",
    nbytes=4096,
    path="tcp",
    phases=(Phase("want", 10.0, 11.0), Phase("greeting", 11.0, 11.5), Phase("read", 11.5, 14.0)),
)


def engine(name, role):
    return Engine(name, role, slow_load_s=1e-9, paths={"direct": "never"})


@pytest.mark.ucx
@pytest.mark.integration
def test_engines_trace_the_phases_of_a_request(caplog):
    with (
        closing(engine("p", "producer")) as p,
        closing(engine("d", "consumer")) as d,
        caplog.at_level(logging.WARNING, "kvconnector.runtime.executor"),
    ):
        d.load("w", p.offer("r", [1, 2], 30), [3, 4], 31)
        until(lambda: "w" in d.received and "r" in p.sent, p, d)
    (load,), (hold,) = d.traces, p.traces
    assert (load.kind, load.request_id, load.outcome, load.peer) == ("load", "w", "done", "p")
    assert load.nbytes == 30 * 4 * 2 * 4 * 16 * 2  # tokens, layers, parts, heads, dims, bytes
    want, greeting, read, wire, unpack = load.phases
    assert [phase.name for phase in load.phases] == ["want", "greeting", "read", "wire", "unpack"]
    for before, after in ((want, greeting), (greeting, read)):
        assert before.start_s <= before.end_s == after.start_s <= after.end_s
    assert read.start_s <= wire.start_s <= wire.end_s <= unpack.end_s <= read.end_s
    assert wire.start_s == unpack.start_s
    assert load.waited_s == pytest.approx(read.end_s - greeting.start_s, abs=1e-6)
    assert (hold.kind, hold.request_id, hold.outcome) == ("hold", "r", "released")
    _, send, pack, sent = hold.phases
    assert [phase.name for phase in hold.phases] == ["hold", "send", "pack", "wire"]
    for part in (pack, sent):
        assert send.start_s <= part.start_s <= part.end_s <= send.end_s
    assert pack.start_s <= sent.start_s
    assert str(load) in caplog.text
    assert "unpack 0." in caplog.text
    assert "read 0." in caplog.text


@pytest.fixture(params=[1])
def world(request):
    """A producer "p" and a consumer "d" that loads a request "r" in small chunks, in virtual time."""
    world = World(settings={"staging": {"chunk_bytes": 64, "budget_bytes": 1 << 16}})
    p, d = (
        world.start(FakeEngine(name, attention_model(), tp_size=tp_size), role=role)
        for name, role, tp_size in (("p", "producer", request.param), ("d", "consumer", 1))
    )
    d.load_from(p, "r", [0, 1, 2], [7, 6, 5], 12)
    yield world
    world.close()


def test_in_flight_loads_report_their_progress(world):
    driver = world.engines[1].workers[0].driver
    world.network.faults = LoopbackFaults(max_delay_calls=30)
    assert world.run(lambda: any(load.nbytes for load in driver.in_flight()))
    (load,) = driver.in_flight()
    assert (load.request_id, load.rank, load.peer, load.path) == ("r", "pp0tp0", "p", "packed")
    assert 0 < load.nbytes < load.total_bytes == 12 * 2 * 2 * 2 * 4 * 2  # as above
    assert world.run(world.is_quiet)
    assert driver.in_flight() == ()


def test_a_report_has_whatever_its_load_has_counted():
    """A field of the report that a load does not fill would show nothing, without an error."""
    load = LoadTrace(peer="p", is_followed=False, wanted_s=1.0)
    load.finished(4096, 0.5, "packed", (Phase("wire", 4.0, 5.0),))
    for number, field in enumerate(msgspec.structs.fields(LoadTrace), start=2):
        if getattr(load, field.name) in (None, 0):
            setattr(load, field.name, number)
    report = load.ended("r", "done", now=50.0, ahead_s=0.0)
    unfilled = [
        field.name
        for field in msgspec.structs.fields(RequestTrace)
        if getattr(report, field.name) == field.default
    ]
    assert unfilled == []


@pytest.mark.parametrize("world", [2], indirect=True)
def test_reads_from_several_ranks_are_one_phase(world):
    assert world.run(world.is_quiet)
    (trace,) = world.engines[1].workers[0].poll().stats.traces
    assert [phase.name for phase in trace.phases] == ["want", "greeting", "read", "wire", "unpack"]
    read, wire, unpack = trace.phases[2:]
    assert read.start_s <= wire.start_s == unpack.start_s <= wire.end_s <= unpack.end_s


def test_a_fallback_from_rdma_to_tcp_is_named_in_the_path(world, monkeypatch):
    monkeypatch.setattr(LoopbackTransport, "falls_back_to_tcp", lambda *_: True)
    assert world.run(world.is_quiet)
    (transfer,) = world.engines[1].workers[0].poll().stats.transfers
    assert transfer.path == "packed-tcp-fallback"


@pytest.fixture
def spans(monkeypatch):
    return record_spans(monkeypatch)


def test_a_transfers_span_is_a_child_of_its_requests_span(spans):
    engine = RequestSpans("d")
    engine.on_new_request("r", HEADERS)
    engine.export([LOAD])
    (load,) = [span for span in spans() if span.name == "kvconnector.load"]
    assert (f"{load.context.trace_id:032x}", f"{load.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert (load.start_time, load.end_time) == (10_000_000_000, 14_000_000_000)
    assert load.attributes["kvconnector.path"] == "tcp"
    phases = [span for span in spans() if span is not load]
    assert [span.name for span in phases] == [
        "kvconnector.want",
        "kvconnector.greeting",
        "kvconnector.read",
    ]
    assert {span.parent.span_id for span in phases} == {load.context.span_id}
    assert [span.end_time for span in phases] == [11_000_000_000, 11_500_000_000, 14_000_000_000]


def test_a_forgotten_requests_failed_load_is_an_error_span(spans, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_REQUESTS", 1)
    engine = RequestSpans("d")
    for name in ("r", "newer"):
        engine.on_new_request(name, HEADERS)
    failed = RequestTrace(
        request_id="r", kind="load", outcome=PeerLostError.__name__, phases=LOAD.phases[:1]
    )
    engine.export([failed])
    (load,) = [span for span in spans() if span.name == "kvconnector.load"]
    assert load.parent is None
    assert load.status.status_code is StatusCode.ERROR
    assert load.status.description == "PeerLostError"
