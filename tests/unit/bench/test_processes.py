"""A benchmark's processes: their answers, that a failing one leaves none running, and their GPUs."""

import multiprocessing
import os
import select
from pathlib import Path

import msgspec
import pytest

from kvconnector.bench.deployment import Deployment
from kvconnector.bench.engine_process import EngineProcess
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.processes import CallFailedError
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.errors import ConfigError

MODEL = ModelShape(name="tiny", num_layers=2, num_kv_heads=2, head_dim=8)
DEPLOYMENT = Deployment(BenchOptions(model=MODEL, prefill=EngineShape(tp=2)))


@pytest.mark.integration
def test_an_error_in_a_process_names_its_rank_and_the_process_lives_on():
    with EngineProcess(DEPLOYMENT, "prefill") as engine:
        with pytest.raises(CallFailedError, match=r"prefill pp0tp0 failed: (.|\n)*_agent"):
            engine.call_ranks(RankProcess.read_blocks, [[[0]]], [[[0]]])
        engine.call_ranks(RankProcess.poison)


def test_caches_that_do_not_fit_into_the_host_s_memory_are_refused_before_any_process_starts():
    deployment = Deployment(msgspec.structs.replace(DEPLOYMENT.options, tokens=(10_000_000,)))
    # blocks of 16 tokens, for twice a request a sixteenth longer; two layers, K and V of two heads of 8 in bf16
    blocks = 2 * -(-(10_000_000 + 625_000) // 16)
    assert deployment.pool_bytes("prefill") == blocks * 16 * 2 * 2 * 2 * 8 * 2
    large = msgspec.structs.replace(deployment.options.model, num_kv_heads=1 << 20)
    options = msgspec.structs.replace(deployment.options, model=large)
    with pytest.raises(ConfigError, match=r"too little free memory.*needed='.* TiB', free='"):
        EnginePair(Deployment(options))


@pytest.mark.integration
def test_a_process_that_ends_is_reported_with_its_last_output_and_none_stays():
    before = multiprocessing.active_children()
    with (
        pytest.raises(CallFailedError, match=r"pp0tp0 ended; its output: (.|\n)*no memory for"),
        EngineProcess(Deployment(BenchOptions(tokens=(1 << 60,))), "prefill") as engine,
    ):
        engine.call_ranks(RankProcess.ready)
    assert multiprocessing.active_children() == before


@pytest.mark.integration
def test_processes_that_are_stopped_end_with_a_benchmark_that_is_killed():
    ours, theirs = multiprocessing.Pipe()
    benchmark = multiprocessing.get_context("spawn").Process(target=_stop_ranks, args=(theirs,))
    benchmark.start()
    assert ours.poll(60)
    ranks = [os.pidfd_open(int(pid)) for pid in ours.recv().split()]
    benchmark.kill()
    benchmark.join()
    assert len(ranks) == 3
    for rank in ranks:
        assert select.select([rank], [], [], 30)[0]
        os.close(rank)


def _stop_ranks(connection):
    with EngineProcess(DEPLOYMENT, "prefill") as engine:
        engine.call_ranks(RankProcess.ready)
        scheduler = _children(os.getpid())
        engine.pause()
        connection.send(f"{scheduler} {_children(scheduler)}")
        connection.recv()


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


@pytest.mark.parametrize(
    "gpus,side,expected",
    [
        (((), ()), "prefill", [0, 1]),
        (((), ()), "decode", [2, 3, 0]),
        (((3,), ()), "prefill", [3, 3]),
        (((), (1, 0)), "decode", [1, 0, 1]),
        (((4,), ()), "prefill", None),
    ],
)
def test_ranks_take_turns_on_the_gpus_named_for_them(monkeypatch, gpus, side, expected):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    shapes = {"prefill": EngineShape(tp=2), "decode": EngineShape(tp=3)}
    deployment = Deployment(BenchOptions(device="cuda", gpus=gpus, **shapes))
    if expected is None:
        with pytest.raises(ConfigError, match="num_gpus=4"):
            deployment.devices(side)
    else:
        assert deployment.devices(side) == [f"cuda:{index}" for index in expected]
