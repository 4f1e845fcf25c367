"""The processes of a benchmark: what they answer, and what a failing one leaves behind."""

import importlib.util
import os
import socket

import pytest

from kvconnector.bench import messages as m
from kvconnector.bench.children import EngineProcesses
from kvconnector.bench.contract import BenchOptions, Gpus, Peer
from kvconnector.bench.deployments import Deployment, devices_for
from kvconnector.bench.peers import PEER_SETTINGS, PeerPair
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.errors import ConfigError, PeerLostError, TransferTimeoutError

MODEL = ModelShape(name="tiny", num_layers=2, num_kv_heads=2, head_dim=8)


def _deployment(**fields):
    options = BenchOptions(model=MODEL, timeout_s=60.0, **fields)
    return Deployment(options, EngineShape(tp=2), EngineShape(), (48,))


@pytest.mark.integration
def test_ranks_write_and_check_their_share():
    opens, _ = _deployment().opens()
    with EngineProcesses("prefill", opens) as engine:
        engine.ask_all(m.Write((4, 1), 32), m.Ok)
        assert [each.mismatch for each in engine.ask_all(m.Check((4, 1), 32), m.Checked)] == [
            "",
            "",
        ]
        wrong = engine.ask_all(m.Check((1, 4), 32), m.Checked)
        assert all("tokens differ" in each.mismatch for each in wrong)


@pytest.mark.integration
def test_what_a_child_cannot_do_is_told_with_its_rank_and_the_child_lives_on():
    opens, _ = _deployment().opens()
    failed = pytest.raises(m.ChildFailedError, match=r"prefill pp0tp0 failed: (.|\n)*no agent yet")
    with EngineProcesses("prefill", opens) as engine:
        with failed:
            engine.ask_each([m.ReadBlocks((0,), (0,)), m.Poison()], m.Ok)
        assert engine.ask_all(m.Poison(), m.Ok) == [m.Ok(), m.Ok()]


@pytest.mark.integration
def test_a_child_that_ends_is_told_with_the_end_of_its_output_and_no_process_stays(tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('this site is broken')")
    before = _children()
    opens, _ = _deployment().opens()
    with pytest.raises(m.ChildFailedError, match="its output ends: this site is broken"):
        EngineProcesses("prefill", opens, site=str(tmp_path))
    assert _children() == before


@pytest.mark.integration
@pytest.mark.parametrize("peer,module", [("nixl", "nixl"), ("mooncake", "mooncake")])
def test_a_missing_peer_is_named_with_what_to_do(peer, module):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    options = BenchOptions(model=MODEL, timeout_s=60.0, peer=Peer(peer))
    deployment = Deployment(options, EngineShape(), EngineShape(), (32,))
    before = _children()
    with pytest.raises(m.ChildFailedError, match="--peer-site"):
        PeerPair(deployment, PEER_SETTINGS[peer][0])
    assert _children() == before


def test_a_closed_connection_and_a_silent_one_are_different_errors():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.05)
        with pytest.raises(TransferTimeoutError):
            m.receive_answer(ours)
        theirs.close()
        with pytest.raises(PeerLostError):
            m.receive_answer(ours)


def test_messages_arrive_whole_and_in_order():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.settimeout(5)
        for request in (m.Poison(), m.Write((1, 2), 3)):
            m.send_message(ours, request)
        assert m.receive_request(theirs) == m.Poison()
        assert m.receive_request(theirs) == m.Write((1, 2), 3)


def test_ranks_on_the_cpu_share_it():
    assert devices_for(BenchOptions(model=MODEL), 2, 1) == (["cpu", "cpu"], ["cpu"])


@pytest.mark.parametrize(
    "named,producers,consumers",
    [
        (Gpus(), [0, 1], [2, 3]),
        (Gpus((3,), (1, 0)), [3, 3], [1, 0]),
        (Gpus((), (2,)), [0, 1], [2, 2]),
    ],
)
def test_ranks_take_turns_on_the_gpus_named_for_them(monkeypatch, named, producers, consumers):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = devices_for(BenchOptions(model=MODEL, device="cuda", gpus=named), 2, 2)
    assert found == tuple([f"cuda:{index}" for index in side] for side in (producers, consumers))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="num_gpus=2"):
        devices_for(BenchOptions(model=MODEL, device="cuda", gpus=Gpus((), (2,))), 1, 1)


def _children():
    path = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    with open(path) as file:
        return file.read()
