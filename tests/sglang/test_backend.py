"""The backend's classes, called as by SGLang's queues, with SGLang's pools, metadata and hooks, and real workers."""

import asyncio
import inspect
import logging
import secrets
import time
from array import array
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kvconnector.errors import (
    ConfigError,
    GeometryError,
    IncompatiblePeerError,
    LeaseExpiredError,
    LocalError,
    MemoryInUseError,
    OtherPromptError,
    RemoteError,
    TransferAbortedError,
)
from kvconnector.integrations.identity import Identity, content_digest, digest_of
from kvconnector.integrations.sglang import release_or_raise
from kvconnector.integrations.sglang.media import FIRST_MEDIA_TOKEN
from tests.sglang.listed import hybrid_pool, listed
from tests.sglang.pure.registry import PrefillApi, Registry
from tests.support.ports import free_ports

pytestmark = [pytest.mark.sglang, pytest.mark.ucx]

SIZE, HEADS, DIM, LAYERS = 256, 2, 8, 3
TOKENS, CHUNK = 75, 48
ROWS = 4
SENT_ROW, READ_ROW = 1, 2
BOOTSTRAPPING, WAITING, SUCCESS, FAILED = 1, 2, 4, 0
LIMIT_S = 100.0
OTHER_CACHES = (
    *("enable_lmcache", "enable_unified_cache_external_linker"),
    *("enable_flexkv", "radix_cache_backend"),
)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
WINDOW, WINDOW_LAYERS, FULL_LAYERS = 20, (1,), (0, 2)


