from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.platforms import current_platform

import kvconnector.integrations.vllm as integration
from kvconnector.config import ConnectorConfig
from kvconnector.errors import LocalError
from kvconnector.integrations.vllm.caches import RegisteredGroup
from kvconnector.integrations.vllm.host_buffer import HostBuffer
from kvconnector.integrations.vllm.messages import ConnectorStep, GroupInfo
from kvconnector.integrations.vllm.settings import Settings
from kvconnector.integrations.vllm.stats import PromMetrics, TransferStats
from kvconnector.integrations.vllm.worker import WorkerHalf
from kvconnector.runtime import CacheGroup, StepMetadata, view_of
from kvconnector.runtime.steps import BlockList, HoldRequest, LoadRequest
from kvconnector.session import TransferStats as LoadStats
from kvconnector.session import WorkerStats
from kvconnector.topology import GroupGeometry, PartGeometry
from tests.vllm.test_caches import placed

pytestmark = pytest.mark.vllm

BLOCKS, HEADS, SIZE, DIM = 6, 2, 4, 3
LAYER = "model.layers.0.attn"


def hold(request_id="p", ids=(2, 1)):
    return HoldRequest(
        request_id=request_id,
        transfer_id=request_id,
        secret="5" * 32,
        blocks=(BlockList.of(ids),),
        num_tokens=7,
    )


def load(request_id="d", ids=(3, 4, 5), tokens=(4, 11)):
    return LoadRequest(request_id, (tokens,), (BlockList.of(ids),), (BlockList.of([1]),))


def group(tensor):
    part = PartGeometry(
        name="kv", total_heads=HEADS, head_start=0, head_stop=HEADS, head_dim=DIM, item_size_bytes=4
    )
    geometry = GroupGeometry(block_size=SIZE, layers=(0,), parts=(part,))
    cache = CacheGroup(geometry=geometry, views={0: (view_of(tensor),)})
    return RegisteredGroup(cache, GroupInfo(vllm_group=0, kernel_blocks=1), {LAYER: tensor})


@pytest.fixture
def host_buffer(monkeypatch):
    """A host buffer whose device is the CPU; vLLM's own operation copies."""

    def copy(source, destination, source_ids, destination_ids):
        destination[destination_ids] = source[source_ids]

    for name in ("insert_blocks_to_device", "swap_out_blocks_to_host"):
        monkeypatch.setattr(type(current_platform), name, staticmethod(copy), raising=False)
    buffer = HostBuffer({LAYER: torch.randn(BLOCKS, HEADS, SIZE, DIM)})
    buffer.copy_blocks = copy_kv_blocks
    return buffer


def test_offered_blocks_are_copied_to_host_memory_first(host_buffer):
    device, mirror = host_buffer._caches[LAYER], host_buffer.mirrors[LAYER]
    host_buffer.before_step(StepMetadata(holds=(hold(),)), [group(mirror)])
    assert torch.equal(mirror[[1, 2]], device[[1, 2]])
    assert not mirror[[0, 3, 4, 5]].any()


def test_loaded_blocks_are_copied_to_the_device_before_they_are_reported(host_buffer):
    device, mirror = host_buffer._caches[LAYER], host_buffer.mirrors[LAYER]
    before = device.clone()
    host_buffer.before_step(StepMetadata(loads=(load(),)), [group(mirror)])
    mirror.fill_(7)
    host_buffer.after_load(["another", "d"])
    # tokens 4 to 10 are in the second and third block of the request
    assert (device[[4, 5]] == 7).all()
    assert torch.equal(device[:4], before[:4])


def test_without_vllms_operation_a_host_buffer_says_so(host_buffer):
    host_buffer.copy_blocks = None
    with pytest.raises(LocalError, match="copy blocks"):
        host_buffer.before_step(StepMetadata(holds=(hold(),)), [group(host_buffer.mirrors[LAYER])])


class RefusingWorker:
    def start_step(self, step):
        raise LocalError("no")

    def poll(self):
        from kvconnector.session import WorkerOutput

        return WorkerOutput(finished_sending=frozenset({"old"}))


def test_a_step_that_cannot_be_taken_fails_its_requests_and_no_other():
    config = ConnectorConfig.from_mapping({"engine_id": "e", "control": {"insecure": True}})
    settings = Settings(config, False, 64, 480.0, "m")
    half = WorkerHalf(
        SimpleNamespace(), SimpleNamespace(needs_kv_cache_zeroing=False), settings, placed()
    )
    half._worker = RefusingWorker()
    half.start_step(ConnectorStep.of(StepMetadata(holds=(hold(),), loads=(load(),))))
    finished = half.finished()
    assert finished.sending == {"p", "old"}
    assert finished.recving == {"d"}
    assert "no" in finished.failed["d"]
    assert half.finished().recving == set()


def stats(*seconds, failures=None, expired=0):
    loads = tuple(
        LoadStats(request_id="r", nbytes=1 << 20, seconds=s, reads=1, path="packed")
        for s in seconds
    )
    return TransferStats.of(
        WorkerStats(transfers=loads, failures=failures or {}, leases_expired=expired)
    )


def test_statistics_merge_and_reduce_to_a_line():
    merged = stats(0.25).aggregate(stats(0.75, failures={"PeerLostError": 2}, expired=1))
    line = merged.reduce()
    assert line["Num successful transfers"] == 2
    assert line["Avg xfer time (ms)"] == 500
    assert line["Throughput (MB/s)"] == 2
    assert line["Num failed transfers"] == line["Num failed: PeerLostError"] == 2
    assert line["Num KV expired reqs"] == 1
    assert line["Num path: packed"] == 2
    assert stats().is_empty()
    assert stats().reduce()["Num successful transfers"] == 0


def test_statistics_become_prometheus_metrics(monkeypatch):
    registry = CollectorRegistry()

    def registered(kind):
        return lambda **options: kind(**options, registry=registry)

    types = {kind: registered(kind) for kind in (Gauge, Counter, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = PromMetrics(config, types, ["model", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    merged = stats(0.25, 0.5, failures={"PeerLostError": 2}, expired=1)
    metrics.observe(merged.data, 1)

    def value(name, **labels):
        labels = {"model": "m", "engine": "1", **labels}
        return registry.get_sample_value(f"vllm:kvconnector_{name}", labels)

    assert value("xfer_time_seconds_count") == 2
    assert value("xfer_time_seconds_sum") == 0.75
    assert value("bytes_transferred_sum") == 2 << 20
    assert value("xfer_gigabytes_per_second_sum") == pytest.approx((1 << 20) / 1e9 * (4 + 2))
    assert value("num_transfers_total", path="packed") == 2
    assert value("num_failed_transfers_total", cause="PeerLostError") == 2
    assert value("num_failed_transfers_total", cause="LeaseExpiredError") == 0
    assert value("num_kv_expired_reqs_total") == 1
    assert value("xfer_time_seconds_count", engine="0") == 0


def test_the_plugin_registers_the_name_once():
    integration.register()
    integration.register()
    found = KVConnectorFactory.get_connector_class_by_name("KVConnector")
    assert found is integration.KVConnector
    assert found.build_kv_connector_stats({"transfer_duration": [1.0]}).data == {
        "transfer_duration": [1.0]
    }
