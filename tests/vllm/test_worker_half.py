import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvconnector.integrations.vllm as integration
from kvconnector.config import ConnectorConfig
from kvconnector.errors import LocalError, MemoryInUseError
from kvconnector.ids import EngineAddress
from kvconnector.integrations.vllm import worker as worker_module
from kvconnector.integrations.vllm.caches import register_groups
from kvconnector.integrations.vllm.host_buffer import HostBuffer
from kvconnector.integrations.vllm.messages import ConnectorStep
from kvconnector.integrations.vllm.settings import Settings
from kvconnector.integrations.vllm.stats import ConnectorStats, PromMetrics
from kvconnector.integrations.vllm.unwritten import FailedParts
from kvconnector.integrations.vllm.worker import ReplicaHalf, WorkerHalf
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.runtime import StepMetadata
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import RequestTrace, WorkerOutput, WorkerStats, orders
from tests.vllm import cache_world as c

pytestmark = pytest.mark.vllm

LAYER = c.NAMES[0]


def hold(request_id="p", ids=(2, 1)):
    return orders.HoldRequest(
        request_id=request_id,
        transfer_id=request_id,
        secret="5" * 32,
        blocks=(GroupBlocks.of(ids),),
        num_tokens=7,
    )


def load(request_id="d", ids=(4, 2, 3), tokens=(3 * c.SIZE, 6 * c.SIZE)):
    return orders.LoadRequest(request_id, (tokens,), (GroupBlocks.of(ids),), (GroupBlocks.of([1]),))


@pytest.fixture
def host_buffer(monkeypatch):
    """A host buffer whose device is the CPU, on a rank that shares tokens: two kernel blocks make one of ours, and
    vLLM's own operation copies.
    """

    def copy(source, destination, source_ids, destination_ids):
        destination[destination_ids] = source[source_ids]

    for name in ("insert_blocks_to_device", "swap_out_blocks_to_host"):
        monkeypatch.setattr(type(current_platform), name, staticmethod(copy), raising=False)
    spec = c.attention(MLAAttentionSpec, num_kv_heads=1, head_size=16, block_size=2 * c.SIZE)
    config, caches = c.one_group(spec, KVCacheLayout.LBNHC, c.SIZE)
    buffer = HostBuffer(caches)
    buffer.copy_blocks = copy_kv_blocks
    place = c.placed(1, world_size=2, rank=1, interleave_tokens=2 * c.SIZE)
    engine = c.vllm_config("FLASHMLA", tp_size=2)
    buffer.groups = register_groups(engine, config, buffer.mirrors, place)
    return buffer


def test_offered_blocks_are_copied_to_host_memory_first(host_buffer):
    device, mirror = host_buffer._caches[LAYER], host_buffer.mirrors[LAYER]
    host_buffer.before_lease(hold(), host_buffer.groups)
    assert torch.equal(mirror[2:6], device[2:6])
    assert not mirror[[0, 1, *range(6, 2 * c.BLOCKS)]].any()


def test_of_a_growing_prompt_the_last_block_is_copied_again(host_buffer):
    device, mirror = host_buffer._caches[LAYER], host_buffer.mirrors[LAYER]
    growing = [
        orders.GrowRequest("s", "s", "5" * 32, (GroupBlocks.of(ids),), Watermark(tokens))
        for ids, tokens in (((2, 1), 7), ((2, 1, 0), 12))
    ]
    host_buffer.before_lease(growing[0], host_buffer.groups)
    before = mirror.clone()
    device.fill_(5)
    host_buffer.before_lease(growing[1], host_buffer.groups)
    assert (mirror[:4] == 5).all()
    assert torch.equal(mirror[4:], before[4:])


def test_loaded_blocks_are_copied_to_the_device_before_they_are_reported(host_buffer):
    device, mirror = host_buffer._caches[LAYER], host_buffer.mirrors[LAYER]
    before = device.clone()
    host_buffer.before_load(load(), host_buffer.groups)
    mirror.fill_(777)
    host_buffer.after_load("another", is_filled=True)
    host_buffer.after_load("d", is_filled=True)
    # the ranks' blocks have 4 x SIZE tokens: the load is in the request's first and second block
    assert (device[[8, 9, 4, 5]] == 777).all()
    assert torch.equal(device[[0, 1, 2, 3, 6, 7]], before[[0, 1, 2, 3, 6, 7]])


