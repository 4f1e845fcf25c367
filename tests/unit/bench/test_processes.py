"""The processes of a benchmark: what they answer, what a failing one leaves behind, and on which GPUs they are."""

import os

import msgspec
import pytest

from kvconnector.bench.contract import BenchOptions, Gpus
from kvconnector.bench.engines import Deployment
from kvconnector.bench.processes import ChildFailedError, EngineProcesses
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.errors import ConfigError

MODEL = ModelShape(name="tiny", num_layers=2, num_kv_heads=2, head_dim=8)


def _deployment(decode=None, **fields):
    options = BenchOptions(model=MODEL, **fields)
    return Deployment(options, EngineShape(tp=2), decode or EngineShape(), (48,))


@pytest.mark.integration
def test_ranks_write_and_check_their_share_also_after_a_pause():
    with EngineProcesses("prefill", _deployment().ranks()[0]) as engine:
        engine.call(RankProcess.write, [4, 1], 32)
        engine.pause()
        engine.resume()
        assert engine.call(RankProcess.mismatch, [4, 1], 32) == ["", ""]
        wrong = engine.call(RankProcess.mismatch, [1, 4], 32)
        assert all("tokens differ" in each for each in wrong)


@pytest.mark.integration
def test_what_a_process_cannot_do_is_told_with_its_rank_and_it_lives_on():
    with EngineProcesses("prefill", _deployment().ranks()[0]) as engine:
        with pytest.raises(ChildFailedError, match=r"prefill pp0tp0 failed: .*no agent yet"):
            engine.call(RankProcess.read_blocks, [0], [0])
        engine.call(RankProcess.poison)


@pytest.mark.integration
def test_a_process_that_ends_is_told_with_the_end_of_its_output_and_none_stays():
    before = _children()
    rank = msgspec.structs.replace(_deployment().ranks()[0][0], device="nowhere")
    with pytest.raises(ChildFailedError, match=r"prefill pp0tp0 ended; its output: (.|\n)*nowhere"):
        EngineProcesses("prefill", [rank])
    assert _children() == before


@pytest.mark.parametrize(
    "named,expected",
    [
        (Gpus(), ([0, 1], [2, 3])),
        (Gpus((3,), (1, 0)), ([3, 3], [1, 0])),
        (Gpus((), (2,)), ([0, 1], [2, 2])),
    ],
)
def test_ranks_take_turns_on_the_gpus_named_for_them(monkeypatch, named, expected):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = _deployment(EngineShape(tp=2), device="cuda", gpus=named).devices()
    assert found == tuple([f"cuda:{index}" for index in side] for side in expected)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="num_gpus=2"):
        _deployment(device="cuda", gpus=Gpus((), (2,))).devices()


def _children():
    path = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    with open(path) as file:
        return file.read()
