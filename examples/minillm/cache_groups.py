"""The cache groups of a model: layers that share block tables, what a block of them holds, how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvconnector.cache.specs import (
    CacheLimits,
    DType,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    merge_specs,
)
from kvconnector.errors import ConfigError
from kvconnector.planning import KeepsAll, KeepsState, KeepsWindow, Retention
from minillm.config import CacheConfig, EngineConfig, LayerKind, ModelConfig
from minillm.partition import RankShare, rank_share

KIND_ORDER: tuple[LayerKind, ...] = ("full", "window", "state")
FLOAT32 = DType("float32")
DEFAULT_REQUESTS = 4
"""Requests of full length that the memory of an engine without a budget holds."""
UNLIMITED = 1 << 62
"""Blocks of a group of which a rank has no layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Blocks of one group: those that requests run in, and those in host memory."""

    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """One cache group of the whole model. `layers` are global; a pipeline stage may hold none of them.

    `spec` describes the page of an engine of one rank. Where `dcp_size` ranks share a sequence's tokens, a block id
    stands for a block on each of them. A block of states holds one: that behind its last token, or behind the last one
    computed if that is inside it. To the connector it is one token.
    """

    kind: LayerKind
    layers: tuple[int, ...]
    spec: KVCacheSpec
    dcp_size: int = 1
    kernel_block_size: int
    """Tokens of the blocks that attention reads, which divide those that are allocated."""

    @property
    def block_size(self) -> int:
        """Tokens that one block id stands for."""
        return self.spec.block_size * self.dcp_size

    @property
    def rank_block_size(self) -> int:
        """Tokens of one block on one rank."""
        return self.spec.block_size

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all that there are."""
        return self.spec.sliding_window if isinstance(self.spec, SlidingWindowSpec) else None

    @property
    def transfer_block_size(self) -> int:
        """Tokens of one block on one rank as the connector counts them."""
        return 1 if self.kind == "state" else self.rank_block_size

    @property
    def retention(self) -> Retention:
        """What the group keeps of a sequence, as the connector takes it."""
        if self.kind == "state":
            return KeepsState()
        return KeepsAll() if self.window is None else KeepsWindow(self.window)


def layer_groups(
    model: ModelConfig, cache: CacheConfig, dcp_size: int = 1
) -> tuple[LayerGroup, ...]:
    """The model's cache groups, in the order of `KIND_ORDER`, on ranks of which `dcp_size` share the tokens."""
    groups = []
    for kind in KIND_ORDER:
        layers = tuple(layer for layer, own in enumerate(model.layer_kinds) if own == kind)
        if layers:
            heads = model.num_heads if kind == "state" else model.cache_heads
            spec = merge_specs([_spec(model, kind, cache, heads) for _ in layers])
            groups.append(
                LayerGroup(
                    kind=kind,
                    layers=layers,
                    spec=spec,
                    dcp_size=dcp_size,
                    kernel_block_size=spec.block_size
                    if kind == "state"
                    else cache.kernel_block_size or spec.block_size,
                )
            )
    return tuple(groups)


def layer_name(layer: int) -> str:
    """What cache specs call a layer."""
    return f"model.layers.{layer}"


def rank_group(
    model: ModelConfig, cache: CacheConfig, group: LayerGroup, share: RankShare
) -> UniformTypeKVCacheSpecs | None:
    """What one rank caches of a group: a spec for each of its layers, with its heads. None if it has none of them.

    Raises:
        ConfigError: the layers cannot share block tables.
    """
    heads = share.state_heads if group.kind == "state" else share.kv_heads
    specs = {
        layer_name(layer): _spec(model, group.kind, cache, len(heads))
        for layer in group.layers
        if layer in share.layers
    }
    if not specs:
        return None
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    if uniform is None:
        raise ConfigError("layers of one group need the same blocks", layers=list(specs))
    return uniform


def _spec(model: ModelConfig, kind: LayerKind, cache: CacheConfig, num_heads: int) -> KVCacheSpec:
    if kind == "state":
        return MambaSpec(
            block_size=cache.state_block_size,
            shapes=tuple((num_heads, width) for width in model.state_widths.values()),
            dtypes=(FLOAT32,) * len(model.state_widths),
        )
    if kind == "window":
        return SlidingWindowSpec(
            block_size=cache.block_size,
            num_kv_heads=num_heads,
            head_size=model.cache_dim,
            dtype=FLOAT32,
            sliding_window=model.mixer.sliding_window,
        )
    return FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=num_heads,
        head_size=model.cache_dim,
        dtype=FLOAT32,
        use_mla=model.architecture == "mla",
    )


def pool_sizes(config: EngineConfig) -> tuple[PoolSizes, ...]:
    """How many blocks each group of an engine has: as configured, else what the memory of each rank holds.

    Raises:
        ConfigError: the memory does not hold one request of the model's full length.
    """
    cache, parallel = config.cache, config.parallel
    groups = layer_groups(config.model, cache, parallel.dcp_size)
    if cache.num_blocks:
        counts = [cache.num_blocks] * len(groups)
    else:
        shares = [rank_share(config.model, parallel, rank) for rank in range(parallel.world_size)]
        by_rank = [_blocks_in_memory(config, groups, share) for share in shares]
        counts = [min(found) for found in zip(*by_rank, strict=True)]
    counts = [
        _num_state_blocks(config, group) if group.kind == "state" else count
        for group, count in zip(groups, counts, strict=True)
    ]
    hosts = [cache.resolved_num_host_blocks(max(counts)) for _ in groups]
    return tuple(
        PoolSizes(num_blocks=count, num_host_blocks=min(host, count))
        for count, host in zip(counts, hosts, strict=True)
    )


def _num_state_blocks(config: EngineConfig, group: LayerGroup) -> int:
    """Twice the running requests have two states each, since finished ones are held until their consumer has read
    them; one step of states that can be found again comes on top.
    """
    return 4 * config.max_running + -(-config.max_batched_tokens // group.block_size)


def _blocks_in_memory(
    config: EngineConfig, groups: Sequence[LayerGroup], share: RankShare
) -> list[int]:
    """Blocks of each group in one rank's memory: groups get as much of it as one request of full length can need."""
    limits = CacheLimits(
        max_model_len=config.model.max_model_len,
        max_num_batched_tokens=config.max_batched_tokens,
        decode_context_parallel_size=config.parallel.dcp_size,
    )
    specs = [rank_group(config.model, config.cache, group, share) for group in groups]
    usage = [
        0 if spec is None or group.kind == "state" else spec.max_memory_usage_bytes(limits)
        for group, spec in zip(groups, specs, strict=True)
    ]
    states = sum(
        _num_state_blocks(config, group) * spec.max_memory_usage_bytes(limits)
        for group, spec in zip(groups, specs, strict=True)
        if spec is not None and group.kind == "state"
    )
    memory = config.cache.memory_mib << 20 or states + DEFAULT_REQUESTS * sum(usage)
    if memory < states + sum(usage):
        raise ConfigError(
            "the cache's memory does not hold one request of full length",
            memory_bytes=memory,
            states_bytes=states,
            request_bytes=sum(usage),
        )
    return [
        UNLIMITED
        if spec is None or not need
        else (memory - states) * need // sum(usage) // spec.page_size_bytes
        for spec, need in zip(specs, usage, strict=True)
    ]
