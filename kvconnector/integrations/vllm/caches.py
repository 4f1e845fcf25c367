"""Cache groups from the tensors that vLLM registers: the same groups in the same order on every rank of an engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvconnector.errors import GeometryError
from kvconnector.integrations.vllm.messages import GroupInfo
from kvconnector.integrations.vllm.parts import (
    CUT_STATES,
    LayerCache,
    Part,
    TpSplit,
    attention_parts,
    is_latent,
    planes_of_pages,
    state_parts,
)
from kvconnector.integrations.vllm.placement import Placement
from kvconnector.integrations.vllm.rounding import Rules, element_of
from kvconnector.layout import NO_CONTEXT_PARALLEL, ContextParallel
from kvconnector.runtime import CacheGroup
from kvconnector.runtime.tensors import device_name
from kvconnector.topology import GroupGeometry, PartGeometry
from kvconnector.topology.geometry import UNKNOWN_ROUNDING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

COMPRESSOR_STATE = ".compressor.state_cache"
"""What the name of a compressor's state has after the name of the cache that it fills."""
LAYERS_PER_NAMESPACE = 4096
DRAFT_NAMESPACE = 8
DRAFT_NAME = re.compile(r"(?:^|[._])(?:draft|mtp)(?:[._]|$)")
"""Matches the names of a draft model's layers: `draft_model.layers.0`, `mtp.layers.0`, `model.mtp_layers.0`."""


REFUSED_KINDS: Mapping[str, str] = {
    "CrossAttentionSpec": "its tokens are the encoder's, which this integration does not count",
    "EncoderOnlyAttentionSpec": "it has no cache",
    "HiSparseHotSpec": "it is HiSparse's copy of what a request reads often",
    "HiSparseResidentSpec": "its pages may be reclaimed at any time, and the others are on the host",
    "HiddenStateCacheSpec": "it has hidden states that are extracted, and no attention's cache",
    "KpoolTailSpec": "it is a ring of one block, which vLLM 0.31 keeps in another way than later releases",
    "RSWASpec": "vLLM frees blocks in the middle of a sequence, between its prompt and its window",
    "SinkFullAttentionSpec": "its first blocks belong to all requests, and to none",
}
"""Kinds of groups that are refused, by the names of their classes in vLLM, and why. Others are refused as unknown."""


@dataclass(frozen=True, slots=True)
class RegisteredGroup:
    """One cache group in our terms and in vLLM's, and its tensors by layer name. A block of ours is `joined_blocks`
    consecutive blocks of a tensor.
    """

    cache: CacheGroup
    info: GroupInfo
    tensors: Mapping[str, torch.Tensor]
    joined_blocks: int = 1

    @property
    def is_optional(self) -> bool:
        """True if another engine may lack the group, because it may lack all of its layers."""
        held = self.cache.geometry
        return held.layers == held.optional_layers

    def with_optional(self, layers: Iterable[int]) -> RegisteredGroup:
        """Return this group with these layers as those that another engine may lack."""
        optional = tuple(sorted(layers))
        geometry = msgspec.structs.replace(self.cache.geometry, optional_layers=optional)
        return replace(self, cache=replace(self.cache, geometry=geometry))

    def tensor_block_ids(self, block_ids: Sequence[int]) -> list[int]:
        """Return the ids of the tensors' blocks that these blocks of ours consist of."""
        ratio = self.joined_blocks
        return [block * ratio + part for block in block_ids for part in range(ratio)]


def layer_number(name: str) -> int:
    """Return a layer's global index, from its vLLM name: the same on every rank and engine of a model.

    The first number in the name is the decoder layer's. A second one (of several caches in one decoder layer), and a
    draft model's layers, get namespaces of their own.

    Raises:
        GeometryError: the name has no number, or one is too large.
    """
    numbers = _numbers(name)
    if not numbers or numbers[0] >= LAYERS_PER_NAMESPACE or sum(numbers[1:]) >= DRAFT_NAMESPACE:
        raise GeometryError("cannot number this layer", layer=name)
    namespace = sum(numbers[1:]) + (DRAFT_NAMESPACE if DRAFT_NAME.search(name) else 0)
    return namespace * LAYERS_PER_NAMESPACE + numbers[0]


def _numbers(name: str) -> list[int]:
    return [int(found) for found in re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)]


