"""The cache groups of a model: layers that share block tables, what a block holds, and the pools they draw from.

A pool is a range of block ids with the memory behind it, which its `KVCacheConfig` describes. Every group has a pool of
its own, except cross-attention: it takes blocks from the decoder's pool, and each id serves one of the two at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from msgspec.structs import replace

from kvconnector.cache.specs import (
    AttentionSpec,
    CacheLimits,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DType,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    merge_specs,
    plan_kv_cache,
)
from kvconnector.errors import ConfigError
from kvconnector.planning import (
    KeepsAll,
    KeepsChunk,
    KeepsEncoder,
    KeepsState,
    KeepsWindow,
    Retention,
)
from minillm.config import (
    CacheConfig,
    CacheKind,
    CompressedKind,
    EngineConfig,
    LayerKind,
    ModelConfig,
)
from minillm.partition import RankShare, rank_share

CACHED_KINDS: dict[LayerKind, tuple[CacheKind, ...]] = {
    "full": ("full",),
    "window": ("window",),
    "chunk": ("chunk",),
    "state": ("state",),
    "encoder": (),
    "decoder": ("full", "cross"),
    "fine": ("fine_rows", "fine_index", "latents", "fine_compressor"),
    "coarse": ("coarse_rows", "latents", "coarse_compressor"),
}
"""The cache groups that a layer of each kind is in."""
COMPRESSED_KINDS: tuple[CompressedKind, ...] = get_args(CompressedKind)
"""Latents for several tokens each and their index keys, a window of latents, and what compressors keep of tokens."""
KIND_ORDER: tuple[CacheKind, ...] = (
    *("full", "window", "chunk", "state", "cross"),
    *COMPRESSED_KINDS,
)
FLOAT32 = DType("float32")
DEFAULT_REQUESTS = 4
"""Requests of full length that fit into the memory of an engine without a budget."""
UNLIMITED = 1 << 62
"""Number of blocks of a pool none of whose layers is on the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Number of blocks of one pool, on the device and in host memory."""

    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """One cache group of the whole model. `layers` are global; a pipeline stage may hold none of them.

    `spec` describes the page of an engine with one rank. Where `dcp_size` ranks share a sequence's tokens, a block id
    stands for a block on each of them. A block of states holds one state: the one after its last token, or after the
    last computed token if that is inside it. To the connector it is one token.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    spec: KVCacheSpec
    pool: int
    dcp_size: int = 1
    kernel_block_size: int
    """Tokens in a block as attention reads it, a divisor of those in an allocated block."""
    row_tokens: int = 1
    """Tokens that share a row. Attention and the connector count rows, block tables and the block manager tokens."""

    @property
    def names(self) -> dict[str, int]:
        """Names of its layers' caches in specs, mapped to the layers."""
        return {cache_name(layer, self.kind): layer for layer in self.layers}

    @property
    def block_size(self) -> int:
        """Tokens that one block id stands for."""
        return self.spec.block_size * self.dcp_size

    @property
    def rank_block_size(self) -> int:
        """Tokens of one block on one rank."""
        return self.spec.block_size

    @property
    def transfer_block_size(self) -> int:
        """Tokens in one block on one rank, as the connector counts them."""
        return 1 if self.kind == "state" else self.rank_block_size // self.row_tokens

    @property
    def kernel_block_rows(self) -> int:
        """Rows of a block as attention reads it."""
        return self.kernel_block_size // self.row_tokens

    @property
    def retention(self) -> Retention:
        """The part of a sequence that the group keeps, in the connector's terms."""
        match self.spec:
            case SlidingWindowSpec(sliding_window=window):
                return KeepsWindow(window)
            case ChunkedLocalAttentionSpec(attention_chunk_size=chunk):
                return KeepsChunk(chunk)
            case MambaSpec():
                return KeepsState()
            case CrossAttentionSpec():
                return KeepsEncoder()
        return KeepsAll(self.row_tokens)


def layer_groups(
    model: ModelConfig, cache: CacheConfig, dcp_size: int = 1
) -> tuple[LayerGroup, ...]:
    """Return the model's cache groups, in the order of `KIND_ORDER`, on ranks of which `dcp_size` share the tokens."""
    groups: list[LayerGroup] = []
    for kind in KIND_ORDER:
        layers = tuple(
            layer for layer, own in enumerate(model.layer_kinds) if kind in CACHED_KINDS[own]
        )
        if layers:
            heads = model.num_heads if kind == "state" else model.cache_heads
            spec = merge_specs([_spec(model, kind, cache, heads) for _ in layers])
            row_tokens = model.row_tokens(kind)
            groups.append(
                LayerGroup(
                    kind=kind,
                    layers=layers,
                    spec=spec,
                    pool=0 if kind == "cross" else len(groups),
                    dcp_size=dcp_size,
                    kernel_block_size=spec.block_size
                    if kind == "state"
                    else cache.kernel_block_size * row_tokens or spec.block_size,
                    row_tokens=row_tokens,
                )
            )
    return tuple(groups)


