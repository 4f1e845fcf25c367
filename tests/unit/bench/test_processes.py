"""The processes of a benchmark: what they answer, what a failing one leaves behind, and on which GPUs they are."""

import os

import msgspec
import pytest

from kvconnector.bench.processes import EngineProcesses
from kvconnector.bench.rank_process import CallFailedError, EngineSpec, RankProcess
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.errors import ConfigError

MODEL = ModelShape(name="tiny", num_layers=2, num_kv_heads=2, head_dim=8)


SPEC = EngineSpec(
    engine_id="prefill", model=MODEL, shape=EngineShape(tp=2), num_blocks=6, device="cpu"
)


@pytest.mark.integration
def test_what_a_process_cannot_do_is_told_with_its_rank_and_it_lives_on():
    with EngineProcesses(SPEC) as engine:
        with pytest.raises(CallFailedError, match=r"prefill pp0tp0 failed: (.|\n)*_agent"):
            engine.call(RankProcess.read_blocks, [0], [0])
        engine.call(RankProcess.poison)


@pytest.mark.integration
def test_a_process_that_ends_is_told_with_the_end_of_its_output_and_none_stays():
    before = _children()
    nowhere = msgspec.structs.replace(SPEC, shape=EngineShape(pp=3))
    with pytest.raises(
        CallFailedError, match=r"prefill pp0tp0 ended; its output: (.|\n)*num_layers=2"
    ):
        EngineProcesses(nowhere)
    assert _children() == before


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