def total_kv_heads(vllm_config: VllmConfig, name: str) -> int:
    """Return the number of KV heads of one layer, by its vLLM name, on all ranks together.

    A draft model's layers have other heads.
    """
    target, speculative = vllm_config.model_config, vllm_config.speculative_config
    if not _is_draft(vllm_config, name):
        number = next(iter(_numbers(name)), 0)
        return int(target.model_arch_config[number].total_num_kv_heads)
    draft = speculative.draft_model_config if speculative is not None else None
    return int((draft or target).get_total_num_kv_heads())


def _is_draft(vllm_config: VllmConfig, name: str) -> bool:
    """Return True for a draft model's layer: by its name, or because it is numbered after the target's layers."""
    number = next(iter(_numbers(name)), 0)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    return bool(DRAFT_NAME.search(name)) or number >= num_layers


def register_groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    placement: Placement,
) -> list[RegisteredGroup]:
    """Return our cache groups, from vLLM's groups and the tensors that it registers.

    A group of vLLM whose layers differ in shape becomes several of ours with the same block table. Another engine may
    lack a draft model's layers. Groups that have no others come last.

    Raises:
        GeometryError: a layout is not supported, or a tensor is missing.
    """
    cut = TpSplit(placement.tp_rank, vllm_config.parallel_config.tensor_parallel_size)
    pools = _pools(kv_cache_config)
    rules = Rules(vllm_config.model_config.dtype)
    registered = []
    for vllm_group in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[vllm_group]
        if group.host_resident:
            raise GeometryError("a host resident group cannot be transferred", group=vllm_group)
        for spec, all_names in _uniform_parts(group):
            names = _own_caches(all_names, kv_caches)
            layers = {
                layer_number(name): _layer_cache(vllm_config, name, spec, kv_caches, rules)
                for name in names
            }
            layers = _with_one_rule(layers)
            if len(layers) != len(names):
                raise GeometryError("two layers of a group have one number", layers=names)
            shared = placement.context_parallel if spec.dcp_sharded else NO_CONTEXT_PARALLEL
            found = _register(
                kv_cache_config.num_blocks, vllm_group, spec, layers, cut=cut, shared=shared
            )
            found = _kept_by_pools(found, names, pools)
            if vllm_config.speculative_config:
                drafts = [layer_number(name) for name in names if _is_draft(vllm_config, name)]
                found = found.with_optional(drafts)
            registered.append(found)
    return sorted(registered, key=lambda group: group.is_optional)


