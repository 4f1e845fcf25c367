"""The processes of a benchmark: what they answer, what a failing one leaves running, and on which GPUs they are."""

import multiprocessing
import os
import select

import msgspec
import pytest

from kvconnector.bench.processes import EngineProcesses
from kvconnector.bench.rank_process import CallFailedError, EngineSpec, RankProcess
from kvconnector.bench.shapes import EngineShape, ModelShape, engine_geometry
from kvconnector.errors import ConfigError

MODEL = ModelShape(name="tiny", num_layers=2, num_kv_heads=2, head_dim=8)
SPEC = EngineSpec(
    engine_id="prefill",
    geometry=engine_geometry(MODEL, EngineShape(tp=2), "prefill"),
    shape=EngineShape(tp=2),
    num_blocks=(6,),
    device="cpu",
)


@pytest.mark.integration
def test_what_a_process_cannot_do_is_told_with_its_rank_and_it_lives_on():
    with EngineProcesses(SPEC) as engine:
        with pytest.raises(CallFailedError, match=r"prefill pp0tp0 failed: (.|\n)*_agent"):
            engine.call(RankProcess.read_blocks, [[[0]]], [[[0]]])
        engine.call(RankProcess.poison)


@pytest.mark.integration
def test_a_process_that_ends_is_told_with_the_end_of_its_output_and_none_stays():
    before = multiprocessing.active_children()
    nowhere = msgspec.structs.replace(SPEC, shape=EngineShape(pp=3))
    with (
        pytest.raises(
            CallFailedError, match=r"prefill pp2tp0 ended; its output: (.|\n)*out of range"
        ),
        EngineProcesses(nowhere) as engine,
    ):
        engine.call(RankProcess.ready)
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
    assert len(ranks) == 2
    for rank in ranks:
        assert select.select([rank], [], [], 30)[0]
        os.close(rank)


def _stop_ranks(connection):
    with EngineProcesses(SPEC) as engine:
        engine.call(RankProcess.ready)
        engine.pause()
        connection.send(_children())
        connection.recv()


def _children():
    path = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    with open(path) as file:
        return file.read()


@pytest.mark.parametrize(
    "gpus,first_gpu,expected",
    [((), 0, [0, 1]), ((), 3, [3, 0]), ((3,), 0, [3, 3]), ((1, 0), 2, [1, 0]), ((4,), 0, None)],
)
def test_ranks_take_turns_on_the_gpus_named_for_them(monkeypatch, gpus, first_gpu, expected):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    spec = msgspec.structs.replace(SPEC, device="cuda", gpus=gpus, first_gpu=first_gpu)
    if expected is None:
        with pytest.raises(ConfigError, match="num_gpus=4"):
            spec.devices()
    else:
        assert spec.devices() == [f"cuda:{index}" for index in expected]


def test_an_engines_cut_and_pools_reach_its_processes_as_json():
    sent = msgspec.json.encode((SPEC, 0))
    assert msgspec.json.decode(sent, type=tuple[EngineSpec, int]) == (SPEC, 0)
