"""The cache groups of a model: layers that share block tables, what a block of them holds, how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnector.cache.dtypes import DType
from kvconnector.cache.specs import (
    CacheLimits,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvconnector.planning import KeepsAll, KeepsState, KeepsWindow, Retention
from minillm.config import EngineConfig, LayerKind, ModelConfig

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

    `spec` describes the page of an engine of one rank. A state's block is the whole request: it holds any number of
    tokens, and to the connector it is one token.
    """

    kind: LayerKind
    layers: tuple[int, ...]
    spec: KVCacheSpec

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.spec.block_size

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all that there are."""
        return self.spec.sliding_window if isinstance(self.spec, SlidingWindowSpec) else None

    @property
    def transfer_block_size(self) -> int:
        """Tokens of one block as the connector counts them."""
        return 1 if self.kind == "state" else self.block_size

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


def layer_groups(model: ModelConfig, block_size: int) -> tuple[LayerGroup, ...]:
    """The model's cache groups, in the order of `KIND_ORDER`."""
    kinds = model.layer_kinds
    return tuple(
        LayerGroup(
            kind=kind,
            layers=tuple(layer for layer, own in enumerate(kinds) if own == kind),
            spec=_spec(model, kind, block_size),
        )
        for kind in KIND_ORDER
        if kind in kinds
    )


def _spec(model: ModelConfig, kind: LayerKind, block_size: int) -> KVCacheSpec:
    if kind == "state":
        return MambaSpec(
            block_size=model.max_model_len,
            shapes=tuple((model.num_heads, width) for width in state_widths(model).values()),
            dtypes=(FLOAT32,) * len(state_widths(model)),
        )
    if kind == "window":
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=model.cache_heads,
            head_size=model.cache_dim,
            dtype=FLOAT32,
            sliding_window=model.mixer.sliding_window,
        )
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=model.cache_heads,
        head_size=model.cache_dim,
        dtype=FLOAT32,
        use_mla=model.architecture == "mla",
    )


def pool_sizes(config: EngineConfig) -> tuple[PoolSizes, ...]:
    """How many blocks each group of an engine has.

    Groups that need a bounded number of blocks per request have enough for twice the running requests: finished ones
    are held until their consumer has read them.
    """
    model, cache = config.model, config.cache
    full_blocks = cache.resolved_num_blocks(model.max_model_len)
    limits = CacheLimits(max_model_len=model.max_model_len, max_num_batched_tokens=1)
    sizes = []
    for group in layer_groups(model, cache.block_size):
        num_blocks = full_blocks
        if group.kind != "full":
            # a state that is held for a consumer is a copy, beside the one that runs on
            per_request = (
                1 + group.spec.max_memory_usage_bytes(limits) // group.spec.page_size_bytes
            )
            num_blocks = 2 * config.max_running * per_request
        if group.kind == "window":
            num_blocks = min(num_blocks, full_blocks)
        host = cache.resolved_num_host_blocks(full_blocks)
        sizes.append(PoolSizes(num_blocks=num_blocks, num_host_blocks=min(host, num_blocks)))
    return tuple(sizes)