def cache_name(layer: int, kind: CacheKind) -> str:
    """Return the name of a layer's cache in specs."""
    parts: dict[CacheKind, str] = {"state": "mixer", "cross": "cross_attn"}
    own = kind if kind in COMPRESSED_KINDS else "self_attn"
    return f"model.layers.{layer}.{parts.get(kind, own)}"


def rank_specs(config: EngineConfig, share: RankShare, pool: int) -> dict[str, KVCacheSpec]:
    """Return the specs of a pool's layers on one rank. Layers that cache nothing are in the first pool."""
    model, cache = config.model, config.cache
    found: dict[str, KVCacheSpec] = {}
    for group in layer_groups(model, cache, config.parallel.dcp_size):
        heads = share.state_heads if group.kind == "state" else share.kv_heads
        if group.pool == pool:
            spec = _spec(model, group.kind, cache, len(heads))
            found |= {name: spec for name, layer in group.names.items() if layer in share.layers}
    if pool == 0:
        spec = EncoderOnlyAttentionSpec(**_attention(model, cache, len(share.kv_heads)))
        encoder = [layer for layer in share.layers if model.layer_kinds[layer] == "encoder"]
        found |= {cache_name(layer, "full"): spec for layer in encoder}
    return found


def uniform_specs(
    config: EngineConfig, share: RankShare, pool: int
) -> Iterator[UniformTypeKVCacheSpecs]:
    """Return the specs of a pool's layers on one rank, merged by kind.

    Raises:
        ConfigError: layers of one kind cannot share block tables.
    """
    kinds: dict[object, dict[str, KVCacheSpec]] = {}
    for name, spec in rank_specs(config, share, pool).items():
        kinds.setdefault(type(spec), {})[name] = spec
    for specs in kinds.values():
        uniform = UniformTypeKVCacheSpecs.from_specs(specs)
        if uniform is None:
            raise ConfigError("layers of one kind need the same blocks", layers=list(specs))
        yield uniform


def rank_pool(config: EngineConfig, share: RankShare, pool: int, num_blocks: int) -> KVCacheConfig:
    """Return a pool's groups and tensors on one rank. Layers of two groups share tensors; a group in the layout CROSS
    has a single tensor.
    """
    specs = rank_specs(config, share, pool)
    kinds = {spec.uniform_kind for spec in specs.values() if spec.is_cached}
    is_attention = all(isinstance(spec, AttentionSpec) for spec in specs.values())
    cross_layers = config.resolved_layout == "CROSS" and len(kinds) == 1 and is_attention
    return KVCacheConfig.of(specs, num_blocks, cross_layers=cross_layers)


def _attention(model: ModelConfig, cache: CacheConfig, num_heads: int) -> dict[str, Any]:
    return {
        "block_size": cache.block_size,
        "num_kv_heads": num_heads,
        "head_size": model.cache_dim,
        "dtype": FLOAT32,
    }


def _spec(model: ModelConfig, kind: CacheKind, cache: CacheConfig, num_heads: int) -> KVCacheSpec:
    if kind in COMPRESSED_KINDS:
        return _compressed_spec(model, kind, cache)
    attention = _attention(model, cache, num_heads)
    match kind:
        case "state":
            return MambaSpec(
                block_size=cache.state_block_size,
                shapes=tuple((num_heads, width) for width in model.state_widths.values()),
                dtypes=(FLOAT32,) * len(model.state_widths),
            )
        case "window":
            return SlidingWindowSpec(**attention, sliding_window=model.mixer.sliding_window)
        case "chunk":
            chunk = model.mixer.attention_chunk
            return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=chunk)
        case "cross":
            return CrossAttentionSpec(**attention)
    return FullAttentionSpec(**attention, use_mla=model.architecture == "mla")


