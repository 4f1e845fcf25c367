"""The cache groups of a model: layers that share block tables, what a block of them holds, how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnector.cache.dtypes import DType
from kvconnector.cache.specs import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvconnector.planning import KeepsAll, KeepsState, KeepsWindow, Retention
from minillm.config import CacheConfig, EngineConfig, LayerKind, ModelConfig

KIND_ORDER: tuple[LayerKind, ...] = ("full", "window", "state")
FLOAT32 = DType.of("float32")


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


def state_widths(model: ModelConfig) -> dict[str, int]:
    """Elements of the parts of a state, per head: the convolution's last inputs and the recurrent state."""
    return {
        "conv": (model.mixer.conv_width - 1) * model.head_dim,
        "ssm": model.mixer.state_dim * model.head_dim,
    }


def layer_groups(
    model: ModelConfig, cache: CacheConfig, dcp_size: int = 1
) -> tuple[LayerGroup, ...]:
    """The model's cache groups, in the order of `KIND_ORDER`, on ranks of which `dcp_size` share the tokens."""
    kinds = model.layer_kinds
    return tuple(
        LayerGroup(
            kind=kind,
            layers=tuple(layer for layer, own in enumerate(kinds) if own == kind),
            spec=_spec(model, kind, cache),
            dcp_size=dcp_size,
        )
        for kind in KIND_ORDER
        if kind in kinds
    )


def _spec(model: ModelConfig, kind: LayerKind, cache: CacheConfig) -> KVCacheSpec:
    if kind == "state":
        return MambaSpec(
            block_size=cache.state_block_size,
            shapes=tuple((model.num_heads, width) for width in state_widths(model).values()),
            dtypes=(FLOAT32,) * len(state_widths(model)),
        )
    if kind == "window":
        return SlidingWindowSpec(
            block_size=cache.block_size,
            num_kv_heads=model.cache_heads,
            head_size=model.cache_dim,
            dtype=FLOAT32,
            sliding_window=model.mixer.sliding_window,
        )
    return FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.cache_heads,
        head_size=model.cache_dim,
        dtype=FLOAT32,
        use_mla=model.architecture == "mla",
    )


def pool_sizes(config: EngineConfig) -> tuple[PoolSizes, ...]:
    """How many blocks each group of an engine has.

    Layers that keep a window hold as many blocks as others while a long prompt is computed, and cache with them
    afterwards. Of states, twice the running requests have two blocks each, since finished ones are held until their
    consumer has read them; one step of states that can be found again comes on top.
    """
    cache, dcp_size = config.cache, config.parallel.dcp_size
    full_blocks = cache.resolved_num_blocks(config.model.max_model_len, dcp_size)
    sizes = []
    for group in layer_groups(config.model, cache, dcp_size):
        num_blocks = full_blocks
        if group.kind == "state":
            step_blocks = -(-config.max_batched_tokens // group.block_size)
            num_blocks = 4 * config.max_running + step_blocks
        host = cache.resolved_num_host_blocks(full_blocks)
        sizes.append(PoolSizes(num_blocks=num_blocks, num_host_blocks=min(host, num_blocks)))
    return tuple(sizes)
