"""DeepSeek-V4's caches as vLLM plans and allocates them, between two engines with vLLM's schedulers and our workers.

There is no model: pools are filled with unlike bytes, as if every token had been computed. `rows_of` says, obviously
rather than fast, which bytes of a request's blocks the decode engine needs.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, closing
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.utils import allocate_kv_cache

from kvconnector.integrations.vllm import caches
from kvconnector.integrations.vllm.caches import DRAFT_NAME
from kvconnector.integrations.vllm.settings import Settings
from kvconnector.integrations.vllm.worker import WorkerHalf
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import placed

try:  # vLLM 0.33
    from vllm.v1.core import kv_cache_planning as planner
except ImportError:
    planner = kv_cache_utils

RATIOS = (0, 128, 4, 128, 4, 0)
NUM_BLOCKS = 420
LATENT, SCALE = (576, 8), 4


def specs_of(ratios, *, packed=True, index_bytes=132):
    """Return DeepSeek-V4's caches by layer name, each with its backend. If not `packed`, rows are bf16. The
    indexer's keys have 132 bytes in fp8, and 68 in MXFP4.
    """
    aligned = 576 if packed else 512
    content = {"state_content_bytes": 584} if packed else {}
    kind = {"cache_dtype_str": "fp8_ds_mla" if packed else "auto", "model_version": "deepseek_v4"}
    latent = {
        "head_size": 512,
        "dtype": torch.uint8 if packed else torch.bfloat16,
        **content,
        **kind,
    }
    common = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": aligned}
    sparse = "FLASHMLA_SPARSE_DSV4" if packed else "FLASHINFER_MLA_SPARSE_DSV4"

    def state(width, block_size, window):
        spec = kv.SlidingWindowMLASpec(
            block_size=block_size,
            head_size=width,
            dtype=torch.float32,
            sliding_window=window,
            **common,
        )
        return spec, "CompressorBackend"

    found = {}
    for number, ratio in enumerate(ratios):
        name = f"model.layers.{number}.attn"
        window = kv.SlidingWindowMLASpec(block_size=64, sliding_window=128, **latent, **common)
        found[f"{name}.swa_cache"] = window, "DEEPSEEK_SPARSE_SWA"
        if ratio:
            rows = kv.MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **latent, **common)
            found[name] = rows, sparse
            width, block, extent = (2048, 4, 8) if ratio == 4 else (1024, 8, 128)
            found[f"{name}.compressor.state_cache"] = state(width, block, extent)
        if ratio == 4:
            index = kv.MLAAttentionSpec(
                block_size=256,
                head_size=index_bytes,
                dtype=torch.uint8,
                tokens_per_state=4,
                **common,
            )
            found[f"{name}.indexer.k_cache"] = index, "DEEPSEEK_V4_INDEXER"
            found[f"{name}.indexer.compressor.state_cache"] = state(512, 4, 8)
    return found


def planned(config, layers, num_blocks=NUM_BLOCKS):
    """Return the cache configuration that vLLM's own planner makes of these layers."""
    # the first that all backends of these layers support, and their kernels
    has_gaps = all(backend != "MINIMAX_M3_SPARSE_INDEXER" for _, backend in layers.values())
    config.cache_config.kv_cache_layout = "BLHNC" if has_gaps else "LBHNC"
    specs = {name: spec for name, (spec, _) in layers.items()}
    groups = planner.get_kv_cache_groups(config, specs)
    made = planner.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    block_bytes = max(tensor.block_stride for tensor in made.kv_cache_tensors)
    return planner.get_kv_cache_config_from_groups(config, groups, block_bytes * num_blocks)


def kernel_width(spec):
    """Return the width of a recurrent layer's convolution; None if it has none. A state has a column for each draft."""
    kind = spec.mamba_type.name if isinstance(spec, kv.MambaSpec) else ""
    if kind not in ("MAMBA2", "GDN_ATTN"):
        return None
    return spec.shapes[0][0] - spec.num_speculative_blocks + 1


