"""A prefill engine whose ranks split a sparse cache by layers, with SGLang's own pools and queue of each rank."""

import secrets
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from kvconnector.errors import ConfigError
from tests.sglang.listed import listed
from tests.sglang.pure.engines import Gathered
from tests.sglang.test_backend import FAILED, LIMIT_S, ROWS, WAITING, backend

pytestmark = [pytest.mark.sglang, pytest.mark.ucx]
__all__ = ["backend"]  # a fixture

LAYERS, SHARED, RANKS = 7, (1, 2, 4), 3
OWNERS = [range(3), range(3, 5), range(5, 7)]
"""The layers of each rank."""
SIZE, PAGE, TOKENS, CHUNK = 512, 64, 300, 128
LATENT, INDEX = 576, 132
PREFILL_PAGES, DECODE_PAGES = [5, 2, 7, 3, 6], [1, 4, 3, 8, 2]
SENT_ROW, READ_ROW = 1, 2
SUCCESS = 4


def _pool(layers, shared=(), split=None):
    from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    make, ranks = DSATokenToKVPool, {}
    if split is not None:
        make, ranks = LayerSplitDSATokenToKVPool, {"layer_shard_rank": split}
        ranks["layer_shard_size"] = RANKS
    return make(
        size=SIZE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=LATENT,
        skip_topk_layers=[layer in shared for layer in range(layers)],
        **ranks,
    )


