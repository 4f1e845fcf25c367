"""The data path and the benchmarks on GPU memory."""

import pytest

from kvconnector.bench.contract import BenchOptions, TransportOptions
from kvconnector.bench.registry import BENCHMARKS
from kvconnector.bench.selftest import two_processes_transfer
from kvconnector.bench.shapes import EngineShape, ModelShape

pytestmark = pytest.mark.gpu

MODEL = ModelShape(name="tiny", num_layers=3, num_kv_heads=4, head_dim=64)


def _run(name, **fields):
    options = BenchOptions(
        **{
            "model": MODEL,
            "device": "cuda",
            "tokens": (200,),
            "iterations": 2,
            **fields,
        }
    )
    return BENCHMARKS[name].run(options, lambda _: None)


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("direct", ["never", "always"])
def test_two_processes_move_a_cache_between_pools_of_one_gpu(direct):
    result = two_processes_transfer("cuda:0", TransportOptions(direct=direct))
    assert result.nbytes > 0


def test_relayout():
    (case,) = _run("relayout")
    assert {each.kind for each in case.measurements} == {"ours", "naive", "limit"}


def test_blocks():
    assert len(_run("blocks")) == 3


@pytest.mark.ucx
@pytest.mark.integration
def test_gil():
    cases = _run("gil", tokens=(64,))
    assert len(cases) == 3
    assert all(case.ours.contender.startswith("pump (") for case in cases)


@pytest.mark.ucx
@pytest.mark.integration
def test_decode_kernels_run_beside_transfers():
    _, case = _run("gil", tokens=(64,), decode_load=True)
    assert case.ours.figures["decode_steps_kept"] > 0


@pytest.mark.ucx
@pytest.mark.integration
def test_several_ranks_are_held_against_one_pair_and_one_gpus_ingress():
    case, _ = _run("transfer", prefill=EngineShape(tp=2), decode=EngineShape(tp=2))
    assert set(case.ours.figures) == {"speed_over_one_pair", "speed_over_one_gpus_ingress"}
    assert {each.kind for each in case.measurements} == {"ours", "variant", "limit"}


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