class TakingWorker:
    """Reports what a test sets, and records its orders."""

    def __init__(self, error=None):
        self.error = error
        self.orders = []
        self.waits = 0
        self.awaited = WorkerOutput(finished_recving=frozenset({"d"}))
        self.output = WorkerOutput(finished_sending=frozenset({"old"}))
        self._outbox = Outbox()

    def start_step(self, step):
        if self.error is not None:
            raise self.error
        self.orders += step.orders
        self._outbox.expect(step.orders)

    def refuse(self, orders, error):
        self._outbox.refuse(orders, error)

    @property
    def is_waiting(self):
        return self._outbox.is_waiting

    def poll(self):
        output, self.output = self.output, WorkerOutput()
        for request_id in output.finished_recving:
            self._outbox.load_ended(request_id)
        for request_id in output.producer_started:
            self._outbox.producer_started(request_id)
        return output.merged(self._outbox.take())

    def wait(self, timeout_s):
        self.waits += 1
        self.output = self.awaited


def worker_half(worker, host_buffer=None, *, is_clearing=False, kind=WorkerHalf):
    config = ConnectorConfig.from_mapping({"engine_id": "e", "control": {"insecure": True}})
    settings = Settings(config, False, 64, 480.0, "auto", "m")
    cache_config = SimpleNamespace(needs_kv_cache_zeroing=is_clearing)
    untraced = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None))
    half = kind(untraced, cache_config, settings, c.placed())
    half._worker = worker
    if host_buffer is not None:
        half._host_buffer = host_buffer
        half._groups = host_buffer.groups
    return half


@pytest.mark.parametrize("may_sleep", [True, False])
def test_a_rank_that_transfers_nothing_sleeps_only_with_all_others(monkeypatch, may_sleep):
    asked = Mock(return_value=not may_sleep)
    monkeypatch.setattr(worker_module, "is_any", asked)
    half = worker_half(None, kind=ReplicaHalf)
    with nullcontext() if may_sleep else pytest.raises(MemoryInUseError, match="another rank"):
        half.sleep()
    assert asked.call_count == 1  # the others wait for its answer


def test_layers_are_reported_in_order_and_before_the_step():
    """vLLM calls for each layer, and passes the step's orders after it has launched the last one."""
    worker, written = TakingWorker(), []
    worker.layer_written = written.append
    half = worker_half(worker)
    half._layers = {name: number for number, name in enumerate(c.NAMES)}
    begun, grown = (
        orders.GrowRequest("s", "s", "5" * 32, (GroupBlocks.of(ids),), Watermark(*tokens))
        for ids, tokens in (((), ()), ((2, 1), (4, 7)))
    )
    step = ConnectorStep.of(StepMetadata(orders=(begun, grown, orders.DropRequest("x"))))
    for name in [*c.NAMES, "another.layer"]:
        half.layer_written(step, name)
    assert (worker.orders, written) == ([grown], [0, 1, 2])
    half.start_step(step)
    computed = replace(grown, watermark=Watermark(7))
    assert worker.orders[1:] == [computed, orders.DropRequest("x")]
    half.layer_written(step, LAYER)  # while a draft model's kernels run
    half.layer_written(ConnectorStep.of(StepMetadata()), LAYER)
    assert len(worker.orders) == 3


def test_what_a_failed_step_was_to_compute_is_not_read():
    worker, replica = TakingWorker(), worker_half(None, kind=ReplicaHalf)
    tokens = Watermark(4, 7)
    grown = orders.GrowRequest("s", "s", "5" * 32, (GroupBlocks.of((2, 1)),), tokens)
    step = ConnectorStep.of(StepMetadata(orders=(grown, hold(), load())))
    worker_half(worker).take_failed_step(step)
    assert worker.orders == [hold(), load()]
    replica.take_failed_step(step)
    assert replica.finished().finished_sending == {"p"}


def test_a_step_that_cannot_be_taken_fails_its_requests_and_no_other():
    half = worker_half(TakingWorker(LocalError("no")))
    half.start_step(ConnectorStep.of(StepMetadata(orders=(hold(), load()))))
    finished = half.finished()
    assert finished.finished_sending == {"p", "old"}
    assert finished.finished_recving == {"d"}
    assert finished.failed_recving == {"d"}
    assert half.finished().finished_recving == set()


@pytest.mark.parametrize(
    "filled,invalid",
    [
        (2 * c.SIZE, {4, 2, 3}),
        (3 * c.SIZE, {4, 2, 3}),
        (4 * c.SIZE, {2, 3}),
        (5 * c.SIZE + 1, {3}),
        (6 * c.SIZE, set()),
        (7 * c.SIZE, set()),
        (None, set()),
    ],
)
def test_the_blocks_that_a_failed_load_has_not_filled_are_invalid(filled, invalid):
    """If it is not known how many tokens arrived, the request fails as a whole."""
    worker = TakingWorker()
    half = worker_half(worker)
    half._parts = FailedParts.of([c.registered(c.attention())[0]], 1)
    blocks = replace(load(), local_blocks=(GroupBlocks.of((4, 2, 3), 3),))
    half.start_step(ConnectorStep.of(StepMetadata(orders=(blocks, load("good")))))
    worker._outbox.load_ended("d", LocalError("lost"), filled_tokens=filled)
    worker._outbox.load_ended("good")
    finished = half.finished()
    assert finished.finished_recving == {"d", "good"}
    assert finished.failed_recving == (set() if filled is not None else {"d"})
    assert [half.take_unfilled() for _ in range(2)] == [invalid, set()]
    assert half.take_report().failed == {"d": "LocalError: lost"}