def _slots(pages, start, stop):
    return torch.tensor([pages[t // PAGE] * PAGE + t % PAGE for t in range(start, stop)])


class Values:
    """What a model computes of a prompt: `latents[layer][token]`, and `keys` and `scales` of layers with an indexer."""

    def __init__(self, layers):
        self.latents = {each: torch.rand(TOKENS, 1, LATENT).bfloat16() for each in layers}
        own = [each for each in layers if each not in SHARED]
        self.keys = {each: torch.randint(0, 120, (TOKENS, 128), dtype=torch.uint8) for each in own}
        self.scales = {each: torch.rand(TOKENS) for each in own}

    def write(self, pool, pages, start, stop, first=0):
        """Have SGLang's pool of one rank store a step, of all layers, as a forward pass does on every rank."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        slots = _slots(pages, start, stop)
        for layer, latents in self.latents.items():
            at = SimpleNamespace(layer_id=layer - first)
            pool.set_kv_buffer(at, KVWriteLoc(slots), latents[start:stop], None)
            if layer in self.keys:
                keys = self.keys[layer][start:stop].view(torch.float8_e4m3fn)
                pool.index_key_cache.store_quantized(
                    layer - first, slots, keys, self.scales[layer][start:stop]
                )


@pytest.fixture
def on_a_cpu(monkeypatch):
    """SGLang's pools of sparse attention in a process without its engine, where no rank reads another's layers."""
    from sglang.srt.mem_cache import dsa_cache_layer_split as split
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(device="cpu", page_size=PAGE).install()
    group = SimpleNamespace(world_size=1, pynccl_comm=None)
    monkeypatch.setattr(split, "get_parallel", lambda: SimpleNamespace(attn_cp_group=group))


class Ranks:
    """Gives each thread its own rank's place and its part in what ranks tell each other."""

    def __init__(self, backend, monkeypatch, num_ranks, **changes):
        self._here = threading.local()
        gathered, common = Gathered(num_ranks), vars(backend.get_parallel()) | changes

        def parallel():
            rank = getattr(self._here, "rank", 0)
            return SimpleNamespace(**common | {"attn_cp_size": num_ranks, "attn_cp_rank": rank})

        monkeypatch.setattr(backend, "get_parallel", parallel)
        monkeypatch.setattr(
            backend,
            "gather",
            lambda own, _: gathered.of(self._here.rank)(own) if num_ranks > 1 else [own],
        )
        self.parallel = parallel
        self._num = num_ranks

    def run(self, make):
        """Return what `make(rank)` returns in each rank's thread. Raises the first error."""
        found, errors = [None] * self._num, []

        def start(rank):
            self._here.rank = rank
            try:
                found[rank] = make(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(self._num)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(LIMIT_S)
        for error in errors:
            raise error
        return found


SERVER = SimpleNamespace(
    device="cpu",
    served_model_name="small",
    model_path="",
    enable_hisparse=False,
    enable_lmcache=False,
    enable_flexkv=False,
    radix_cache_backend=None,
    enable_unified_cache_external_linker=False,
    enable_hierarchical_cache=False,
    enable_streaming_session=False,
    enable_fused_qk_norm_rope=None,
)


def _metadata():
    from sglang.srt.disaggregation.utils import MetadataBuffers

    return MetadataBuffers(ROWS, 96, torch.float32, 0)


def _prefill_managers(backend, monkeypatch, found):
    """Return the ranks' managers, made by the queue that SGLang has for that."""
    from sglang.srt.disaggregation import prefill as queues

    ranks = Ranks(backend, monkeypatch, RANKS, enable_dsa_cache_layer_split=True)
    model = SimpleNamespace(num_hidden_layers=LAYERS, hf_text_config=SimpleNamespace())
    runner = SimpleNamespace(kv_cache_dtype_str="auto")
    scheduler = SimpleNamespace(
        rust_server=None,
        model_config=model,
        server_args=SERVER,
        tp_worker=SimpleNamespace(model_runner=runner),
    )
    classes = {"KVARGS": backend.KVArgs, "MANAGER": backend.KVManager}
    monkeypatch.setattr(queues, "get_kv_class", lambda _, kind: classes[kind.name])
    monkeypatch.setattr(
        queues,
        "get_parallel",
        lambda: SimpleNamespace(**vars(ranks.parallel()) | {"dp_rank": None}),
    )
    disagg = SimpleNamespace(disaggregation_ib_device=None)
    monkeypatch.setattr(queues, "get_disagg", lambda: disagg)
    monkeypatch.setattr(queues, "get_device", lambda: SimpleNamespace(gpu_id=0))

    def make(rank):
        queue = SimpleNamespace(
            transfer_backend=None,
            tp_rank=rank,
            pp_rank=0,
            scheduler=scheduler,
            token_to_kv_pool=found.pools[rank],
            draft_token_to_kv_pool=found.drafts[rank],
            is_mla_backend=True,
            metadata_buffers=found.metadata[rank],
        )
        return queues.PrefillBootstrapQueue._init_kv_manager(queue)

    return ranks.run(make)


def _decode_manager(backend, pool, draft, metadata):
    from sglang.srt.disaggregation.utils import DisaggregationMode

    args = listed(pool, PAGE, draft, num_layers=LAYERS)
    args.pp_rank = args.system_dp_rank = 0
    args.kv_cache_dtype_str, args.kv_layout = "auto", None
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = metadata.get_buf_infos()
    return backend.KVManager(args, DisaggregationMode("decode"), SERVER, True)


def _until(wanted, *polled):
    until_s = time.monotonic() + LIMIT_S
    while {each.poll() for each in polled} != {wanted}:
        assert FAILED not in {each.stage for each in polled}, [each.error for each in polled]
        assert time.monotonic() < until_s, [each.stage for each in polled]
        time.sleep(0.001)


@pytest.fixture
def engines(backend, on_a_cpu, monkeypatch):
    """Both engines, with a draft model of one layer: managers, pools and metadata of three ranks and of one."""
    backend.hook_queues()
    model = backend.ModelConfig.from_server_args(None)
    model.num_hidden_layers, model.dtype = LAYERS, torch.bfloat16
    found = SimpleNamespace()
    with ExitStack() as stack:
        found.pools = [_pool(LAYERS, SHARED, split=rank) for rank in range(RANKS)]
        found.drafts = [_pool(1) for _ in range(RANKS)]
        found.metadata = [_metadata() for _ in range(RANKS)]
        found.prefill = _prefill_managers(backend, monkeypatch, found)
        for each in found.prefill:
            stack.callback(each.teardown)
        Ranks(backend, monkeypatch, 1, enable_dsa_cache_layer_split=False)
        found.pool, found.draft, found.row = _pool(LAYERS, SHARED), _pool(1), _metadata()
        found.decode = _decode_manager(backend, found.pool, found.draft, found.row)
        stack.callback(found.decode.teardown)
        yield found


def test_each_rank_is_a_stage_with_the_layers_that_sglang_gives_it(engines):
    groups = [manager.worker.handshake().geometry for manager in engines.prefill]
    assert [(each.pp_rank, each.tp_rank) for each in groups] == [(0, 0), (1, 0), (2, 0)]
    kinds = [each.kind for each in engines.prefill[0].layout.groups]
    assert kinds == ["kv", "dsa", "row", "kv", "dsa", "row"]
    keys = [tuple(layer for layer in own if layer not in SHARED) for own in OWNERS]
    held = [[group.layers for group in each.groups] for each in groups]
    assert [each[:2] for each in held] == [
        [tuple(own), keys[rank]] for rank, own in enumerate(OWNERS)
    ]
    rows = tuple(range(8))
    assert [each[2:] for each in held] == [[()] * 4] * 2 + [[rows, (LAYERS,), (LAYERS,), rows]]
    for rank, manager in enumerate(engines.prefill):
        pool = engines.pools[rank]
        own = [pool.kv_buffer[layer].data_ptr() for layer in OWNERS[rank]]
        assert manager.kv_args.kv_data_ptrs[: len(own)] == own
        assert all(
            not pool.kv_buffer[layer].numel() for layer in {*range(LAYERS)} - {*OWNERS[rank]}
        )


@pytest.mark.parametrize("prefix", [0, 2 * PAGE])
def test_a_prompt_in_chunks_arrives_from_all_ranks_with_its_draft_and_metadata(engines, prefix):
    """Every byte of the decode engine's caches. What an owner lent to a rank has other values here, and is not read."""
    from kvconnector.integrations.sglang.backend import KVReceiver, KVSender

    values, drafted = Values(range(LAYERS)), Values([LAYERS])
    address = f"127.0.0.1:{engines.prefill[0].config.engine_id.rpartition('-')[2]}"
    room = secrets.randbits(62) + 1
    senders = [KVSender(manager, address, room) for manager in engines.prefill]
    receiver = KVReceiver(engines.decode, address, room)
    receiver.init(0)
    receiver.num_tokens = TOKENS
    for tensor in (*engines.pool.kv_buffer, *engines.draft.kv_buffer):
        tensor.fill_(7)
    for start, stop in ((0, CHUNK), (CHUNK, TOKENS)):
        for rank, sender in enumerate(senders):
            pool = engines.pools[rank]
            values.write(pool, PREFILL_PAGES, start, stop)
            pool.remote_kv_buffer.copy_(
                torch.rand(pool.remote_kv_buffer.shape)
            )  # of the layer that it last read
            drafted.write(engines.drafts[rank], PREFILL_PAGES, start, stop, first=LAYERS)
            sender.init(len(PREFILL_PAGES), SENT_ROW)
            metadata, is_last = engines.metadata[rank], stop == TOKENS
            metadata.output_ids[SENT_ROW, 0] = 40 + rank
            metadata.bootstrap_room[SENT_ROW, 0] = room
            metadata.output_hidden_states[SENT_ROW] = rank
            pages = PREFILL_PAGES[start // PAGE : -(-stop // PAGE)]
            sender.send(pages, [PREFILL_PAGES] if is_last else None, stop - start)
        if start == 0:
            _until(WAITING, receiver)
            own = DECODE_PAGES[prefix // PAGE :]
            receiver.send_metadata(own, READ_ROW, [own], prefix)
    _until(SUCCESS, receiver, *senders)
    for each, pool, first in ((values, engines.pool, 0), (drafted, engines.draft, LAYERS)):
        expected = _pool(pool.layer_num, SHARED if first == 0 else ())
        for tensor in expected.kv_buffer:
            tensor.fill_(7)
        each.write(expected, DECODE_PAGES, prefix, TOKENS, first=first)
        for ours, right in zip(pool.kv_buffer, expected.kv_buffer, strict=True):
            assert ours.equal(right)
        for ours, right in zip(
            pool.index_k_with_scale_buffer, expected.index_k_with_scale_buffer, strict=True
        ):
            assert ours.equal(right)
    assert engines.row.output_ids[READ_ROW, 0] == 42, "the last rank's row"
    assert engines.row.output_hidden_states[READ_ROW].unique().tolist() == [2]


@pytest.mark.parametrize(
    "mode, is_sparse, text",
    [("decode", True, "needs all layers"), ("prefill", False, "sparse indexer")],
)
def test_the_option_elsewhere_is_refused_with_a_way_out(backend, on_a_cpu, mode, is_sparse, text):
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    backend.get_parallel().enable_dsa_cache_layer_split = True
    plain = SIZE, PAGE, torch.float32, 16, 8, 3, "cpu", False
    args = listed(_pool(3) if is_sparse else MLATokenToKVPool(*plain), PAGE, num_layers=3)
    args.pp_rank = args.system_dp_rank = 0
    args.kv_cache_dtype_str, args.kv_layout = "auto", None
    with pytest.raises(ConfigError, match=text):
        backend.KVManager(args, DisaggregationMode(mode), SERVER, True)


class Options(SimpleNamespace):
    """SGLang's options. Those that are not named have no value."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


@pytest.fixture
def check_options(monkeypatch):
    """SGLang's check of a sparse model's options, with our hook, as a server that has a GPU runs it at its start."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.arg_groups.resolution_hooks import run_hook
    from sglang.srt.configs import model_config
    from sglang.srt.plugins import load_plugins

    load_plugins()
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "64")
    platform = SimpleNamespace(is_npu=False, is_xpu=False, is_hip=False, is_cuda=True)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"]), decision_config=None
    )
    monkeypatch.setattr(model_config, "is_deepseek_dsa", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name, value in {
        "get_platform": lambda: platform,
        "model_config_of": lambda _: model,
        "get_linear_attn_spec": lambda _: None,
        "collect_model_override_declarations": lambda *_: [("of the model", {"page_size": 64})],
        "validate_declarations": lambda *_: None,
        "run_post_process_pass": lambda *_: None,
        "_validate_dsa_tbo_index_sharing": lambda *_: None,
        "with_phase": lambda *_, **__: None,
    }.items():
        monkeypatch.setattr(model_hook, name, value, raising=False)

    def check(backend, **changes):
        options = {
            "disaggregation_transfer_backend": backend,
            "disaggregation_mode": "prefill",
            "enable_dsa_cache_layer_split": True,
            "enable_prefill_cp": True,
            "cp_strategy": "interleave",
            "pp_size": 1,
            "tp_size": 2,
            "attn_cp_size": 2,
            "attn_dp_size": 1,
            "dp_size": 1,
            "model_path": "m",
            "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend=None)),
            "_resolved_overrides": [("the user", {})],
        }
        made = Options(**options | changes)
        try:
            run_hook(model_hook.handle_model_specific_adjustments, made)
        finally:
            assert model_hook.resolving_view(made).disaggregation_transfer_backend == backend
        return made

    return check


def test_sglangs_command_line_admits_a_split_cache_with_us_too(check_options):
    made = check_options("kvconnector")
    assert ("of the model", {"page_size": 64}) in made._resolved_overrides
    with pytest.raises(ValueError, match="only supports the mooncake"):
        check_options("nixl")
    check_options("mooncake")
    check_options("nixl", enable_dsa_cache_layer_split=False)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"disaggregation_mode": "decode", "enable_prefill_cp": False}, "not supported on decode"),
        ({"cp_strategy": "zigzag"}, "requires --enable-prefill-cp"),
        ({"pp_size": 2}, "pipeline parallelism"),
    ],
)
def test_all_other_checks_of_sglangs_stay(check_options, changes, text):
    with pytest.raises(ValueError, match=text):
        check_options("kvconnector", **changes)
