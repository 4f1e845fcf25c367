"""The data path and the benchmarks on GPU memory."""

import pytest

from kvconnector.bench.contract import BenchOptions, Staging
from kvconnector.bench.registry import benchmark_named
from kvconnector.bench.selftest import loopback_transfer
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
            "warmup": 1,
            "timeout_s": 100.0,
            **fields,
        }
    )
    return benchmark_named(name).run(options, lambda _: None)


@pytest.mark.ucx
def test_two_workers_of_one_process_move_a_cache_between_gpu_pools():
    assert loopback_transfer(device="cuda:0", deadline_s=60.0).nbytes > 0


def test_relayout():
    (case,) = _run("relayout")
    assert {each.part for each in case.measurements} == {"ours", "naive", "limit"}


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
def test_decode_kernels_run_beside_transfers_at_every_cap():
    (case,) = _run("gil", tokens=(64,), decode_caps=(0, 8))
    with_figures = [each for each in case.measurements if each.figures]
    assert len(with_figures) == 2
    assert all(each.figures["decode_steps_kept"] > 0 for each in with_figures)


@pytest.mark.ucx
@pytest.mark.integration
def test_several_ranks_are_held_against_one_pair_and_one_gpus_ingress():
    (case,) = _run("transfer", prefill=EngineShape(tp=2), decode=EngineShape(tp=2))
    assert set(case.ours.figures) == {"speed_over_one_pair", "speed_over_one_gpus_ingress"}
    assert {each.part for each in case.measurements} == {"ours", "variant", "limit"}


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
def test_processes_move_a_cache_between_gpu_pools(prefill, decode):
    cases = _run(
        "transfer",
        prefill=prefill,
        decode=decode,
        tokens=(200, 5),
        staging=Staging(chunk_bytes=1 << 16),
    )
    assert [case.ours.nbytes for case in cases] == [200 * MODEL.token_bytes, 5 * MODEL.token_bytes]
