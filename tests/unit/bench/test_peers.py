"""The peers' agents: that they read exactly what they are asked for."""

import ctypes
import importlib.util
import sys
from types import SimpleNamespace

import pytest

from kvconnector.bench import messages as m
from kvconnector.bench.agents import open_agent
from kvconnector.bench.contract import BenchOptions, Peer
from kvconnector.bench.pools import RankPools
from kvconnector.bench.registry import benchmark_named
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.errors import ConfigError, TransportError
from kvconnector.ids import Rank

MODEL = ModelShape(name="tiny", num_layers=2, num_kv_heads=2, head_dim=8)
NUM_PARTS = 4
NUM_TOKENS = 16 * 3


class FakeEngine:
    """Mooncake's engine as far as the agent knows it, copying within this process."""

    descriptors: int
    status = 0

    def initialize(self, host, metadata, protocol, device):
        assert (metadata, protocol) == ("P2PHANDSHAKE", "tcp")
        return self.status

    def get_rpc_port(self):
        return 12345

    def register_memory(self, address, nbytes):
        return 0

    def unregister_memory(self, address):
        return 0

    def batch_transfer_sync_read(self, peer, local, remote, lengths):
        assert peer == "127.0.0.1:12345"
        FakeEngine.descriptors = len(lengths)
        for into, source, nbytes in zip(local, remote, lengths, strict=True):
            ctypes.memmove(into, source, nbytes)
        return 0


@pytest.fixture
def fake_mooncake(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=FakeEngine))


def _pools():
    return RankPools(MODEL, EngineShape(), Rank(0, 0), num_blocks=8, device="cpu")


def _open(pools):
    return open_agent(m.OpenAgent("mooncake", "x", 0), pools)


@pytest.mark.usefixtures("fake_mooncake")
@pytest.mark.parametrize(
    "remote,local,num_runs",
    [
        ((5, 0, 3), (1, 7, 2), 3),
        ((2, 3, 4), (5, 6, 7), 1),
        ((2, 3, 7), (5, 6, 7), 2),
        ((2, 3, 4), (6, 5, 7), 3),
    ],
    ids=["scattered", "run", "two-runs", "run-on-one-side"],
)
def test_mooncake_reads_every_run_of_every_part_once(remote, local, num_runs):
    theirs, ours = _pools(), _pools()
    theirs.write(1, remote, NUM_TOKENS)
    producer, consumer = _open(theirs), _open(ours)
    consumer.join(producer.opened())
    read = consumer.read(remote=remote, local=local, timeout_s=10.0)
    assert ours.mismatch(1, local, NUM_TOKENS) == ""
    assert FakeEngine.descriptors == num_runs * NUM_PARTS
    assert read.request_s >= read.transfer_s > 0
    consumer.close()


@pytest.mark.usefixtures("fake_mooncake")
def test_a_mooncake_that_refuses_is_told_with_its_status(monkeypatch):
    monkeypatch.setattr(FakeEngine, "status", -3)
    with pytest.raises(TransportError, match="status=-3"):
        _open(_pools())


@pytest.mark.parametrize("peer", ["nixl", "mooncake"])
def test_a_peer_that_cannot_be_imported_names_the_option_that_finds_it(monkeypatch, peer):
    for name in ("nixl", "nixl._api", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="--peer-site"):
        open_agent(m.OpenAgent(peer, "x", 0), _pools())


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("peer", ["nixl", "mooncake"])
def test_an_installed_peer_moves_the_same_bytes(peer):
    if importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    options = BenchOptions(
        model=MODEL, tokens=(NUM_TOKENS,), iterations=2, timeout_s=60.0, peer=Peer(peer)
    )
    (case,) = benchmark_named("transfer").run(options, lambda _: None)
    assert {each.part for each in case.measurements} == {"ours", "peer", "limit"}
    assert case.first("peer").contender == peer
    assert {"peer", "peer_default", "limit"} <= set(case.ratios())