def _pools(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Return the tokens of a pool, by the name of each compressor's state whose pools do not overlap.

    A compressor pools the last tokens of its state's window into a row. If the window is as long as what a row stands
    for, a pool has the tokens of one row, and those of the row before are never read again.
    """
    specs: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        specs |= each or dict.fromkeys(group.layer_names, group.kv_cache_spec)
    pools = {}
    for name, spec in specs.items():
        filled = specs.get(name.removesuffix(COMPRESSOR_STATE), spec)
        row_tokens = 1 if filled is spec else getattr(filled, "tokens_per_state", 1)
        if row_tokens > 1 and getattr(spec, "sliding_window", None) == row_tokens:
            pools[name] = int(row_tokens)
    return pools


def _kept_by_pools(
    group: RegisteredGroup, names: Sequence[str], pools: Mapping[str, int]
) -> RegisteredGroup:
    """Return a group of compressors' states as one that keeps a pool, where pools do not overlap; others as they are.

    vLLM keeps a window of them, and a prefix hit ends where rows do, so it needs no state.
    """
    if {pools.get(name) for name in names} != {group.info.extent_tokens}:
        return group
    return replace(group, info=msgspec.structs.replace(group.info, keeps="chunk"))


def _uniform_parts(group: Any) -> list[tuple[Any, list[str]]]:
    """Return (spec, layer names) of every set of equal layers, in the same order on all ranks."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return [(spec, sorted(group.layer_names, key=layer_number))]
    by_shape: dict[tuple[tuple[float, str], ...], tuple[Any, list[str]]] = {}
    for name in sorted(group.layer_names, key=layer_number):
        layer_spec = spec.kv_cache_specs[name]
        key = _identity(layer_spec, name)
        by_shape.setdefault(key, (layer_spec, []))[1].append(name)
    return [by_shape[key] for key in sorted(by_shape)]


_IDENTITY = (
    "block_size",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_quant_mode",
    "state_content_bytes",
    "tokens_per_state",
    "num_head_slots",
    "sliding_window",
    "attention_chunk_size",
    "shapes",
    "dtypes",
    "mamba_type",
)
"""Fields of specs that say what a layer stores. Others differ between releases of vLLM, or between layers that store
the same: padding, roles, whether a layer is a draft model's."""


def _identity(spec: Any, name: str) -> tuple[tuple[float, str], ...]:
    """Return what makes two layers of a group alike, in an order that is the same in every release and on every rank.

    Numbers are compared as numbers: ranks of 8 and 16 heads are in the order of 4 and 8.
    """
    kind = re.sub(r"\d+", "*", name)
    values = kind, type(spec).__name__, *(getattr(spec, field, None) for field in _IDENTITY)
    return tuple(
        (float(value), "") if isinstance(value, int | Fraction) else (0.0, str(value))
        for value in values
    )


def _own_caches(names: Sequence[str], kv_caches: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the layers with caches of their own. vLLM registers a layer that shares a cache with the same memory."""
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise GeometryError("vLLM registers no tensor for these layers", layers=missing)
    by_address: dict[int, str] = {}
    for name in names:
        by_address.setdefault(kv_caches[name].data_ptr(), name)
    return list(by_address.values())


def _with_one_rule(layers: Mapping[int, LayerCache]) -> dict[int, LayerCache]:
    """Return layers with the rule that they have in common, if these differ in it as their scales do."""
    rules = {cache.rounding for cache in layers.values()}
    if len(rules) <= 1:
        return dict(layers)
    return {number: replace(cache, rounding=UNKNOWN_ROUNDING) for number, cache in layers.items()}


def _layer_cache(
    vllm_config: VllmConfig,
    name: str,
    spec: Any,
    kv_caches: Mapping[str, torch.Tensor],
    rules: Rules,
) -> LayerCache:
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    backend = layer.get_attn_backend().get_name() if layer is not None else ""
    kv_cache_dtype = str(vllm_config.cache_config.cache_dtype)
    cache = LayerCache(
        name=name,
        spec=spec,
        tensor=kv_caches[name],
        total_kv_heads=total_kv_heads(vllm_config, name),
        backend=backend,
        isa=getattr(layer, "isa", ""),
        kv_cache_dtype=kv_cache_dtype,
        scales=_scales(layer, spec),
        element=element_of(layer, spec, kv_caches[name], kv_cache_dtype),
        is_shuffled=_is_shuffled(layer),
        is_ring=is_ring(spec),
        num_inputs=num_inputs(vllm_config, name, layer, spec),
        is_group_shared=is_group_shared(layer),
    )
    return replace(cache, rounding=rules.rule_of(layer, cache))


def num_inputs(vllm_config: VllmConfig, name: str, layer: Any, spec: Any) -> int:
    """Return how many of the tokens before it a recurrent layer's convolution needs: the width of its kernel less one.
    0 if the layer does not say it, or has no convolution.

    Raises:
        GeometryError: its state has columns that belong neither to these tokens nor to drafts.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.v1.kv_cache_interface import MambaSpec

    width = getattr(layer, "conv_kernel_size", None) or getattr(layer, "conv_size", None)
    kind = spec.mamba_type.name if isinstance(spec, MambaSpec) else ""
    if kind not in CUT_STATES or not width:
        return 0
    drafting = vllm_config.speculative_config
    num_drafts = int(drafting.num_speculative_tokens or 0) if drafting else 0
    needed, columns = int(width) - 1, spec.shapes[0][is_conv_state_dim_first()]
    if columns not in (needed, needed + num_drafts):
        raise GeometryError(
            "the state of this layer's convolution has columns that are not known: neither one for each token that its"
            " kernel needs, nor one more for each draft",
            layer=name,
            kind=kind,
            kernel_width=width,
            num_speculative_tokens=num_drafts,
            columns=columns,
        )
    return needed


def is_group_shared(layer: Any) -> bool:
    """Return True if each rank of a Mamba 2 layer has all of B and C. vLLM replicates a single group of heads, and
    otherwise divides the groups among the ranks. It counts replicas as groups, except in the layer's norm.
    """
    return getattr(getattr(layer, "norm", None), "n_groups", 0) == 1


def is_ring(spec: Any) -> bool:
    """Return True if a request has one block of this kind, in which a token's place is its position modulo a length."""
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    return type(spec) is CircularBufferSpec


def _is_shuffled(layer: Any) -> bool:
    """Return True if a layer's kernels on this device store elements in an order that the tensor's shape does not show:
    on ROCm those of an indexer (tiles of 16 rows), and of TurboQuant (a block's scales behind all of its values).
    """
    shuffles = getattr(layer, "uses_shuffled_layout", False)
    return bool(shuffles or getattr(getattr(layer, "impl", None), "_soa_store", False))


def _scales(layer: Any, spec: Any) -> tuple[tuple[float, ...], ...]:
    """Return an attention layer's `LayerCache.scales`. They come from the checkpoint, whose name does not show them."""
    from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

    # in opaque bytes, those of each token and head are stored beside the numbers; not every layer has scales
    of_latents = getattr(layer, "_flashinfer_fp8_kv_scale", None)  # DeepSeek-V4's, of one part
    if of_latents is not None and spec.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR:
        return (tuple(of_latents.flatten().tolist()),)
    if (
        not hasattr(layer, "_k_scale")
        or not isinstance(spec, AttentionSpec)
        or spec.kv_quant_mode is not KVQuantMode.FP8_PER_TENSOR
        or spec.state_content_bytes is not None
    ):
        return ()
    return tuple(tuple(scale.flatten().tolist()) for scale in (layer._k_scale, layer._v_scale))


def scales_in_use(vllm_config: VllmConfig, groups: Sequence[RegisteredGroup]) -> dict[str, Any]:
    """Return the scales of K and V by which layers with stated scales store now, by the layers' names. They are those
    that vLLM keeps on the host: of several heads the largest.
    """
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in groups if group.cache.geometry.scales for name in group.tensors]
    return {
        name: [getattr(layers[name], f"_{part}_scale_float", None) for part in "kv"]
        for name in names
    }


def _register(
    num_blocks: int,
    vllm_group: int,
    spec: Any,
    layers: Mapping[int, LayerCache],
    *,
    cut: TpSplit,
    shared: ContextParallel,
) -> RegisteredGroup:
    from vllm.v1.kv_cache_interface import MambaSpec

    is_state = isinstance(spec, MambaSpec)
    tensors = {cache.name: cache.tensor for cache in layers.values()}
    ratio, joined = _kernel_blocks(num_blocks, vllm_group, tensors), 1
    if ratio > 1 and shared.world_size > 1 and spec.block_size // ratio % shared.interleave_tokens:
        layers = {number: _join(cache, ratio, shared) for number, cache in layers.items()}
        ratio, joined = 1, ratio
    is_one_token = is_state or is_ring(spec)
    row_tokens = 1 if is_one_token else _row_tokens(spec, vllm_group, shared)
    block_size = 1 if is_one_token else spec.block_size // ratio // row_tokens
    parts = {number: _parts(cache, cut, block_size, is_state) for number, cache in layers.items()}
    geometries = _common_geometry(parts, layers, vllm_group)
    views = {number: tuple(view for _, view in found) for number, found in parts.items()}
    tiles = next(iter(views.values()))[0].block_size
    info = group_info(spec, vllm_group, ratio, block_size // tiles, row_tokens)
    if shared.world_size > 1 and info.keeps != "all":
        raise GeometryError(
            "context parallel ranks can share tokens only in groups that keep all tokens",
            group=vllm_group,
            keeps=info.keeps,
            dcp_size=shared.world_size,
        )
    scales = [layers[number].scales[: len(geometries)] for number in sorted(layers)]
    geometry = GroupGeometry(
        block_size=tiles,
        layers=tuple(sorted(layers)),
        parts=geometries,
        dcp_size=shared.world_size,
        dcp_rank=shared.rank,
        interleave_tokens=shared.interleave_tokens,
        scales=tuple(scales) if all(scales) else (),
        row_tokens=row_tokens,
    )
    return RegisteredGroup(
        cache=CacheGroup(geometry, views, device_name(next(iter(tensors.values())).device)),
        info=info,
        tensors=tensors,
        joined_blocks=joined,
    )


def _row_tokens(spec: Any, vllm_group: int, shared: ContextParallel) -> int:
    """Return the number of tokens that share a row. Raises GeometryError: they share it in a way that is not known."""
    row_tokens = int(spec.tokens_per_state)
    is_whole = row_tokens == spec.tokens_per_state and not spec.block_size % row_tokens
    is_known = row_tokens == 1 or (is_latent(spec) and shared.world_size == 1)
    if not (is_whole and is_known):
        raise GeometryError(
            "KVConnector transfers rows of several tokens if these are latents, in blocks of whole rows, which no"
            " context parallel ranks share",
            group=vllm_group,
            tokens_per_state=str(spec.tokens_per_state),
            block_size=spec.block_size,
            dcp_size=shared.world_size,
        )
    return row_tokens


def _kernel_blocks(num_blocks: int, vllm_group: int, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of the attention backend's blocks in one of vLLM's."""
    found = {tensor.shape[0] // num_blocks for tensor in tensors.values()}
    if len(found) > 1:
        raise GeometryError(
            "layers of one group are split into different kernel blocks", group=vllm_group
        )
    return found.pop() if found else 1


def _join(cache: LayerCache, ratio: int, shared: ContextParallel) -> LayerCache:
    """Return the layer in vLLM's blocks instead of its backend's, so that no turn of the interleave ends inside one."""
    tensor = cache.tensor
    num_blocks, num_heads, block_size, content = tensor.shape
    block, head, token, inner = tensor.stride()
    is_in_planes = is_latent(cache.spec) and bool(planes_of_pages(cache))
    if block != block_size * token or is_in_planes:
        raise GeometryError(
            "the interleave does not divide the attention backend's blocks, and these cannot be joined:"
            " choose one that"
            " does (--cp-kv-cache-interleave-size)",
            layer=cache.name,
            kernel_block_size=block_size,
            interleave_tokens=shared.interleave_tokens,
            strides=tuple(tensor.stride()),
        )
    shape = (num_blocks // ratio, num_heads, block_size * ratio, content)
    strides = (block * ratio, head, token, inner)
    joined = tensor.as_strided(shape, strides, tensor.storage_offset())
    return replace(cache, tensor=joined)


def _parts(cache: LayerCache, cut: TpSplit, block_size: int, is_state: bool) -> list[Part]:
    if not is_state:
        return attention_parts(cache, cut, block_size)
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return state_parts(cache, cut, is_dim_first=is_conv_state_dim_first())


def _common_geometry(
    parts: Mapping[int, Sequence[Part]], layers: Mapping[int, LayerCache], vllm_group: int
) -> tuple[PartGeometry, ...]:
    found = {tuple(geometry for geometry, _ in layer) for layer in parts.values()}
    if len(found) != 1:
        raise GeometryError(
            "a pipeline stage holds no layer of a cache group, or layers that differ in shape",
            group=vllm_group,
            layers=[cache.name for cache in layers.values()],
        )
    return found.pop()


def group_info(
    spec: Any, vllm_group: int, kernel_blocks: int, tile_tokens: int = 1, row_tokens: int = 1
) -> GroupInfo:
    """Return a group in vLLM's terms, with the tokens that it keeps. Raises GeometryError: the kind is unsupported."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    keeps = partial(
        GroupInfo,
        vllm_group=vllm_group,
        kernel_blocks=kernel_blocks,
        tile_tokens=tile_tokens,
        row_tokens=row_tokens,
    )
    if is_ring(spec):
        return keeps(kernel_blocks=1, keeps="state")
    if isinstance(spec, MambaSpec):
        return keeps(kernel_blocks=1, keeps="state", scratch_blocks=spec.num_speculative_blocks)
    why = REFUSED_KINDS.get(type(spec).__name__, "nobody has read what it stores and keeps")
    if type(spec) in {SlidingWindowSpec, SlidingWindowMLASpec}:
        if not spec.prefix_replay_tokens:
            return keeps(keeps="window", extent_tokens=spec.sliding_window)
        why = (
            f"{spec.prefix_replay_tokens} tokens before its window are computed again after a prefix hit: start both"
            " engines with --no-swa-bounded-replay"
        )
    if type(spec) is ChunkedLocalAttentionSpec:
        return keeps(keeps="chunk", extent_tokens=spec.attention_chunk_size)
    if type(spec) in {FullAttentionSpec, MLAAttentionSpec}:
        if not getattr(spec, "non_causal", False):
            return keeps()
        why = "tokens of a prompt see later ones, so the cache of a longer prompt does not begin with a shorter one's"
    raise GeometryError(
        "KVConnector does not transfer cache groups of this kind",
        group=vllm_group,
        kind=type(spec).__name__,
        why=why,
    )