def _compressed_spec(model: ModelConfig, kind: CompressedKind, cache: CacheConfig) -> KVCacheSpec:
    """Return the spec of one latent for all heads. A block has as many rows as others have tokens."""
    m, mixer = model.row_tokens(kind), model.mixer
    sizes: dict[str, Any] = {
        "block_size": cache.block_size * m,
        "num_kv_heads": 1,
        "head_size": model.compressed_width(kind),
        "dtype": FLOAT32,
        "use_mla": True,
    }
    match kind:
        case "latents":
            return SlidingWindowSpec(**sizes, sliding_window=mixer.sliding_window)
        case "fine_compressor":
            # the next row needs the tokens of two rows
            return SlidingWindowSpec(**sizes, sliding_window=2 * mixer.fine_tokens)
        case "coarse_compressor":
            return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=mixer.coarse_tokens)
    return FullAttentionSpec(**sizes, row_tokens=m)


def cache_limits(config: EngineConfig) -> CacheLimits:
    """Limits that decide the most memory that a request can need."""
    model = config.model
    return CacheLimits(
        max_model_len=model.max_model_len,
        max_num_batched_tokens=config.max_batched_tokens,
        decode_context_parallel_size=config.parallel.dcp_size,
        max_num_encoder_tokens=model.mixer.max_encoder_len if model.is_encoder_decoder else 0,
    )


def host_config(config: EngineConfig) -> EngineConfig:
    """Return `config` with the block size and layout of the caches in host memory."""
    cache = replace(
        config.cache,
        layout=config.cache.host_layout or config.cache.layout,
        block_size=config.cache.resolved_host_block_size,
        kernel_block_size=0,
    )
    return replace(config, cache=cache)


def num_stored_host_blocks(config: EngineConfig, sizes: Sequence[PoolSizes]) -> list[int]:
    """Number of blocks in host memory by pool: several per block id if they are smaller than on the device. Blocks of
    states have one size.
    """
    cache, groups = config.cache, layer_groups(config.model, config.cache)
    states = {group.pool for group in groups if group.kind == "state"}
    ratio = cache.block_size // cache.resolved_host_block_size
    return [
        size.num_host_blocks * (1 if pool in states else ratio) for pool, size in enumerate(sizes)
    ]


def pool_sizes(config: EngineConfig) -> tuple[PoolSizes, ...]:
    """Number of blocks of each pool of an engine: as configured, else as many as fit into each rank's memory budget.

    Raises:
        CacheSpecError: the budget does not hold one request of the model's full length.
    """
    cache, parallel = config.cache, config.parallel
    groups = layer_groups(config.model, cache, parallel.dcp_size)
    states = {
        group.pool: _num_state_blocks(config, group) for group in groups if group.kind == "state"
    }
    num_pools = 1 + max(group.pool for group in groups)
    if cache.num_blocks:
        counts = [states.get(pool, cache.num_blocks) for pool in range(num_pools)]
    else:
        shares = [rank_share(config.model, parallel, rank) for rank in range(parallel.world_size)]
        by_rank = [_blocks_in_memory(config, share, num_pools, states) for share in shares]
        counts = [min(found) for found in zip(*by_rank, strict=True)]
    host = cache.resolved_num_host_blocks(max(counts))
    return tuple(PoolSizes(num_blocks=count, num_host_blocks=min(host, count)) for count in counts)


def _num_state_blocks(config: EngineConfig, group: LayerGroup) -> int:
    """Room for two states each of twice the running requests, since finished ones are held until their consumer has
    read them, plus one step's states for prefixes.
    """
    return 4 * config.max_running + -(-config.max_batched_tokens // group.block_size)


def _blocks_in_memory(
    config: EngineConfig, share: RankShare, num_pools: int, states: Mapping[int, int]
) -> list[int]:
    """Number of blocks of each pool in one rank's memory. Pools in `states` have a given number; the others share the
    rest in proportion to what one request of full length can need there.
    """
    limits = cache_limits(config)
    needs = [
        sum(kind.max_memory_usage_bytes(limits) for kind in uniform_specs(config, share, pool))
        * states.get(pool, 1)
        for pool in range(num_pools)
    ]
    fixed = sum(needs[index] for index in states)
    growing = sum(needs) - fixed
    memory = config.cache.memory_mib << 20 or fixed + DEFAULT_REQUESTS * growing
    counts = []
    for index, need in enumerate(needs):
        if index in states or not need:
            counts.append(states.get(index, UNLIMITED))
            continue
        available = max(0, memory - fixed) * need // growing
        specs = rank_specs(config, share, index)
        counts.append(plan_kv_cache(specs, limits, available).num_blocks)
    return counts
