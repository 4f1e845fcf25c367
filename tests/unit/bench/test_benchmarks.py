"""Every benchmark, with tiny sizes, runs, reports every contender, and reports nothing for a wrong result."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.limits import open_stream, serve_stream
from kvconnector.bench.options import BenchOptions, Compute
from kvconnector.bench.processes import CallFailedError
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.cli import bench
from kvconnector.datapath.pump import pacing
from kvconnector.errors import ConfigError, PeerLostError
from scripts.benchmarks import __main__ as program
from scripts.benchmarks import gil, inferencex, sessions
from scripts.benchmarks import pacing as switched_off

DOCS = Path(__file__).parents[3] / "docs/benchmarks/method.md"
MODEL = ModelShape(name="tiny", num_layers=3, num_kv_heads=2, head_dim=16)
MLA = ModelShape(name="tiny-mla", num_layers=2, num_kv_heads=1, head_dim=24, is_mla=True)
TP2 = EngineShape(tp=2)
BENCHMARKS = bench.BENCHMARKS | program.BENCHMARKS


def _options(make=BenchOptions, **fields):
    return make(**{"model": MODEL, "tokens": (70,), "iterations": 2, **fields})


def _run(name, **fields):
    lines = []
    cases = list(
        BENCHMARKS[name].run(
            _options(BENCHMARKS[name].make, **fields), lambda *step: lines.append(step)
        )
    )
    assert lines
    for case in cases:
        assert all(sample > 0 for each in case.measurements for sample in each.samples_s)
        assert [each.kind for each in case.measurements].count("ours") == 1
    return cases


def _kinds(case):
    return {each.kind for each in case.measurements}


def test_the_documentation_names_every_benchmark():
    rows = [line.split("|")[1] for line in DOCS.read_text().splitlines() if line.count("|") == 3]
    named = {name for row in rows for name in row.replace("`", " ").replace(",", " ").split()}
    assert set(BENCHMARKS) <= named


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("model", [MODEL, MLA], ids=lambda model: model.name)
def test_relayout(model, scattered):
    shapes = {"prefill": EngineShape(layout="HND"), "decode": EngineShape(block=64)}
    (case,) = _run("relayout", model=model, scattered=scattered, **shapes)
    assert _kinds(case) == {"ours", "limit"}
    # rounded up to whole blocks of both sides
    assert case.ours.nbytes == 128 * model.token_bytes


@pytest.mark.parametrize(
    "prefill, decode, ratio",
    [
        ("dtype=bfloat16", "dtype=float8_e5m2,scale=0.3,rounding=cast", 4 / 3),
        ("dtype=float8_e4m3fn,scale=0.3,layout=HND", "block=64,dtype=float8_e4m3fn,scale=0.41", 1),
    ],
)
def test_a_converting_copy_is_measured_beside_a_plain_one(prefill, decode, ratio):
    shapes = {"prefill": EngineShape.parse(prefill), "decode": EngineShape.parse(decode)}
    (case,) = _run("relayout", **shapes)
    converting, plain, _ = case.measurements
    assert [each.kind for each in case.measurements] == ["ours", "variant", "limit"]
    # rounded up to whole blocks of both sides
    tokens = 128 if shapes["decode"].block == 64 else 80
    read, written = (MODEL.request_bytes(tokens, each.dtype) for each in shapes.values())
    assert [each.nbytes for each in case.measurements] == [written, read, min(read, written)]
    times = converting.percentile_s(50) / plain.percentile_s(50)
    (note,) = case.notes
    assert f"{times:.2f} of the time" in note
    assert f"{times * ratio:.2f} of it for each byte" in note


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize(
    "prefill, decode",
    [
        (TP2, EngineShape(block=64, dtype="float8_e4m3fn")),
        (
            EngineShape(dtype="float8_e4m3fn", scale=0.3),
            EngineShape(dtype="float8_e4m3fn", scale=0.41),
        ),
    ],
    ids=["type", "scale"],
)
def test_a_converting_read_is_measured_beside_a_plain_one(prefill, decode):
    read, written = (70 * MODEL.request_bytes(1, each.dtype) for each in (prefill, decode))
    cases = _run("transfer", prefill=prefill, decode=decode)
    assert cases
    for case in cases:
        ours, plain, *limits = (each.nbytes for each in case.measurements)
        assert (ours, plain) == (written, read)
        assert {*limits} == {min(read, written)}
        names = [each.contender for each in case.measurements]
        assert names[:2] == ["kvconnector", "kvconnector, without conversion"]
        assert any("a converting read takes" in note for note in case.notes)


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize(
    "model,prefill,decode",
    [
        (MODEL, EngineShape(tp=2, layout="HND"), EngineShape(pp=2, block=64)),
        (MLA, EngineShape(tp=2, block=32), EngineShape()),
        (MODEL, EngineShape(tp=2, dcp=2, interleave=8), EngineShape(tp=2, block=4)),
    ],
    ids=["tp2-to-pp2", "mla", "from-dcp2"],
)
def test_transfer(monkeypatch, model, prefill, decode):
    monkeypatch.setenv("KVCONNECTOR_STAGING_CHUNK_BYTES", "4096")
    cases = _run("transfer", model=model, prefill=prefill, decode=decode)
    assert [case.ours.nbytes for case in cases] == [70 * model.token_bytes] * 2
    assert [case.case.rpartition(", ")[2] for case in cases[:2]] == ["in turns", "back to back"]
    assert [len(case.ours.samples_s) for case in cases[:2]] == [2, 4]
    assert all(_kinds(case) == {"ours", "limit"} for case in cases)


@pytest.mark.ucx
@pytest.mark.integration
def test_handover_of_prompts_of_one_step_and_of_many(monkeypatch):
    monkeypatch.setenv("KVCONNECTOR_PATHS_DIRECT", "never")
    shapes = {"prefill": TP2, "decode": EngineShape(pp=2, block=64)}
    sizes = {"tokens": (70, 2500), "compute": Compute(100_000, 1024, (1, 3))}
    cases = _run("handover", **sizes, **shapes)
    # three of the longer ones would take more than the longest alone
    assert [case.ours.figures["prompts"] for case in cases] == [1, 1, 3]
    assert [len(case.ours.samples_s) for case in cases] == [2, 2, 6]
    assert all(_kinds(case) == {"ours", "naive"} for case in cases)
    last_bytes = [case.ours.figures["last_step_bytes"] for case in cases]
    assert last_bytes == [tokens * MODEL.token_bytes for tokens in (70, 2500 - 2 * 1024, 128)]


@pytest.mark.ucx
@pytest.mark.integration
def test_request_over_tcp():
    case, _ = _run("request", tls="tcp,self", tokens=(16,), scattered=False)
    assert any("packed" in note for note in case.notes)
    assert {each.contender: each.kind for each in case.measurements} == {
        "kvconnector": "ours",
        "memcpy, one thread": "variant",
        "raw TCP socket": "limit",
    }


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.slow
def test_gil(monkeypatch):
    monkeypatch.setattr(gil, "ALONE_TURNS", 1)
    cases = _run("gil")
    on_cpus = list(gil.BESIDE.values())[:3]
    names = [tuple(case.case.rsplit(", ", 2)[1:]) for case in cases]
    assert names == [(rhythm, beside) for rhythm in gil.RHYTHMS for beside in on_cpus]
    assert all("direct" in case.ours.contender for case in cases)
    for idle, *busy in (cases[:3], cases[3:]):
        for case in busy:
            figures = case.ours.figures
            bound_s = 1.3 * (idle.ours.percentile_s(90) + figures["decode_step_s"])
            assert figures["p90_bound_s"] == pytest.approx(bound_s)
            assert figures["prefill_steps_kept"] > 0
            assert figures["decode_steps_kept"] > 0


@pytest.mark.ucx
@pytest.mark.integration
def test_each_constant_of_the_pacing_is_switched_off_in_turn():
    cases = _run("pacing", seconds=0.0)
    names = [tuple(case.case.rsplit(", ", 2)[1:]) for case in cases]
    assert len({*names}) == len(names) == 5
    off = {name for values in switched_off.OFF.values() for name in values}
    constants = {name for name in vars(pacing) if name.isupper() and not name.startswith("_")}
    assert off == constants - {"NS_PER_S"}
    for case in cases:
        assert len(case.measurements) == len(switched_off.OFF)
        assert all(len(each.samples_s) == 2 for each in case.measurements)


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("name", ["transfer", "gil"])
def test_a_transfer_of_other_blocks_reports_no_time(monkeypatch, name):
    offer_and_want = EnginePair.offer_and_want

    def with_swapped_blocks(self, requests):
        swapped = {
            name: replace(each, decode_blocks=[ids[::-1] for ids in each.decode_blocks])
            for name, each in requests.items()
        }
        return offer_and_want(self, swapped)

    monkeypatch.setattr(EnginePair, "offer_and_want", with_swapped_blocks)
    with pytest.raises(ResultMismatchError, match="tokens differ"):
        _run(name)


@pytest.mark.ucx
@pytest.mark.integration
def test_nixl_moves_the_same_bytes_where_it_is_installed():
    if importlib.util.find_spec("nixl") is None:
        with pytest.raises(CallFailedError, match="PYTHONPATH"):
            _run("transfer", tokens=(48,), peer="nixl")
        return
    for case in _run("transfer", tokens=(48,), peer="nixl"):
        assert {"peer", "limit"} <= _kinds(case)


@pytest.mark.ucx
@pytest.mark.integration
def test_bursts_of_a_mixed_cache_are_moved_whole_and_counted():
    cases = _run("inferencex", tokens=(256,), bursts=(1, 3), iterations=1)
    asked = [(16, 1), (16, 3), (64, 1), (64, 3)]
    for case, (page, burst) in zip(cases, asked, strict=True):
        assert case.ours.figures == {"prompt_tokens": 256, "page_tokens": page, "requests": burst}
        assert case.ours.nbytes == burst * inferencex.MODEL.request_bytes(256)
    with pytest.raises(ConfigError, match="multiples of 128"):
        _run("inferencex", tokens=(100,))


def test_the_environment_tunes_both_engines_as_it_would_in_production(monkeypatch):
    monkeypatch.setenv("KVCONNECTOR_STAGING_WINDOW", "7")
    monkeypatch.setenv("KVCONNECTOR_CONTROL_SECRET_KEY_FILE", "/not/for/loopback")
    monkeypatch.setenv("KVCONNECTOR_CONTROL_OVER_UCX", "false")
    config = _options().config("p", "producer")
    assert config.staging.window == 7
    assert not config.control.over_ucx
    assert _options().config("p", "producer", {"staging": {"window": 2}}).staging.window == 2


@pytest.mark.parametrize(
    "name,fields,named",
    [
        ("transfer", {"peer": "nixl", "prefill": TP2}, "both engines need the same"),
        ("transfer", {"peer": "nixl", "tokens": (64, 40)}, "block_tokens=16"),
    ],
)
def test_impossible_measurements_are_refused(name, fields, named):
    with pytest.raises(ConfigError, match=named):
        _run(name, **fields)


def test_the_raw_socket_brings_the_requested_number_of_bytes():
    size = 5_000_000
    with open_stream(("127.0.0.1", serve_stream("127.0.0.1", size)), size) as move:
        for count in (size, 3_000_000, size):
            move(count)
    with pytest.raises(PeerLostError):
        move(1000)


def test_sessions_serve_some_of_a_long_queue_and_give_up_the_rest(monkeypatch):
    monkeypatch.setattr(sessions, "COUNTS", (20, 600))
    cases = _run("sessions", iterations=5)
    assert [case.case.split(" requests, ")[0] for case in cases] == ["20", "600", "20", "600"]
    for case in cases:
        assert 0 < case.ours.figures["longest event_s"] < case.ours.figures["asking for all_s"]
        assert case.ours.figures["giving up all_s"] > 0