class Engine:
    """One engine: vLLM's scheduler and allocator, our worker half, and pools full of its own bytes."""

    def __init__(self, model, role, layers, *, name, seed, num_blocks=NUM_BLOCKS, **engine):
        config = w.vllm_config(
            model,
            role,
            engine={
                "max_model_len": 4096,
                "max_num_batched_tokens": 256,
                "enable_chunked_prefill": True,
                **engine,
            },
        )
        config.kv_transfer_config.engine_id = name
        # as for a model with recurrent states: a prompt's steps end where states are cached
        modes = {getattr(spec, "mamba_cache_mode", "none") for spec, _ in layers.values()}
        config.cache_config.mamba_cache_mode = "align" if "align" in modes else "none"
        self.cache_config = planned(config, layers, num_blocks)
        config.compilation_config.static_forward_context = {
            layer: SimpleNamespace(
                get_attn_backend=lambda b=backend: SimpleNamespace(get_name=lambda: b),
                conv_kernel_size=kernel_width(spec),
            )
            for layer, (spec, backend) in layers.items()
        }
        self.caches = allocate_kv_cache(
            self.cache_config,
            torch.device("cpu"),
            config.cache_config.get_resolved_kv_cache_layout(),
            None,
        )
        self.layers = layers
        random = np.random.default_rng(seed)
        self.memory = self._memory()
        self.memory[:] = random.integers(0, 256, len(self.memory), dtype=np.uint8)
        self._stack = ExitStack()
        half = WorkerHalf(config, self.cache_config, Settings.of(config), placed())
        self._stack.callback(half.close)
        self.worker = half
        # the small model whose configuration stands in for this one's has fewer layers
        named = mock.patch.object(
            caches, "_is_draft", lambda _, name: bool(DRAFT_NAME.search(name))
        )
        with named, mock.patch.object(caches, "total_kv_heads", return_value=1):
            half.register(self.caches)
        shakes = {(0, 0): half.handshake()}
        register_all_kvcache_specs(None)
        of_scheduler = kv_cache_utils.generate_scheduler_kv_cache_config([self.cache_config])
        self.world = self._stack.enter_context(closing(w.World(config, of_scheduler, shakes)))
        self.tables = {}
        """The block table of each request: the one into which it is loaded, or the last one when it is computed."""
        self.keeps_first = role == "kv_consumer"

    def _memory(self):
        """Return all bytes of the pool, in which every layer's tensor lies."""
        first = min(tensor.data_ptr() for tensor in self.caches.values())
        storage = next(iter(self.caches.values())).untyped_storage()
        assert first == storage.data_ptr()
        return np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(first), np.uint8)

    def close(self):
        self._stack.close()

    def step(self):
        """Take a step of the scheduler and of the worker. Returns the requests' outputs."""
        scheduler = self.world.scheduler
        step = scheduler.schedule()
        for name in scheduler.requests:
            table = scheduler.kv_cache_manager.get_block_ids(name)
            if any(table) and (not self.keeps_first or name not in self.tables):
                self.tables[name] = table
        self.worker.start_step(step.kv_connector_metadata)
        results, report = self.worker.finished(), self.worker.take_report()
        reported = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=report,
        )
        return self.world.complete(step, reported)

    def rows_of(self, name, num_tokens, memory=None, *, hit=0, is_followed=False):
        """Return two lists: the bytes of each plane of each row that a request's first `num_tokens` tokens leave to be
        read after a prefix hit, and of the other rows in their blocks. All are arrays that can be written.

        The block in which a window begins comes whole, since vLLM caches it like any other, unless the prompt
        `is_followed` while it is computed.
        """
        memory = self.memory if memory is None else memory
        base = min(tensor.data_ptr() for tensor in self.caches.values())
        read, beside = [], []
        for table, group in zip(self.tables[name], self.cache_config.kv_cache_groups, strict=True):
            for layer in group.layer_names:
                spec, backend = self.layers[layer]
                tensor = self.caches[layer]
                m, item = int(spec.tokens_per_state), tensor.element_size()
                per_page, width = spec.block_size // m, tensor.shape[-1] * item
                window = getattr(spec, "sliding_window", None)
                first = max(0, num_tokens - window + 1) if window else 0
                if window == 128 and backend == "CompressorBackend":
                    first = num_tokens // 128 * 128  # the row that is not complete
                first = max(first if is_followed else first // per_page * per_page, hit)
                is_index = "INDEXER" in backend
                planes = (width - SCALE, SCALE) if is_index else (width,)
                planes = LATENT if width == 584 else planes
                rows = range(first // m, num_tokens // m)
                for index in range(
                    rows.start // per_page, -(-rows.stop // per_page) if rows else 0
                ):
                    page = tensor.data_ptr() - base + table[index] * tensor.stride(0) * item
                    for plane in planes:
                        for at in range(per_page):
                            found = read if index * per_page + at in rows else beside
                            found.append(memory[page + at * plane : page + (at + 1) * plane])
                        page += per_page * plane
        return read, beside


def pair(model, layers, *, decode_layers=None, decode=(), **options):
    """Return a context with a prefill and a decode engine. `options` are those of `Engine`, or of vLLM's. `decode` are
    options of the decode engine alone.
    """
    stack = ExitStack()
    engines = (
        ("kv_producer", "p", layers, options),
        ("kv_consumer", "d", decode_layers or layers, {**options, **dict(decode)}),
    )
    for seed, (role, name, own, more) in enumerate(engines):
        stack.enter_context(closing(made := Engine(model, role, own, name=name, seed=seed, **more)))
        setattr(stack, name, made)
    return stack