def test_unfilled_blocks_are_named_as_vllm_counts_them():
    """Where an attention backend splits vLLM's blocks, a load names kernel blocks."""
    options = {"backend": "FLASHINFER", "kernel_block_size": c.SIZE}
    groups = [c.registered(c.attention(block_size=2 * c.SIZE), **options)[0]]
    # vLLM ends its engine core over the id of a block that one of several groups has
    assert FailedParts.of(groups, 2) is None
    parts = FailedParts.of(groups, 1)
    order = replace(load(tokens=(0, 4 * c.SIZE)), local_blocks=(GroupBlocks.of((8, 9, 4, 5)),))
    parts.expect([order])
    lost = WorkerOutput(finished_recving={"d"}, filled_tokens={"d": 2 * c.SIZE + 1})
    assert parts.ended(lost) == {"d"}
    assert parts.take_unfilled() == {2}


def test_an_idle_engine_reports_a_load_in_the_step_that_began_it():
    """No step waits while the engine has something to compute, or no load is under way."""
    worker = TakingWorker()
    half = worker_half(worker)
    half.finished(is_idle=True)
    half.start_step(ConnectorStep.of(StepMetadata(orders=(load(),))))
    assert half.finished().finished_recving == set()
    assert worker.waits == 0
    assert half.finished(is_idle=True).finished_recving == {"d"}
    half.finished(is_idle=True)
    assert worker.waits == 1


def test_a_load_that_ended_does_not_wait_for_others():
    """vLLM takes the results of the load's step only after the next step, which it has already planned."""
    worker = TakingWorker()
    connector = object.__new__(integration.KVConnector)
    connector._worker_half, connector._has_ended_loads = worker_half(worker), False
    connector._untaken = None
    connector.bind_connector_metadata(ConnectorStep(b"", is_idle=True))
    first, other = load(), load("other")
    connector._worker_half.start_step(ConnectorStep.of(StepMetadata(orders=(first, other))))
    results = [connector.get_transfer_results(set()).finished_recving for _ in range(3)]
    assert results[:2] == [{"d"}, set()]
    assert worker.waits == 2  # in the first step, and in the third


def test_the_reason_of_a_failed_lease_reaches_the_scheduler_half_without_other_reports():
    worker, reasons = TakingWorker(), {"p": "LeaseExpiredError: the lease ended"}
    worker.output = WorkerOutput(finished_sending=frozenset(reasons), failed_sending=reasons)
    connector = object.__new__(integration.KVConnector)
    connector._worker_half = worker_half(worker)
    assert connector.build_connector_worker_meta() is None
    assert connector._worker_half.finished().finished_sending == {"p"}
    assert connector.build_connector_worker_meta().unsent == reasons
    assert connector.build_connector_worker_meta() is None


@pytest.mark.parametrize("end", ["started", "dropped"])
def test_an_idle_engine_waits_for_the_beginning_of_a_prompt_that_it_follows(end):
    worker = TakingWorker()
    worker.output, worker.awaited = WorkerOutput(), WorkerOutput(producer_started=frozenset({"d"}))
    half = worker_half(worker)
    want = orders.WantRequest(
        "d", "t", "5" * 32, EngineAddress("p", "tcp://127.0.0.1:9"), is_followed=True
    )
    half.start_step(ConnectorStep.of(StepMetadata(orders=(want,))))
    if end == "dropped":
        half.start_step(ConnectorStep.of(StepMetadata(orders=(orders.DropRequest("d"),))))
    half.finished(is_idle=True)
    assert half.take_report().producer_started == ({"d"} if end == "started" else set())
    half.finished(is_idle=True)
    assert worker.waits == (end == "started")