class Side:
    """One engine's rank. `pages` hold the prompt, in no order, and `window_pages` its windows.

    `kind` of its pool: "mha", "mla", "swa" (with sliding windows) or "mamba" (with recurrent states).
    """

    kv_cache_dtype = "auto"
    has_host_cache = False
    has_sessions = False
    other_caches = ()
    ratios = None

    def __init__(self, backend, mode, page_size, device, kind="mha"):
        from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers

        self.page_size, self.device, self.kind = page_size, device, kind
        self.slot = 1 if mode == "prefill" else 3
        self.pool = _pool(kind, page_size, device)
        backend.hook_queues()
        self.metadata = MetadataBuffers(ROWS, 16, torch.float32, 0)
        args = listed(self.pool, page_size, num_layers=LAYERS)
        args.pp_rank = args.system_dp_rank = 0
        args.kv_cache_dtype_str, args.kv_layout = self.kv_cache_dtype, None
        args.is_hybrid_mla_backend = False
        args.mla_compression_ratios = self.ratios
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        server = SimpleNamespace(
            device=device.partition(":")[0],
            served_model_name="small",
            model_path="",
            enable_hisparse=False,
            **{name: name in self.other_caches for name in OTHER_CACHES},
            enable_hierarchical_cache=self.has_host_cache,
            enable_streaming_session=self.has_sessions,
            enable_fused_qk_norm_rope=None,
        )
        count = -(-TOKENS // page_size)
        order = np.random.default_rng(page_size).permutation(SIZE // page_size)[:count]
        self.pages = (order + 1).astype(np.int32)
        self.window_pages = self.pages[::-1].copy()
        self.manager = backend.KVManager(args, DisaggregationMode(mode), server, kind == "mla")

    def close(self):
        self.manager.teardown()

    def rows(self, pages, start, stop):
        """Rows of these tokens in a pool."""
        tokens = torch.arange(start, stop)
        pages = torch.from_numpy(pages).long()[tokens // self.page_size]
        return (pages * self.page_size + tokens % self.page_size).to(self.device)

    def buffers(self):
        """Yield each layer's K, V or latent `[row, head, dim]`, the prompt's pages in it, and the first token kept."""
        if self.kind == "swa":
            windows, full = self.pool.swa_kv_pool, self.pool.full_kv_pool
            for tensor in (*windows.k_buffer, *windows.v_buffer):
                yield tensor, self.window_pages, TOKENS - WINDOW
        else:
            full = getattr(self.pool, "full_kv_pool", self.pool)
        own = full.kv_buffer if self.kind == "mla" else (*full.k_buffer, *full.v_buffer)
        for tensor in own:
            yield tensor, self.pages, 0

    def write(self, values, start, stop):
        """Write the values that a step computes, on the current stream."""
        for (tensor, pages, _), value in zip(self.buffers(), values, strict=True):
            tensor[self.rows(pages, start, stop)] = value[start:stop].to(self.device)

    def has(self, values):
        """Returns True if all tokens that the engine keeps of the prompt have these values."""
        for (tensor, pages, first), value in zip(self.buffers(), values, strict=True):
            if not tensor[self.rows(pages, first, TOKENS)].cpu().equal(value[first:]):
                return False
        return True

    def values(self):
        """Random values of a prompt for each of the buffers."""
        return [torch.randn(TOKENS, *tensor.shape[1:]) for tensor, _, _ in self.buffers()]

    def slots(self):
        """Return the request's recurrent states, `[layer, ...]` each."""
        if self.kind != "mamba":
            return []
        cache = self.pool.mamba_pool.mamba_cache
        return [tensor[:, self.slot] for tensor in (*cache.conv, cache.temporal)]

    def states(self):
        """Return windows and states in the form in which SGLang's queues name them to a backend."""
        kept = (TOKENS - WINDOW) // self.page_size
        named = {"swa": [self.window_pages[kept:]], "mamba": [np.array([self.slot])]}
        return named.get(self.kind, [])


def _pool(kind, page_size, device):
    from sglang.srt.mem_cache import memory_pool as pools
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if kind == "mla":
        return pools.MLATokenToKVPool(
            SIZE, page_size, torch.float32, 16, DIM, LAYERS, device, False
        )
    if kind == "swa":
        layers = [*WINDOW_LAYERS], [*FULL_LAYERS]
        return SWAKVPool(SIZE, SIZE, page_size, torch.float32, HEADS, DIM, *layers, device)
    if kind == "mamba":
        shape = {"size": SIZE, "heads": HEADS, "dim": DIM, "attention_layers": [1]}
        return hybrid_pool(page_size, device, groups=[8, 8, 16], **shape)
    return pools.MHATokenToKVPool(SIZE, page_size, torch.float32, HEADS, DIM, LAYERS, device, False)


@pytest.fixture
def backend(monkeypatch):
    """The backend in a process that SGLang has not set up: one rank, its options, its model."""
    from kvconnector.integrations.sglang import backend

    parallel = SimpleNamespace(
        world_group=SimpleNamespace(cpu_group=None),
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_dp_rank=0,
        nnodes=1,
        dist_init_addr=None,
        load_balance_method="follow_bootstrap_room",
        pp_size=1,
        dp_size=1,
        attn_dp_size=1,
        attn_cp_size=1,
        attn_cp_rank=0,
        attn_dcp_size=1,
        enable_kv_cache_sharding=False,
    )
    disagg = SimpleNamespace(
        disaggregation_bootstrap_port=free_ports(),
        enable_pd_role_switch=False,
        disaggregation_enable_kv_checksum=False,
        disaggregation_decode_enable_radix_cache=False,
    )
    model = SimpleNamespace(
        num_hidden_layers=LAYERS,
        dtype=torch.float32,
        get_total_num_kv_heads=lambda: HEADS,
        get_swa_num_kv_heads=lambda _: HEADS,
        swa_attention_layer_ids=WINDOW_LAYERS,
        hf_config=SimpleNamespace(model_type="other"),
        hf_text_config=SimpleNamespace(rope_theta=10000.0),
        model_path="",
        revision=None,
        quantization=None,
    )
    config = SimpleNamespace(from_server_args=lambda _: model)
    monkeypatch.setattr(backend, "get_parallel", lambda: parallel)
    monkeypatch.setattr(backend, "attention_backends", lambda: ("torch_native", "torch_native"))
    weights = SimpleNamespace(quantization_param_path=None)
    monkeypatch.setattr(backend, "get_model", lambda: weights)
    media = SimpleNamespace(mm_feature_transport=None)
    monkeypatch.setattr(backend, "get_mm", lambda: media)
    spec = SimpleNamespace(speculative_algorithm=None, speculative_token_map=None)
    monkeypatch.setattr(backend, "get_spec", lambda: spec)
    monkeypatch.setattr(backend, "get_disagg", lambda: disagg)
    serving = SimpleNamespace(host="127.0.0.1", port=1, api_key=None)
    monkeypatch.setattr(backend, "get_serving", lambda: serving)
    monkeypatch.setattr(backend, "gather", lambda own, _: [own])
    monkeypatch.setattr(backend, "ModelConfig", config)
    with closing(Registry(disagg.disaggregation_bootstrap_port)):
        yield backend


@contextmanager
def _sides(backend, *arguments):
    with (
        closing(Side(backend, "prefill", 16, *arguments)) as prefill,
        closing(Side(backend, "decode", 32, *arguments)) as decode,
    ):
        yield prefill, decode


@pytest.fixture(params=DEVICES)
def sides(backend, request):
    with _sides(backend, request.param) as made:
        yield made


def request_of(prompt, **fields):
    """Return what the hooks look at in SGLang's request."""
    plain = dict.fromkeys(("lora_id", "cache_salt", "multimodal_inputs", "input_embeds"))
    plain |= {"bootstrap_host": "127.0.0.1", "disagg_prefill_dp_rank": None}
    return SimpleNamespace(origin_input_ids=prompt, **plain | fields)


def _asked(backend, sides):
    """Make a sender and a receiver for one room, the receiver with its pages."""
    prefill, decode = sides
    room = secrets.randbits(62) + 1
    port = backend.get_disagg().disaggregation_bootstrap_port
    address = f"127.0.0.1:{port}"
    sender = backend.KVSender(prefill.manager, address, room)
    sender.init(len(prefill.pages), SENT_ROW)
    receiver = backend.KVReceiver(decode.manager, address, room)
    assert receiver.poll() == BOOTSTRAPPING
    receiver.init(0)
    stream = torch.cuda.current_stream() if decode.device != "cpu" else None
    scheduler = SimpleNamespace(
        sliding_window_size=WINDOW,
        forward_stream=stream,
        enable_overlap=stream is not None,
        model_config=SimpleNamespace(vocab_size=99),
    )
    decode_req = SimpleNamespace(kv_receiver=receiver, req=request_of(range(TOKENS)))
    queue = SimpleNamespace(scheduler=scheduler)
    backend.note_length(queue, decode_req, range(TOKENS), decode.page_size)
    return room, sender, receiver


def _load(decode, receiver):
    """Let the receiver load, once the prefill engine has started."""
    assert receiver.poll() in {BOOTSTRAPPING, WAITING}
    _until(WAITING, receiver)
    receiver.send_metadata(decode.pages, READ_ROW, decode.states(), 0)


def _until(wanted, *polled):
    until_s = time.monotonic() + LIMIT_S
    while [each.poll() for each in polled] != [wanted] * len(polled):
        assert time.monotonic() < until_s, [each.poll() for each in polled]
        time.sleep(0.001)


def _send_first(prefill, sender):
    """Compute a whole prompt and send its first chunk. Returns its values."""
    values = prefill.values()
    _busy(prefill.device)
    prefill.write(values, 0, CHUNK)
    sender.send(prefill.pages[: CHUNK // 16])
    _busy(prefill.device)
    prefill.write(values, CHUNK, TOKENS)
    return values


def test_sglang_never_has_to_look_a_prefill_engine_up(backend):
    """It would keep what it finds, for each address that a router ever names."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    with closing(Side(backend, "decode", 32, "cpu")) as decode:
        queue = SimpleNamespace(kv_manager=decode.manager)
        for host in ("one", "another"):
            request = SimpleNamespace(
                bootstrap_host=host, bootstrap_port=1, disagg_prefill_dp_rank=None
            )
            assert DecodePreallocQueue._resolve_prefill_dp_rank(queue, request) == 0


def test_the_hooks_leave_alone_what_is_of_sglangs_fake_backend(backend):
    """SGLang's health check goes through the same queues, with senders and receivers of another backend."""
    from sglang.srt.disaggregation.fake.conn import FakeKVReceiver, FakeKVSender

    receiver, sender = (each.__new__(each) for each in (FakeKVReceiver, FakeKVSender))
    scheduler = SimpleNamespace(
        sliding_window_size=WINDOW, forward_stream=None, enable_overlap=False
    )
    queue = SimpleNamespace(scheduler=scheduler)
    backend.note_length(queue, SimpleNamespace(kv_receiver=receiver), range(3))
    backend.note_end(None, SimpleNamespace(disagg_kv_sender=sender))
    assert not hasattr(sender, "prompt_end")


def test_the_end_of_a_prompt_names_the_weights_that_computed_it(backend):
    serving, greedy = backend.get_serving(), SimpleNamespace(repetition_penalty=1.0, top_k=1)
    identity = Identity(TOKENS, digest_of(range(TOKENS)), {})
    with _sides(backend, "cpu") as (prefill, decode):
        for computed, here in ((("v1", "v1"), "v1"), (("v1", "v1"), "v2"), (("v1", "v2"), "v2")):
            room, sender, receiver = _asked(backend, (prefill, decode))
            sender.identity = receiver.identity = lambda: identity
            serving.weight_version = computed[0]
            sender.send(prefill.pages[: CHUNK // 16])
            serving.weight_version = computed[1]
            req = request_of(range(TOKENS), disagg_kv_sender=sender, sampling_params=greedy)
            req.output_ids = [5]
            backend.note_end(prefill.metadata, req)
            prefill.metadata.bootstrap_room[SENT_ROW] = room
            sender.send(prefill.pages[CHUNK // 16 :], [], TOKENS - CHUNK)
            serving.weight_version = here
            _load(decode, receiver)
            is_right = {*computed} == {here}
            _until(SUCCESS if is_right else FAILED, receiver)
            if not is_right:
                with pytest.raises(IncompatiblePeerError, match=f"ours='{here}'"):
                    receiver.failure_exception()


def _servers(adapters):
    """Return SGLang's scheduler as far as it knows adapters: `adapters` maps their ids to their names."""
    refs = {each: SimpleNamespace(lora_name=name) for each, name in adapters.items()}
    runner = SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=refs))
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


def test_a_receiver_knows_its_prompt_and_its_models_tokens(backend):
    with closing(Side(backend, "decode", 32, "cpu")) as side:
        receiver = backend.KVReceiver(side.manager, "127.0.0.1:1", 5)
        decode_req = SimpleNamespace(kv_receiver=receiver, req=request_of([4, 5, 6]))
        queue = SimpleNamespace(kv_manager=side.manager, scheduler=_servers({}))
        made = backend.create_receiver(lambda *_, **__: decode_req, queue, decode_req.req)
        assert made is decode_req
        scheduler = SimpleNamespace(
            sliding_window_size=None,
            forward_stream=None,
            enable_overlap=False,
            model_config=SimpleNamespace(vocab_size=99),
        )
        backend.note_length(SimpleNamespace(scheduler=scheduler), decode_req, range(3))
        identity = receiver.identity()
        assert (identity.num_tokens, identity.tokens_digest) == (3, digest_of([4, 5, 6]))
        assert (identity.context, receiver.num_tokens, receiver.vocab_size) == ({}, 3, 99)


@pytest.mark.parametrize("num_tokens", [5, 5000])
def test_a_sender_that_sglang_creates_has_the_digest_of_its_prompt(
    backend, num_tokens, monkeypatch
):
    from sglang.srt.disaggregation import prefill as queues

    monkeypatch.setattr(queues, "get_kv_class", lambda *_: backend.KVSender)
    port = backend.get_disagg().disaggregation_bootstrap_port
    with closing(Side(backend, "prefill", 16, "cpu")) as side:
        queue = SimpleNamespace(
            kv_manager=side.manager,
            bootstrap_port=port,
            transfer_backend=None,
            tp_rank=0,  # SGLang 0.5.21 names its ranks to the sender
            pp_rank=0,
            scheduler=None,
            _check_if_req_exceed_kv_capacity=lambda _: False,
            _process_req=lambda _: None,
        )
        request = request_of(array("q", range(num_tokens)), bootstrap_room=5)
        assert queues.PrefillBootstrapQueue.create_sender(queue, request, 1)
        sender = request.disagg_kv_sender
        assert sender.identity().tokens_digest == digest_of(range(num_tokens))
        sender.clear()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_stage_publishes_a_chunk_after_the_step_that_writes_it(backend, monkeypatch, stages):
    """SGLang's stages publish it as soon as that step was launched, on another stream than the current one."""
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Mixin

    with closing(Side(backend, "prefill", 16, "cpu")) as side:
        backend.get_parallel().pp_size = stages
        request = Mock(**vars(request_of(array("q", range(TOKENS)), bootstrap_room=5)))

        def make_sender(*_):
            request.disagg_kv_sender = backend.KVSender(side.manager, "127.0.0.1:1", 5)
            return True

        scheduler = Mock(enable_overlap=False, forward_stream="steps", chunked_req=request)
        queue = SimpleNamespace(kv_manager=side.manager, scheduler=scheduler)
        assert backend.create_sender(make_sender, queue, request)
        scheduler.send_kv_chunk = lambda req: req.disagg_kv_sender.send(side.pages[:1])
        waited = []
        monkeypatch.setattr(
            side.manager, "after", lambda *events: waited.extend(events) or nullcontext()
        )
        Mixin.process_prefill_chunk(scheduler, last_batch=None, running_batch=Mock())
        assert request.disagg_kv_sender.num_tokens == 16
        assert [*filter(None, waited)] == (["steps"] if stages > 1 else [])
        request.disagg_kv_sender.clear()


IMAGE_TOKEN = 90


def _with_image(pixels):
    """Return a request's fields for a prompt with an image of 8 tokens, as SGLang's scheduler makes them."""
    from sglang.srt.managers.mm_utils import MultiModalityDataPaddingPatternMultimodalTokens
    from sglang.srt.managers.schedule_batch import (
        MM_PAD_SHIFT_VALUE,
        Modality,
        MultimodalDataItem,
        MultimodalInputs,
    )

    item = MultimodalDataItem(modality=Modality.IMAGE, feature=pixels, offsets=[(2, 9)])
    item.set_pad_value()
    media = MultimodalInputs(mm_items=[item], im_token_id=IMAGE_TOKEN)
    tokens = array("q", [5, 6, *[IMAGE_TOKEN] * 8, 7])
    padded = MultiModalityDataPaddingPatternMultimodalTokens().pad_input_tokens(tokens, media)
    assert (len(padded), padded[0], padded[-1]) == (11, 5, 7)
    assert min(padded[2:10]) >= MM_PAD_SHIFT_VALUE == FIRST_MEDIA_TOKEN
    return {"prompt": array("q", padded), "multimodal_inputs": media}


def _pixels(seed, rounding=0.0):
    return torch.rand(16, 12, generator=torch.Generator().manual_seed(seed)) + rounding


def _prompts(case):
    """Return the fields of two requests in one room, and what an error must name; "" if their caches are equal."""
    text = {"prompt": array("q", [5, 6, 7])}
    adapters = {"1" * 32: "sql", "2" * 32: "sql", "3" * 32: "poems"}
    one, same, other = (text | {"lora_id": each} for each in adapters)
    image, equal, another = (_with_image(_pixels(seed)) for seed in (1, 1, 2))
    return {
        "one adapter under two ids": (one, same, ""),
        "another adapter": (one, other, "adapter"),
        "no adapter": (text, other, "adapter"),
        "one image": (image, equal, ""),
        "another image": (image, another, "images or other media"),
        "one salt": (text | {"cache_salt": "a"}, text | {"cache_salt": "a"}, ""),
        "another salt": (text | {"cache_salt": "a"}, text | {"cache_salt": "b"}, "cache salt"),
        "another namespace of the prefix cache": (text | {"extra_key": "a"}, text, ""),
        "other embeddings": (
            text | {"input_embeds": [[0.5]] * 3},
            text | {"input_embeds": [[0.5], [0.5], [0.25]]},
            "embeddings",
        ),
    }[case], _servers(adapters)


def _moved(backend, sides, requests, scheduler):
    """Move a small prompt between two requests in one room, with what the hooks of both servers make of them."""
    prefill, decode = sides
    room = secrets.randbits(62) + 1
    address = f"127.0.0.1:{backend.get_disagg().disaggregation_bootstrap_port}"
    sent, read = (
        request_of(**each, bootstrap_room=room, output_ids=[7], sampling_params=GREEDY)
        for each in requests
    )

    def make_sender(*_):
        sent.disagg_kv_sender = backend.KVSender(prefill.manager, address, room)
        return True

    def make_receiver(*_, **__):
        return SimpleNamespace(
            kv_receiver=backend.KVReceiver(decode.manager, address, room), req=read
        )

    queue = SimpleNamespace(kv_manager=prefill.manager, scheduler=scheduler)
    assert backend.create_sender(make_sender, queue, sent)
    queue = SimpleNamespace(kv_manager=decode.manager, scheduler=scheduler)
    receiver = backend.create_receiver(make_receiver, queue, read).kv_receiver
    sender, count = sent.disagg_kv_sender, len(sent.origin_input_ids)
    sender.init(1, SENT_ROW)
    receiver.num_tokens = count
    receiver.init(0)
    sent.multimodal_inputs = None  # as SGLang does once a request is finished
    prefill.metadata.bootstrap_room[SENT_ROW, 0] = room
    backend.note_end(None, sent)
    sender.send(prefill.pages[:1], [], count)
    _until(WAITING, receiver)
    receiver.send_metadata(decode.pages[:1], READ_ROW, [], 0)
    return sender, receiver


GREEDY = SimpleNamespace(top_k=1, repetition_penalty=1.0)
PROMPTS = (
    *("one adapter under two ids", "another adapter", "no adapter", "one image", "another image"),
    *("one salt", "another salt", "another namespace of the prefix cache", "other embeddings"),
)


@pytest.mark.parametrize("case", PROMPTS)
def test_a_prompt_computed_with_another_adapter_image_or_salt_is_refused(backend, case):
    (sent, read, differs), scheduler = _prompts(case)
    with _sides(backend, "cpu") as sides:
        sender, receiver = _moved(backend, sides, (sent, read), scheduler)
        _until(SUCCESS, sender)
        if not differs:
            _until(SUCCESS, receiver)
            return
        _until(FAILED, receiver)
        with pytest.raises(OtherPromptError) as refused:
            receiver.failure_exception()
        assert refused.value.context["differs_in"] == differs


@pytest.mark.parametrize(
    "change",
    [
        {"SGLANG_MM_SKIP_COMPUTE_HASH": "1"},
        {"SGLANG_IMAGE_MAX_PIXELS": "1000"},
        {"image_processor_backend": "pil"},
        {"mm_feature_transport": "cuda_ipc"},
    ],
    ids=str,
)
def test_images_are_not_compared_between_servers_that_may_name_one_in_two_ways(
    backend, monkeypatch, change
):
    """As where their processors round otherwise, or their names are drawn."""
    requests = _with_image(_pixels(1)), _with_image(_pixels(1, rounding=1e-6))
    with closing(Side(backend, "prefill", 16, "cpu")) as prefill:
        with monkeypatch.context() as patch:
            for name, value in change.items():
                if name.isupper():
                    patch.setenv(name, value)
                else:
                    patch.setattr(backend.get_mm(), name, value, raising=False)
            decode = Side(backend, "decode", 32, "cpu")
        with closing(decode):
            sender, receiver = _moved(backend, (prefill, decode), requests, None)
            _until(SUCCESS, sender, receiver)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["mha", "mla", "swa", "mamba"])
def test_a_prompt_in_chunks_arrives_in_other_pages_with_states_and_metadata(backend, kind, device):
    with _sides(backend, device, kind) as (prefill, decode):
        room, sender, receiver = _asked(backend, (prefill, decode))
        states = [torch.randn(slot.shape).to(slot) for slot in prefill.slots()]
        values = _send_first(prefill, sender)
        _load(decode, receiver)
        for slot, state in zip(prefill.slots(), states, strict=True):
            slot.copy_(state)
        prefill.metadata.output_ids[SENT_ROW, 0] = 7
        prefill.metadata.bootstrap_room[SENT_ROW, 0] = room
        sender.send(prefill.pages[CHUNK // 16 :], prefill.states(), TOKENS - CHUNK)
        _until(SUCCESS, sender, receiver)
        assert decode.has(values)
        assert all(map(torch.equal, decode.slots(), states))
        assert (len(states) > 0) == (kind == "mamba")
        assert decode.metadata.output_ids[READ_ROW, 0] == 7
        assert decode.metadata.bootstrap_room[READ_ROW, 0] == room
        token_bytes = sum(prefill.manager.kv_args.kv_item_lens) // 16
        metric = sender.get_transfer_metric()
        assert metric.transfer_total_bytes == TOKENS * token_bytes
        assert 0.0 < metric.transfer_latency_s < LIMIT_S


def test_bytes_that_another_stream_wrote_are_read_after_its_event(backend, sides):
    prefill, decode = sides
    if prefill.device == "cpu":
        pytest.skip("a CPU has no streams")
    room, sender, receiver = _asked(backend, sides)
    prefill.metadata.bootstrap_room[SENT_ROW, 0] = room
    values, event = prefill.values(), torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        _busy(prefill.device)
        prefill.write(values, 0, TOKENS)
        event.record()
    sender._early_send_wait_event = event
    sender.send(prefill.pages, [], TOKENS)
    _load(decode, receiver)
    _until(SUCCESS, sender, receiver)
    assert decode.has(values)


@pytest.mark.parametrize("gives_up", ["sender", "receiver"])
def test_an_aborted_request_fails_on_both_sides_with_its_reason(backend, sides, gives_up):
    prefill, decode = sides
    _, sender, receiver = _asked(backend, sides)
    sender.send(prefill.pages[:3])
    _load(decode, receiver)
    {"sender": sender, "receiver": receiver}[gives_up].abort()
    if gives_up == "receiver":
        sender.send(prefill.pages[3:], [], TOKENS - CHUNK)
    _until(FAILED, sender, receiver)
    with pytest.raises(TransferAbortedError):
        sender.failure_exception()
    # a read that is under way when the sender gives up finds that its lease has ended before it hears why
    with pytest.raises((TransferAbortedError, LeaseExpiredError)):
        receiver.failure_exception()
    for each in (sender, receiver):
        each.clear()


def test_sglangs_reduction_fails_a_prompt_only_once_no_rank_uses_its_pages(
    backend, sides, monkeypatch
):
    from sglang.srt.disaggregation import prefill as queues
    from sglang.srt.disaggregation import utils

    others = [3]  # the other ranks' least vote

    def reduce(polls, _):
        return [min(poll, *others) for poll in polls]

    monkeypatch.setattr(utils, "_all_reduce_polls", reduce)
    prefill, _ = sides
    _, sender, receiver = _asked(backend, sides)
    sender.send(prefill.pages, [], TOKENS)

    def polled():
        return queues.poll_and_all_reduce_attn_cp_tp_group([sender], None, None)

    assert polled() == [3]
    others[:] = [2]  # another rank has failed
    assert polled() == [2]
    _until(FAILED, sender)
    assert polled() == [2]
    others[:] = [4]
    assert polled() == [FAILED]
    receiver.abort()


def test_every_loop_of_sglangs_scheduler_reduces_the_votes_of_prompts(backend):
    """That of pipeline parallelism, too, which has a name of its own for it; and a first stage asks senders again."""
    from sglang.srt.disaggregation import prefill, utils
    from sglang.srt.managers import scheduler_pp_mixin

    backend.hook_queues()
    hooked = utils.poll_and_all_reduce_attn_cp_tp_group
    for each in (prefill, scheduler_pp_mixin):
        assert each.poll_and_all_reduce_attn_cp_tp_group is hooked
    assert hooked.__module__ != utils.__name__ or hasattr(hooked, "__wrapped__")
    sender = Mock(spec=backend.KVSender, stage=WAITING, kv_mgr=Mock(turn=1), _turn=0)
    assert backend.KVSender.poll_pp_consensus(sender) == WAITING


def test_a_decode_engine_that_would_free_pages_in_use_is_refused(backend, monkeypatch):
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
    with pytest.raises(ConfigError, match="DEFERRED_DECODE_KV_RELEASE"):
        Side(backend, "decode", 32, "cpu")
    with closing(Side(backend, "prefill", 16, "cpu")):
        pass


def test_a_failed_requests_pages_are_kept_as_long_as_a_load_writes_to_them(
    backend, sides, monkeypatch
):
    """By SGLang's own queue, which frees them after a time, too: while a load's worker hangs, or all is stopped."""
    from sglang.srt.disaggregation import decode as of_sglang

    _, decode = sides
    _, _, receiver = _asked(backend, sides)
    queue = of_sglang.DecodeTransferQueue.__new__(of_sglang.DecodeTransferQueue)
    freed, is_safe = [], []
    queue.deferred_kv_release_timeout, queue._deferred_releases = 0.0, []
    queue.enable_host_receive, queue.gloo_group = False, None
    queue._release_request = freed.append
    queue.metadata_buffers = queue.req_to_metadata_buffer_idx_allocator = Mock()
    queue.enable_staging, queue._observe_deferred_kv_release = False, Mock()
    monkeypatch.setattr(of_sglang, "all_reduce_flags", lambda flags, **_: flags, raising=False)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(decode.manager, "is_abort_release_safe", lambda *_: bool(is_safe))
    decode_req = SimpleNamespace(
        kv_receiver=receiver,
        req=SimpleNamespace(bootstrap_room=receiver.room),
        metadata_buffer_index=0,
        host_staged=False,
    )
    queue._defer_release(decode_req)
    queue.resolve_deferred_releases()
    assert not freed
    is_safe.append(True)
    queue.resolve_deferred_releases()
    assert freed == [decode_req]


class _PreallocQueue:
    """SGLang's queue of a decode engine, with its own code and our hook, as far as a new request runs through it."""

    def __init__(self, backend, manager):
        from sglang.srt.disaggregation.decode import DecodePreallocQueue

        self.of_sglang = DecodePreallocQueue
        self.kv_manager, self.queue, self.pending_reqs = manager, [], []
        self.transfer_backend, self.tp_rank, self.token_to_kv_pool_allocator = None, 0, None
        self.scheduler = _servers({})
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self.of_sglang, name).__get__(self)

    def _check_if_req_exceed_kv_capacity(self, req):
        return False

    def _create_receiver_and_enqueue(self, req, **options):
        return self._backend.create_receiver(
            self.of_sglang._create_receiver_and_enqueue, self, req, **options
        )


def _retracted(backend, room, **fields):
    """Return a request of 5 tokens that was answered 3 before SGLang retracted it, as SGLang leaves it."""
    from sglang.srt.managers.schedule_batch import Req

    class Retracted(SimpleNamespace):
        build_rebootstrap_payload = Req.build_rebootstrap_payload

    names = "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty"
    flags = "ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim"
    return Retracted(
        rid="r",
        origin_input_ids=[1, 2, 3, 4, 5],
        output_ids=[6, 7],
        pd_rebootstrap_forced_output_id=8,
        pd_rebootstrap_in_progress=True,
        bootstrap_host="127.0.0.1",
        bootstrap_port=backend.get_disagg().disaggregation_bootstrap_port,
        bootstrap_room=room,
        sampling_params=SimpleNamespace(**dict.fromkeys(f"{names} {flags}".split(), 0)),
        disagg_prefill_dp_rank=None,
        priority=None,
        routing_key=None,
        **dict.fromkeys(("extra_key", "cache_salt", "lora_id", "multimodal_inputs", "input_embeds"))
        | fields,
    )


@pytest.fixture
def queue_of(backend, monkeypatch):
    """Makes SGLang's queue for a rank of a decode engine."""
    from sglang.srt.disaggregation import decode as of_sglang

    policy = SimpleNamespace(disaggregation_decode_allocation_policy="early")
    monkeypatch.setattr(of_sglang, "get_kv_class", lambda *_: backend.KVReceiver)
    monkeypatch.setattr(of_sglang, "get_disagg", lambda: policy, raising=False)
    return lambda manager: _PreallocQueue(backend, manager)


def _serve_at(backend, monkeypatch, port, key=None):
    serving = SimpleNamespace(host="127.0.0.1", port=port, api_key=key)
    monkeypatch.setattr(backend, "get_serving", lambda: serving)


def test_a_retracted_prompt_is_computed_again_and_read(backend, monkeypatch, queue_of):
    """By SGLang's own queue. The decode engine has no pages before the prefill engine has some, as for any prompt."""
    with closing(PrefillApi(key="k")) as api:
        _serve_at(backend, monkeypatch, api.port, key="k")
        with _sides(backend, "cpu") as (prefill, decode):
            queue, room = queue_of(decode.manager), secrets.randbits(62) + 1
            req = _retracted(backend, room)
            queue.add(req, is_rebootstrap=True)
            (decode_req,) = queue.queue
            assert req.bootstrap_room != room
            receiver, payload = decode_req.kv_receiver, None
            until_s = time.monotonic() + LIMIT_S
            while payload is None:
                assert receiver.poll() == BOOTSTRAPPING
                assert time.monotonic() < until_s
                payload = api.asked.popleft() if api.asked else None
            assert payload["input_ids"] == [1, 2, 3, 4, 5, 6, 7]
            assert payload["bootstrap_room"] == req.bootstrap_room
            sender = backend.KVSender(prefill.manager, "", payload["bootstrap_room"])
            sender.init(len(prefill.pages), SENT_ROW)
            prefill.metadata.bootstrap_room[SENT_ROW, 0] = payload["bootstrap_room"]
            values = _send_first(prefill, sender)
            receiver.num_tokens = TOKENS
            _load(decode, receiver)
            decode.manager.submit_prefill_recompute(receiver, req.build_rebootstrap_payload())
            sender.send(prefill.pages[CHUNK // 16 :], [], TOKENS - CHUNK)
            _until(SUCCESS, sender, receiver)
            assert decode.has(values)
            assert not api.asked, "it was asked for twice"
            api.answers.set()
            until_s = time.monotonic() + LIMIT_S
            while not api.answered:
                assert time.monotonic() < until_s
            assert api.answered == [200]
            first_room = req.bootstrap_room
            queue.add(req, is_rebootstrap=True)
            assert req.bootstrap_room not in {room, first_room}, "each retraction has its own room"
            until_s = time.monotonic() + LIMIT_S
            while not api.asked:
                assert queue.queue[-1].kv_receiver.poll() == BOOTSTRAPPING
                assert time.monotonic() < until_s
            rids = req.rid, payload["rid"], api.asked.popleft()["rid"]
            assert len({*rids}) == 3, "a server refuses an id that it still computes"
            assert all(each.startswith(req.rid) for each in rids), "or an abort would miss it"
            queue.queue[-1].kv_receiver.abort()


def test_a_retracted_prompt_is_computed_again_with_its_adapter(backend, monkeypatch, queue_of):
    """SGLang leaves the adapter out, so the prefill server would compute the prompt of the model alone."""
    own, served = "1" * 32, closing(PrefillApi())
    with served as api:
        _serve_at(backend, monkeypatch, api.port)
        with _sides(backend, "cpu") as (_, decode):
            queue = queue_of(decode.manager)
            queue.scheduler = _servers({own: "sql"})
            req = _retracted(backend, 5, lora_id=own, extra_key=f"tenant{own}", cache_salt="s")
            assert "lora_path" not in req.build_rebootstrap_payload()
            queue.add(req, is_rebootstrap=True)
            (decode_req,) = queue.queue
            until_s = time.monotonic() + LIMIT_S
            while not api.asked:
                assert decode_req.kv_receiver.poll() == BOOTSTRAPPING
                assert time.monotonic() < until_s
            payload = api.asked.popleft()
            named = payload["lora_path"], payload["extra_key"], payload["cache_salt"]
            assert named == ("sql", "tenant", "s")
            identity = decode_req.kv_receiver.identity()
            assert identity.tokens_digest == digest_of(payload["input_ids"])
            salt, adapter = content_digest(b"s"), content_digest(b"sql")
            assert identity.context == {"salt": salt, "adapter": adapter}
            api.answers.set()
            decode_req.kv_receiver.abort()


def test_a_retracted_prompt_that_no_server_computes_fails_alone(backend, monkeypatch, queue_of):
    _serve_at(backend, monkeypatch, free_ports())
    with _sides(backend, "cpu") as (_, decode):
        queue = queue_of(decode.manager)
        queue.add(_retracted(backend, 5), is_rebootstrap=True)
        with_images = _retracted(backend, 6)
        with_images.multimodal_inputs = object()
        queue.add(with_images, is_rebootstrap=True)
        queue.add(_retracted(backend, 7, input_embeds=[[0.5]] * 5), is_rebootstrap=True)
        queue.add(_retracted(backend, 8, lora_id="1" * 32), is_rebootstrap=True)
        for decode_req, error, text in zip(
            queue.queue,
            (RemoteError, LocalError, LocalError, LocalError),
            ("not compute", "images", "embeddings", "not loaded"),
            strict=True,
        ):
            _until(FAILED, decode_req.kv_receiver)
            with pytest.raises(error, match=text):
                decode_req.kv_receiver.failure_exception()


@pytest.mark.parametrize("variable", ["SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE"])
def test_states_of_another_type_with_as_many_bytes_are_refused(backend, monkeypatch, variable):
    """Their bytes would arrive, and read as other numbers."""
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
    with closing(Side(backend, "prefill", 16, "cpu", "mamba")) as prefill:
        monkeypatch.setenv(variable, "float16")
        with closing(Side(backend, "decode", 32, "cpu", "mamba")) as decode:
            _, sender, receiver = _asked(backend, (prefill, decode))
            _send_first(prefill, sender)
            _load(decode, receiver)
            _until(FAILED, receiver)
            with pytest.raises(IncompatiblePeerError, match="elements"):
                receiver.failure_exception()


def test_states_in_the_order_of_amx_are_refused_where_that_is_another(backend, monkeypatch):
    with closing(Side(backend, "prefill", 16, "cpu", "mamba")) as prefill:
        monkeypatch.setattr(backend, "cpu_has_amx_support", lambda: True)
        with closing(Side(backend, "decode", 32, "cpu", "mamba")) as decode:
            _, sender, receiver = _asked(backend, (prefill, decode))
            _send_first(prefill, sender)
            _load(decode, receiver)
            _until(FAILED, receiver)
            with pytest.raises(IncompatiblePeerError, match="amx"):
                receiver.failure_exception()


def test_types_whose_scales_sglang_does_not_list_are_refused(backend, monkeypatch):
    """Their values would arrive without the numbers by which they are multiplied."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import FP4MXBlock16KVCacheMethod
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        64,
        16,
        torch.uint8,
        HEADS,
        32,
        LAYERS,
        "cpu",
        False,
        quant_method=FP4MXBlock16KVCacheMethod(),
    )
    listed_pointers = listed(pool, 16, num_layers=LAYERS).kv_data_ptrs
    assert {each.data_ptr() for each in pool.k_scale_buffer}.isdisjoint(listed_pointers)
    for dtype in ("fp4_mx_block16", "nvfp4", "mxfp8", "int3"):
        monkeypatch.setattr(Side, "kv_cache_dtype", dtype)
        with pytest.raises(ConfigError, match=dtype) as refused:
            Side(backend, "decode", 32, "cpu")
        assert refused.value.context["kv_cache_dtype"] == dtype


def test_keys_and_values_in_tiles_are_refused(backend, monkeypatch):
    monkeypatch.setenv("SGLANG_AITER_KV_CACHE_LAYOUT", "vectorized_5d")
    with pytest.raises(ConfigError, match="vectorized_5d"):
        Side(backend, "decode", 32, "cpu")


def test_compressed_states_of_another_type_are_refused(backend, monkeypatch):
    """A ring of them with speculative decoding has as many bytes as one of float32 without, and other slots."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import get_compress_state_ring_size

    assert get_compress_state_ring_size(4, 1) == 2 * get_compress_state_ring_size(4)
    monkeypatch.setenv("SGLANG_DSV4_COMPRESS_STATE_DTYPE", "BF16")
    with closing(Side(backend, "decode", 32, "cpu")):
        pass
    monkeypatch.setattr(Side, "ratios", (4, 128, 0))
    with pytest.raises(ConfigError, match="COMPRESS_STATE_DTYPE") as refused:
        Side(backend, "decode", 32, "cpu")
    assert refused.value.context["SGLANG_DSV4_COMPRESS_STATE_DTYPE"] == "bf16"
    monkeypatch.setenv("SGLANG_DSV4_COMPRESS_STATE_DTYPE", "fp32")
    with pytest.raises(GeometryError, match="256 tokens"):  # these pools are another model's
        Side(backend, "decode", 32, "cpu")


def test_a_draft_models_tokens_are_named_by_the_list_of_frequent_ones(backend, tmp_path):
    """SGLang's prefill engine sends places in its list, and a decode engine looks them up in its own."""
    spec = backend.get_spec()
    spec.speculative_algorithm = "EAGLE"
    names = {backend._seed_element(None)}
    for frequent in ([5, 7], [5, 9]):
        path = tmp_path / "map.pt"
        torch.save(frequent, path)
        spec.speculative_token_map = str(path)
        names.add(backend._seed_element(None))
    assert len(names) == 3


def test_an_eagle3_heads_tokens_are_named_by_the_length_of_its_list(backend, monkeypatch):
    """Its list is among its weights. A place beyond the end of the decode engine's list would end that engine."""
    spec = backend.get_spec()
    vars(spec).update(
        speculative_algorithm="EAGLE3",
        speculative_token_map="which SGLang ignores",
        speculative_draft_model_path="a head",
        speculative_draft_model_revision=None,
    )
    asked, fields = [], {}

    def config_of(server_args, **options):
        asked.append((server_args, options))
        return SimpleNamespace(hf_config=SimpleNamespace(**fields), vocab_size=128_000)

    monkeypatch.setattr(backend, "ModelConfig", SimpleNamespace(from_server_args=config_of))
    without = backend._seed_element("arguments")
    fields["draft_vocab_size"] = None  # as in a head that takes the target model's
    assert without == backend._seed_element("arguments") == "draft_tokens_of_128000"
    fields["draft_vocab_size"] = 32_000
    assert backend._seed_element("arguments") == "draft_tokens_of_32000"
    options = {"model_path": "a head", "model_revision": None, "is_draft_model": True}
    assert asked[0] == ("arguments", options)


@pytest.mark.parametrize("on_cuda", [True, False])
@pytest.mark.parametrize("is_off", [True, False])
@pytest.mark.parametrize(
    "model",
    [
        ({"model_type": "deepseek_v32"}, False),
        ({"model_type": "glm_moe_dsa", "indexer_rope_interleave": True}, True),
        ({"model_type": "dots3_note"}, True),
    ],
)
def test_an_indexers_keys_are_named_by_whether_sglang_rotates_them(
    backend, monkeypatch, on_cuda, is_off, model
):
    import sglang
    from sglang.srt.layers.attention.dsa import dsa_indexer

    monkeypatch.setenv("SGLANG_DISABLE_DSA_INDEXER_FUSION", str(int(is_off)))
    monkeypatch.setattr(backend, "is_cuda", lambda: on_cuda)
    monkeypatch.setattr(dsa_indexer, "rotate_activation", lambda keys: -keys)
    models = Path(sglang.__path__[0], "srt", "models")
    variable = "envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.get()"
    for made, rule in (
        (
            inspect.getsource(dsa_indexer.Indexer.__init__),
            f"use_dsa_indexer_fusion = ( _is_cuda and not {variable} and not is_neox_style )",
        ),
        (
            (models / "deepseek_v2.py").read_text(),
            'is_neox_style = not getattr(config, "indexer_rope_interleave", False)',
        ),
        (
            (models / "dots3_common" / "modeling.py").read_text(),
            'is_neox_style=False, prefix=add_prefix("indexer"',
        ),
    ):
        assert " ".join(made.split()).count(rule) == 1
    config, has_pairs = model
    indexer = SimpleNamespace(use_aiter_fused_fp8_writer=False)
    indexer.use_dsa_indexer_fusion = on_cuda and has_pairs and not is_off
    is_rotated = dsa_indexer.Indexer._maybe_rotate(indexer, 1) == -1
    found = backend._index_element(SimpleNamespace(**config))
    assert found == ("rotated_index_keys" if is_rotated else "index_keys")


def test_more_ranks_than_heads_are_refused_where_sglang_fills_up_with_zeros(backend, monkeypatch):
    backend.get_parallel().attn_tp_size = 4
    with pytest.raises(GeometryError, match="heads of zeros"):
        Side(backend, "prefill", 16, "cpu")


def test_windows_in_a_decode_engines_prefix_cache_are_refused_in_pages_of_one_token(backend):
    backend.get_disagg().disaggregation_decode_enable_radix_cache = True
    for page_size, kind in [(1, "mha"), (32, "mha"), (32, "swa")]:
        with closing(Side(backend, "decode", page_size, "cpu", kind)):
            pass
    with pytest.raises(ConfigError, match="radix_cache with sliding windows"):
        Side(backend, "decode", 1, "cpu", "swa")


@pytest.mark.parametrize("looks", [True, False])
def test_a_prefix_that_is_being_loaded_is_not_published(backend, monkeypatch, looks):
    """Only some releases look whether host memory is still being copied to it: theirs take one argument more."""
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Mixin

    monkeypatch.setattr(Side, "has_host_cache", True)
    method, name = Mixin.maybe_send_cached_prefix_chunk, "maybe_send_cached_prefix_chunk"
    own = "allow_send" in inspect.signature(method).parameters
    scheduler = Mock(enable_staging=False, enable_overlap=False)
    scheduler.token_to_kv_pool_allocator.page_size = 32
    req = Mock(pending_bootstrap=False, host_hit_length=0, start_send_idx=0)
    req.prefix_len, req.prefix_indices = 32, range(32)
    method(scheduler, req, **({"allow_send": False} if own else {}))
    assert scheduler.send_kv_chunk.called == (not own)
    if own != looks:
        monkeypatch.setattr(Mixin, name, _looking if looks else _not_looking)
    for mode in ("decode", "prefill") if looks else ("decode",):
        with closing(Side(backend, mode, 32, "cpu")):
            pass
    if looks:
        return
    with pytest.raises(ConfigError, match=r"enable_hierarchical_cache .*CACHED_PREFIX=0"):
        Side(backend, "prefill", 32, "cpu")
    monkeypatch.setenv("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    with closing(Side(backend, "prefill", 32, "cpu")):
        pass


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("name", OTHER_CACHES)
def test_caches_whose_copies_nobody_has_read_are_refused(backend, monkeypatch, name, mode):
    monkeypatch.setattr(Side, "other_caches", (name,))
    with pytest.raises(ConfigError, match=name):
        Side(backend, mode, 32, "cpu")


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_sessions_that_keep_pages_are_refused(backend, monkeypatch, mode):
    """SGLang's decode engine ends at the second turn, for which it allocates pages beside those that it has kept."""
    monkeypatch.setattr(Side, "has_sessions", True)
    with pytest.raises(ConfigError, match="enable_streaming_session"):
        Side(backend, mode, 32, "cpu")


def _looking(self, req, allow_send=True):
    pass


def _not_looking(self, req):
    pass


def test_states_in_a_decode_engines_host_cache_are_refused(backend, monkeypatch):
    monkeypatch.setattr(Side, "has_host_cache", True)
    with closing(Side(backend, "decode", 16, "cpu", "mamba")):
        pass
    backend.get_disagg().disaggregation_decode_enable_radix_cache = True
    for mode, kind in [("decode", "mha"), ("prefill", "mamba")]:
        monkeypatch.setenv("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
        with closing(Side(backend, mode, 16, "cpu", kind)):
            pass
    with pytest.raises(ConfigError, match=r"enable_hierarchical_cache with .* recurrent states"):
        Side(backend, "decode", 16, "cpu", "mamba")


def test_sglang_loads_a_prefixs_state_into_the_slot_of_the_request():
    """Which is why: by its own code, for a state that only host memory has."""
    from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase, ComponentType
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

    slot, kept = torch.tensor(3), torch.tensor([7])
    data = {ComponentType.MAMBA: SimpleNamespace(value=None, host_value=kept)}
    node = SimpleNamespace(id=1, component_data=data)
    transfers = MambaComponent.build_hicache_transfers(
        object.__new__(MambaComponent), node, CacheTransferPhase.LOAD_BACK, mamba_pool_idx=slot
    )
    assert [slot.item()] in [
        each.device_indices.tolist() for each in transfers if each.device_indices is not None
    ]


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("window", [20, 64])
def test_sglang_has_a_whole_window_transferred_whatever_is_cached(page_size, window, monkeypatch):
    """Unless its pages have one token. By its own code: what a cached prefix is cut to leaves the window uncached."""
    from sglang.srt.disaggregation import decode as of_sglang
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    options = SimpleNamespace(disaggregation_decode_enable_radix_cache=True)
    monkeypatch.setattr(of_sglang, "get_disagg", lambda: options)
    allocator = SimpleNamespace(page_size=page_size, alloc_extend_swa_tail=None)
    queue = SimpleNamespace(
        token_to_kv_pool=object.__new__(SWAKVPool),
        token_to_kv_pool_allocator=allocator,
        scheduler=SimpleNamespace(sliding_window_size=window),
    )
    own = of_sglang.DecodePreallocQueue
    queue._uses_swa_tail_prealloc = lambda: own._uses_swa_tail_prealloc(queue)
    assert queue._uses_swa_tail_prealloc() == (page_size > 1)
    for num_tokens in range(1, 300):
        cached = num_tokens - own._swa_tail_len(queue, num_tokens)
        assert cached <= max(0, num_tokens - window)
        assert cached % page_size == 0


def test_context_parallelism_is_for_copies_in_prefill_engines(backend):
    parallel = backend.get_parallel()
    parallel.attn_cp_size, parallel.attn_cp_rank = 2, 0
    with pytest.raises(ConfigError, match="attn_cp_size=2"):
        Side(backend, "decode", 16, "cpu")


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_stages_of_a_decode_engine_are_hooked_if_their_release_is_known(backend, monkeypatch, mode):
    done = []
    monkeypatch.setattr(backend, "check_release", done.append)
    monkeypatch.setattr(backend, "hook_stages", lambda: done.append("hooked"))
    with closing(Side(backend, mode, 16, "cpu")):
        assert done == []
    backend.get_parallel().pp_size = 2
    with pytest.raises(GeometryError):  # the other stage's rank is missing
        Side(backend, mode, 16, "cpu")
    assert done == (["STAGES", "hooked"] if mode == "decode" else [])


def test_sglangs_checksum_of_whole_pages_is_refused(backend):
    backend.get_disagg().disaggregation_enable_kv_checksum = True
    with pytest.raises(ConfigError, match="enable_kv_checksum"):
        Side(backend, "prefill", 16, "cpu")


def _busy(device):
    """Keep the current stream busy, so that a read which does not wait for it finds old bytes."""
    if device != "cpu":
        torch.cuda._sleep(100_000_000)


class Updater:
    """SGLang's scheduler at what releases memory, with our hooks, for the rank of one side."""

    def __init__(self, side, mode):
        from sglang.srt.disaggregation.utils import DisaggregationMode

        queue = SimpleNamespace(
            kv_manager=side.manager,
            release_memory_occupation=side.manager.deregister_buffer_to_engine,
            resume_memory_occupation=side.manager.register_buffer_to_engine,
        )
        name = f"disagg_{'prefill_bootstrap' if mode == 'prefill' else 'decode_prealloc'}_queue"
        self.scheduler = SimpleNamespace(
            _engine_paused=False, disaggregation_mode=DisaggregationMode(mode), **{name: queue}
        )
        self.offload_tags, self.calls = set(), []
        self.memory_saver_adapter = SimpleNamespace(
            pause=lambda tag: self.calls.append(("pause", tag)),
            resume=lambda tag: self.calls.append(("resume", tag)),
        )

    def is_fully_idle(self, **_):
        return True

    def flush_cache(self):
        self.calls.append("flush")

    def release(self, *tags):
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.scheduler_components import weight_updater

        request = io_struct.ReleaseMemoryOccupationReqInput(tags=[*tags])
        return weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation(self, request)

    def resume(self, *tags):
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.scheduler_components import weight_updater

        request = io_struct.ResumeMemoryOccupationReqInput(tags=[*tags])
        return weight_updater.SchedulerWeightUpdaterManager.resume_memory_occupation(self, request)


def fan_out(*answers, backend="kvconnector"):
    """Return what SGLang's server does with the answers of its schedulers."""

    async def communicator(request):
        return answers

    async def original(manager, request, *others):
        await communicator(request)

    manager = SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_transfer_backend=backend),
        auto_create_handle_loop=lambda: None,
        release_memory_occupation_communicator=communicator,
    )
    return asyncio.run(release_or_raise(original, manager, None, None))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_memory_in_use_is_not_released_and_the_scheduler_goes_on(
    backend, monkeypatch, caplog, mode
):
    def never_ends(timeout_s):
        raise MemoryInUseError("transfers did not end in time", requests=["r"])

    with _sides(backend, "cpu") as sides, caplog.at_level(logging.WARNING):
        side = sides[mode == "decode"]
        updater = Updater(side, mode)
        with monkeypatch.context() as patch:
            patch.setattr(side.manager.worker, "quiesce", never_ends)
            kept = updater.release("kv_cache")
            updater.release("cuda_graph")
        assert updater.calls == [("pause", "cuda_graph")]
        updater.resume("kv_cache", "cuda_graph")  # a scheduler without our hook would end
        updater.resume("kv_cache")
        assert updater.calls == [("pause", "cuda_graph"), ("resume", "cuda_graph")]
        released = updater.release("kv_cache")
        assert updater.calls[2:] == [("pause", "kv_cache"), "flush"]
        updater.resume("kv_cache")
        assert updater.calls[4:] == [("resume", "kv_cache")]
        with pytest.raises(LocalError, match="did not end in time") as refused:
            fan_out(released, kept)
        assert refused.value.context["servers"] == "1 of 2"
        assert fan_out(released, released) is None
        assert fan_out(kept, backend="nixl") is None
    assert "no memory is released: rank" in caplog.text


def test_a_rank_whose_transfers_have_ended_goes_on_if_anothers_have_not(backend, monkeypatch):
    with _sides(backend, "cpu") as (prefill, _):
        resumed = []
        monkeypatch.setattr(prefill.manager, "register_buffer_to_engine", lambda: resumed.append(1))
        monkeypatch.setattr(backend, "gather", lambda own, _: [own, b'"another rank: in use"  '])
        updater = Updater(prefill, "prefill")
        assert updater.release("kv_cache").rid == "kvconnector: another rank: in use"
        assert (updater.calls, resumed) == ([], [1])
