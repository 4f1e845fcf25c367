"""The backend's classes, called as SGLang's queues call them: SGLang's pools, metadata and hooks, and real workers."""

import secrets
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvconnector.errors import GeometryError, TransferAbortedError
from tests.sglang.listed import listed
from tests.support.ports import free_ports

pytestmark = [pytest.mark.sglang, pytest.mark.ucx]

SIZE, HEADS, DIM, LAYERS = 256, 2, 8, 3
TOKENS, CHUNK = 75, 48
ROWS = 4
SENT_ROW, READ_ROW = 1, 2
BOOTSTRAPPING, WAITING, SUCCESS, FAILED = 1, 2, 4, 0
LIMIT_S = 100.0
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


class Side:
    """One engine's rank. `pages` are those of the prompt, in no order."""

    def __init__(self, backend, mode, page_size, device):
        from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        self.page_size, self.device = page_size, device
        self.pool = MHATokenToKVPool(
            SIZE, page_size, torch.float32, HEADS, DIM, LAYERS, device, False
        )
        self.metadata = MetadataBuffers(ROWS, 16, torch.float32, 0)
        args = listed(self.pool, page_size, num_layers=LAYERS)
        args.engine_rank = args.pp_rank = 0
        args.kv_cache_dtype_str, args.kv_layout = "auto", None
        args.is_hybrid_mla_backend = False
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        server = SimpleNamespace(
            device=device.partition(":")[0],
            served_model_name="small",
            model_path="",
            enable_hisparse=False,
        )
        count = -(-TOKENS // page_size)
        order = np.random.default_rng(page_size).permutation(SIZE // page_size)[:count]
        self.pages = (order + 1).astype(np.int32)
        self.manager = backend.KVManager(args, DisaggregationMode(mode), server)

    def close(self):
        self.manager.teardown()

    def rows(self, start, stop):
        """Where these tokens are in the pool."""
        tokens = torch.arange(start, stop)
        pages = torch.from_numpy(self.pages).long()[tokens // self.page_size]
        return (pages * self.page_size + tokens % self.page_size).to(self.device)

    def write(self, values, start, stop):
        """What a step computes, on the current stream."""
        rows = self.rows(start, stop)
        for layer in range(LAYERS):
            self.pool.k_buffer[layer][rows] = values[0, layer, start:stop].to(self.device)
            self.pool.v_buffer[layer][rows] = values[1, layer, start:stop].to(self.device)

    def read(self):
        """All of the prompt, `[K or V, layer, token, head, dim]`."""
        rows = self.rows(0, TOKENS)
        parts = (self.pool.k_buffer, self.pool.v_buffer)
        return torch.stack(
            [torch.stack([part[layer][rows] for layer in range(LAYERS)]) for part in parts]
        ).cpu()


@pytest.fixture
def backend(monkeypatch):
    """The backend in a process that SGLang has not set up: one rank, its options, its model."""
    from kvconnector.integrations.sglang import backend

    parallel = SimpleNamespace(
        world_group=SimpleNamespace(cpu_group=None),
        attn_tp_size=1,
        pp_size=1,
        dp_size=1,
        attn_dp_size=1,
        attn_cp_size=1,
        attn_dcp_size=1,
        enable_kv_cache_sharding=False,
    )
    disagg = SimpleNamespace(
        disaggregation_bootstrap_port=free_ports(), enable_pd_role_switch=False
    )
    model = SimpleNamespace(
        num_hidden_layers=LAYERS,
        dtype=torch.float32,
        get_total_num_kv_heads=lambda: HEADS,
        get_swa_num_kv_heads=lambda _: HEADS,
    )
    config = SimpleNamespace(from_server_args=lambda _: model)
    monkeypatch.setattr(backend, "get_parallel", lambda: parallel)
    monkeypatch.setattr(backend, "get_disagg", lambda: disagg)
    monkeypatch.setattr(backend, "get_serving", lambda: SimpleNamespace(host="127.0.0.1"))
    monkeypatch.setattr(backend, "gather", lambda payload, _: [payload])
    monkeypatch.setattr(backend, "ModelConfig", config)
    return backend


@pytest.fixture(params=DEVICES)
def sides(backend, request):
    with (
        closing(Side(backend, "prefill", 16, request.param)) as prefill,
        closing(Side(backend, "decode", 32, request.param)) as decode,
    ):
        yield prefill, decode


def _asked(backend, sides):
    """A sender and a receiver of one room, the receiver with its pages."""
    prefill, decode = sides
    room = secrets.randbits(62) + 1
    port = backend.get_disagg().disaggregation_bootstrap_port
    address = f"127.0.0.1:{port}"
    sender = backend.KVSender(prefill.manager, address, room)
    sender.init(len(prefill.pages), SENT_ROW)
    receiver = backend.KVReceiver(decode.manager, address, room)
    assert receiver.poll() == BOOTSTRAPPING
    assert decode.manager.try_ensure_parallel_info(address)
    receiver.init(0)
    assert receiver.poll() == WAITING
    stream = torch.cuda.current_stream() if decode.device != "cpu" else None
    scheduler = SimpleNamespace(
        sliding_window_size=None, forward_stream=stream, enable_overlap=stream is not None
    )
    queue, request = SimpleNamespace(scheduler=scheduler), SimpleNamespace(kv_receiver=receiver)
    backend.note_length(queue, request, range(TOKENS), decode.page_size)
    receiver.send_metadata(decode.pages, READ_ROW, [], 0)
    return room, sender, receiver


def _until(wanted, *polled):
    until_s = time.monotonic() + LIMIT_S
    while [each.poll() for each in polled] != [wanted] * len(polled):
        assert time.monotonic() < until_s, [each.poll() for each in polled]
        time.sleep(0.001)


def test_a_prompt_in_chunks_and_its_metadata_arrive_in_other_pages(backend, sides):
    prefill, decode = sides
    room, sender, receiver = _asked(backend, sides)
    values = torch.randn(2, LAYERS, TOKENS, HEADS, DIM)
    _busy(prefill.device)
    prefill.write(values, 0, CHUNK)
    sender.send(prefill.pages[: CHUNK // 16])
    _busy(prefill.device)
    prefill.write(values, CHUNK, TOKENS)
    prefill.metadata.output_ids[SENT_ROW, 0] = 7
    prefill.metadata.bootstrap_room[SENT_ROW, 0] = room
    sender.send(prefill.pages[CHUNK // 16 :], [], TOKENS - CHUNK)
    _until(SUCCESS, sender, receiver)
    assert decode.read().equal(values)
    assert decode.metadata.output_ids[READ_ROW, 0] == 7
    assert decode.metadata.bootstrap_room[READ_ROW, 0] == room
    assert sender.get_transfer_metric().transfer_total_bytes == 80 * 2 * LAYERS * HEADS * DIM * 4


def test_what_another_stream_wrote_is_read_after_its_event(backend, sides):
    prefill, decode = sides
    if prefill.device == "cpu":
        pytest.skip("a CPU has no streams")
    _, sender, receiver = _asked(backend, sides)
    values, event = torch.randn(2, LAYERS, TOKENS, HEADS, DIM), torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        _busy(prefill.device)
        prefill.write(values, 0, TOKENS)
        event.record()
    sender._early_send_wait_event = event
    sender.send(prefill.pages, [], TOKENS)
    _until(SUCCESS, sender, receiver)
    assert decode.read().equal(values)


@pytest.mark.parametrize("gives_up", ["sender", "receiver"])
def test_an_aborted_request_fails_on_both_sides_with_its_reason(backend, sides, gives_up):
    prefill, _ = sides
    _, sender, receiver = _asked(backend, sides)
    sender.send(prefill.pages[:3])
    {"sender": sender, "receiver": receiver}[gives_up].abort()
    if gives_up == "receiver":
        sender.send(prefill.pages[3:], [], TOKENS - CHUNK)
    _until(FAILED, sender, receiver)
    for each in (sender, receiver):
        with pytest.raises(TransferAbortedError):
            each.failure_exception()
        each.clear()


def test_more_ranks_than_heads_are_refused_where_sglang_fills_up_with_zeros(backend, monkeypatch):
    backend.get_parallel().attn_tp_size = 4
    with pytest.raises(GeometryError, match="heads of zeros"):
        Side(backend, "prefill", 16, "cpu")


def _busy(device):
    """Keep the current stream busy: who does not wait for it reads what was there before."""
    if device != "cpu":
        torch.cuda._sleep(100_000_000)
