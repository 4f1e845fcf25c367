"""Caches as vLLM allocates them, and how a worker registers them."""

import ctypes
from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvconnector.errors import IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.integrations.vllm.caches import register_groups
from kvconnector.integrations.vllm.placement import Placement
from kvconnector.layout import ContextParallel
from kvconnector.topology import EngineGeometry, ModelDescription, RankGeometry, TpKVTopology

BLOCKS, HEADS, SIZE, DIM, LAYERS = 5, 2, 32, 32, 3
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]


def placed(tp_rank=0, **shared):
    """Place a worker in one pipeline stage; with arguments of `ContextParallel`, as one that shares tokens."""
    return Placement(
        rank=Rank(0, tp_rank), tp_rank=tp_rank, context_parallel=ContextParallel(**shared)
    )


def read(view):
    """Return the `[B, H, N, D]` bytes of a view, as an engine's memory holds them."""
    steps = zip(view.shape, view.strides_bytes, strict=True)
    span_bytes = sum((count - 1) * stride for count, stride in steps) + view.item_size_bytes
    memory = (ctypes.c_uint8 * span_bytes).from_address(view.address)
    flat = np.frombuffer(memory, dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(
        flat, (*view.shape, view.item_size_bytes), (*view.strides_bytes, 1)
    )


def raw(tensor):
    """Return a logical `[B, H, N, D]` tensor in the form of `read`."""
    dense = tensor.contiguous()
    return dense.view(torch.uint8).numpy().reshape(*dense.shape, -1)


def model_of(kv_heads, num_layers=LAYERS, **overrides):
    """Return a model's configuration; `overrides[number]` are the KV heads of layers that differ."""
    heads = [overrides.get(f"layer_{n}", kv_heads) for n in range(num_layers)]
    return SimpleNamespace(
        dtype=torch.bfloat16,
        get_total_num_kv_heads=lambda: kv_heads,
        get_total_num_hidden_layers=lambda: num_layers,
        model_arch_config=[SimpleNamespace(total_num_kv_heads=number) for number in heads],
    )


def vllm_config(
    backend,
    *,
    isa="",
    tp_size=1,
    total_kv_heads=HEADS,
    names=NAMES,
    draft_kv_heads=None,
    layer=(),
    **overrides,
):
    """Return what a worker reads of a configuration. `backend`: the name of all layers' backend, or of each layer's."""
    backends = backend if isinstance(backend, dict) else dict.fromkeys(names, backend)
    layers = {
        name: SimpleNamespace(
            get_attn_backend=lambda found=found: SimpleNamespace(get_name=lambda: found),
            isa=isa,
            **dict(layer),
        )
        for name, found in backends.items()
    }
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=model_of(total_kv_heads, **overrides),
        speculative_config=draft_kv_heads
        and SimpleNamespace(draft_model_config=model_of(draft_kv_heads, num_layers=1)),
    )


def attention(kind=kv.FullAttentionSpec, **options):
    arguments = {
        "block_size": SIZE,
        "num_kv_heads": HEADS,
        "head_size": DIM,
        "dtype": torch.float32,
    }
    return kind(**{**arguments, **options})


def one_group(
    spec, layout, kernel_block_size=None, names=NAMES, num_blocks=BLOCKS, *, device="cpu"
):
    """Return one group in one allocation, as vLLM makes it."""
    names = list(names)
    page = spec.page_size_bytes
    is_compact = layout.is_layer_compact
    tensor = kv.KVCacheTensor(
        size=page * num_blocks * len(names),
        layers=names,
        layer_stride=page * num_blocks if is_compact else page,
        block_stride=page if is_compact else page * len(names),
    )
    config = kv.KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[kv.KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
    )
    sizes = None if kernel_block_size is None else [kernel_block_size]
    caches = allocate_kv_cache(config, torch.device(device), layout, sizes)
    for number, cache in enumerate(caches.values()):
        generator = torch.Generator().manual_seed(number)
        cache.copy_(torch.randint(-99, 99, cache.shape, generator=generator).to(cache.dtype))
    return config, caches


def registered(
    spec,
    layout=KVCacheLayout.LBHNC,
    backend="FLASH_ATTN",
    *,
    kernel_block_size=None,
    place=placed(),  # noqa: B008  it is not changed
    **engine,
):
    """Return a group as a worker registers it, and its caches by layer."""
    config, caches = one_group(spec, layout, kernel_block_size)
    (group,) = register_groups(vllm_config(backend, **engine), config, caches, place)
    return group, caches


def engine_of(groups, name="e"):
    """Return an engine of one rank with these registered groups, as it introduces itself to another one."""
    rank = RankGeometry(
        pp_rank=0, tp_rank=0, groups=tuple(group.cache.geometry for group in groups)
    )
    model = ModelDescription(model="m", dtype="float32", num_layers=LAYERS)
    return EngineGeometry(engine_id=name, tp_size=1, pp_size=1, model=model, ranks=(rank,))


def refused_for(ours, theirs):
    """Return the names of the values for which an engine refuses to read another one; none if it reads it."""
    try:
        TpKVTopology(ours, Rank(0, 0)).check_compatible(theirs)
    except IncompatiblePeerError as error:
        return {*error.context}
    return set()