def test_a_request_whose_caches_cannot_be_made_ready_fails_alone(host_buffer):
    """The worker carries out the rest of the step, and notifies the refused requests' other engines."""
    worker = TakingWorker()
    half = worker_half(worker, host_buffer)
    bad, good = load("bad", ids=(3,)), load()
    half.start_step(ConnectorStep.of(StepMetadata(orders=(bad, good, orders.DropRequest("x")))))
    assert worker.orders == [orders.DropRequest("bad"), good, orders.DropRequest("x")]
    host_buffer.copy_blocks = None
    half.start_step(ConnectorStep.of(StepMetadata(orders=(hold(), orders.DropRequest("y")))))
    assert worker.orders[3:] == [orders.WithdrawRequest("p"), orders.DropRequest("y")]
    finished = half.finished()
    assert (finished.finished_recving, finished.failed_recving) == ({"bad"}, {"bad"})
    assert finished.finished_sending == {"p", "old"}


def test_copies_of_a_failed_load_are_forgotten(host_buffer):
    """When a request with the same id is loaded, the old one's blocks may belong to another request."""
    worker = TakingWorker()
    half = worker_half(worker, host_buffer)
    half.start_step(ConnectorStep.of(StepMetadata(orders=(load("bad", ids=(3,)), load()))))
    worker.output = WorkerOutput(finished_recving=frozenset({"d"}), failed_recving={"d": "lost"})
    before = host_buffer._caches[LAYER].clone()
    assert half.finished().finished_recving == {"bad", "d"}
    assert torch.equal(host_buffer._caches[LAYER], before)
    assert host_buffer._loads == {}


def test_caches_in_use_outlive_a_worker_that_closes(monkeypatch):
    def close():
        raise MemoryInUseError("consumers have not unmapped the caches")

    logged = []
    # a record would keep the error, which keeps the caches
    monkeypatch.setattr(
        worker_module.logger, "error", lambda text, error: logged.append(str(error))
    )
    half = worker_half(TakingWorker())
    half._worker.close = close
    half._groups = [c.registered(c.attention())[0]]
    cache = weakref.ref(half._groups[0].tensors[LAYER])
    half.close()
    (text,) = logged
    assert "consumers have not unmapped the caches" in text
    del half
    gc.collect()
    assert cache() is not None


def stats(*seconds, failures=None, expired=0, contained=None):
    load = {"kind": "load", "outcome": "done", "phases": (), "path": "packed"}
    loads = [RequestTrace(request_id="r", nbytes=1 << 20, seconds=each, **load) for each in seconds]
    return ConnectorStats.of(
        WorkerStats(
            traces=loads,
            failures=failures or {},
            leases_expired=expired,
            contained=contained or {},
        )
    )


def test_statistics_merge_and_reduce_to_a_line():
    merged = stats(0.25, contained={"KeyError": 2}).aggregate(
        stats(0.75, failures={"PeerLostError": 2}, expired=1, contained={"KeyError": 1})
    )
    line = merged.reduce()
    assert line["Num successful transfers"] == 2
    assert line["Avg xfer time (ms)"] == 500
    assert line["Throughput (MB/s)"] == 2
    assert line["Num failed transfers"] == line["Num failed: PeerLostError"] == 2
    assert line["Num KV expired reqs"] == 1
    assert line["Num contained: KeyError"] == 3
    assert line["Num path: packed"] == 2
    assert stats().is_empty()
    assert stats().reduce()["Num successful transfers"] == 0


def test_statistics_become_prometheus_metrics_of_their_engine():
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = PromMetrics(config, types, ["model", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    more = {"expired": 1, "contained": {"KeyError": 3}}
    merged = stats(0.25, 0.5, failures={"PeerLostError": 2}, **more)
    metrics.observe(merged.data, 1)
    for name, engine, labels, value in (
        ("xfer_time_seconds_count", "0", {}, 0),
        ("xfer_time_seconds_sum", "1", {}, 0.75),
        ("xfer_gigabytes_per_second_sum", "1", {}, pytest.approx((1 << 20) / 1e9 * (4 + 2))),
        ("num_transfers_total", "1", {"path": "packed"}, 2),
        ("num_failed_transfers_total", "1", {"cause": "PeerLostError"}, 2),
        ("num_contained_exceptions_total", "1", {"type": "KeyError"}, 3),
    ):
        names = {"model": "m", "engine": engine, **labels}
        assert registry.get_sample_value(f"vllm:kvconnector_{name}", names) == value


@pytest.mark.parametrize("name", ["KVConnector", "NixlConnector"])
def test_vllm_finds_the_connector_by_its_module_and_by_its_plugin(name):
    role = {"kv_role": "kv_both", "kv_connector_module_path": integration.__name__}
    config = KVTransferConfig(kv_connector=name, **role)  # launchers know NixlConnector
    assert KVConnectorFactory.get_connector_class(config) is integration.KVConnector
    integration.register()
    integration.register()
    found = KVConnectorFactory.get_connector_class_by_name("KVConnector")
    assert found is integration.KVConnector
    times = {"transfer_duration": [1.0]}
    assert found.build_kv_connector_stats(times).data == times
