"""The data path and the benchmarks on GPU memory."""

import pytest

from kvconnector.bench.options import BenchOptions
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.cli import bench
from kvconnector.cli.doctor import _self_test
from scripts.benchmarks import __main__ as program

pytestmark = pytest.mark.gpu

MODEL = ModelShape(name="tiny", num_layers=3, num_kv_heads=4, head_dim=64)


def _run(name, **fields):
    options = BenchOptions(
        **{"model": MODEL, "device": "cuda", "tokens": (200,), "iterations": 2, **fields}
    )
    return list((bench.BENCHMARKS | program.BENCHMARKS)[name].run(options, lambda *_: None))


@pytest.mark.ucx
@pytest.mark.integration
def test_two_processes_move_a_cache_between_pools_of_one_gpu():
    verdicts = {each.subject: each.verdict for each in _self_test("cuda:0", "")}
    assert (verdicts["self-test"], verdicts["direct reads"]) == ("ok", "ok")


def test_relayout():
    (case,) = _run("relayout")
    assert [each.kind for each in case.measurements] == ["ours", "variant", "limit"]
    assert not case.notes


@pytest.mark.parametrize(
    "prefill, decode",
    [
        ("dtype=float8_e4m3fn,scale=0.3", "block=64,dtype=float8_e4m3fn,scale=0.41"),
        ("dtype=bfloat16", "layout=HND,dtype=float8_e5m2,scale=0.3,rounding=cast"),
    ],
)
def test_a_converting_copy(prefill, decode):
    shapes = {"prefill": EngineShape.parse(prefill), "decode": EngineShape.parse(decode)}
    (case,) = _run("relayout", **shapes)
    kinds = ["ours", "variant", "variant", "variant", "limit"]
    assert [each.kind for each in case.measurements] == kinds
    assert len(case.notes) == 2


@pytest.mark.ucx
@pytest.mark.integration
def test_gil():
    *_, both = _run("gil", tokens=(64,))
    assert both.case.endswith("beside prefill steps and decode kernels on their GPUs")
    assert len(both.ours.samples_s) == 2
    assert both.ours.figures["prefill_steps_kept"] > 0
    assert both.ours.figures["decode_steps_kept"] > 0


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize(
    "prefill,decode",
    [
        (EngineShape(), EngineShape()),
        (EngineShape(layout="HND"), EngineShape(block=64)),
        (EngineShape(tp=2, block=32), EngineShape(pp=2)),
    ],
    ids=["alike", "relayout", "tp2-to-pp2"],
)
def test_processes_move_a_cache_between_gpu_pools(monkeypatch, prefill, decode):
    monkeypatch.setenv("KVCONNECTOR_STAGING_CHUNK_BYTES", "65536")
    cases = _run("transfer", prefill=prefill, decode=decode, tokens=(200, 5))
    assert [case.ours.nbytes // MODEL.token_bytes for case in cases] == [200, 200, 5, 5]
