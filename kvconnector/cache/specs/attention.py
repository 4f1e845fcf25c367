"""Caches of attention layers: keys and values, or one latent (MLA), per token; of recurrent ones: a state a request."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain
from math import prod

from kvconnector.cache.dtypes import DType
from kvconnector.cache.specs.base import (
    CacheLimits,
    KVCacheSpec,
    ceil_div,
    require_at_least_one,
)
from kvconnector.errors import CacheSpecError


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Attention cache of `block_size` tokens x `num_kv_heads` x `head_size` elements per part.

    The parts are K and V, or with `use_mla` the one latent. Heads are those on one rank.
    """

    num_kv_heads: int
    head_size: int
    dtype: DType
    use_mla: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_one(num_kv_heads=self.num_kv_heads, head_size=self.head_size)
        if not isinstance(self.dtype, DType):
            raise CacheSpecError("dtype must be a DType", dtype=self.dtype)

    @property
    def num_parts(self) -> int:
        """Arrays per page: K and V, or the latent alone."""
        return 1 if self.use_mla else 2

    @property
    def page_size_bytes(self) -> int:
        """Bytes of all parts of one block."""
        elements = self.block_size * self.num_kv_heads * self.head_size
        return self.num_parts * elements * self.dtype.item_size_bytes

    def _pages_bytes(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token stays cached."""

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Pages of the longest request, or of one rank's share of its tokens."""
        tokens = ceil_div(limits.max_model_len, limits.decode_context_parallel_size)
        return self._pages_bytes(tokens)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to the last `sliding_window` tokens, itself included, and no further back."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_one(sliding_window=self.sliding_window)
        if self.use_mla:
            raise CacheSpecError(
                "a sliding window over MLA latents is not supported",
                sliding_window=self.sliding_window,
            )

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Pages of the window before a step and of the step's tokens.

        One page more, because the window may start inside a block: six tokens fill `xxxx|xx..`, two blocks of four, but
        also `...x|xxxx|x...`, three. With context parallelism a window's tokens do not stay together: CacheSpecError.
        """
        if limits.decode_context_parallel_size != 1:
            raise CacheSpecError(
                "a sliding window cannot be spread by decode context parallelism",
                decode_context_parallel_size=limits.decode_context_parallel_size,
            )
        tokens = min(self.sliding_window - 1 + limits.max_num_batched_tokens, limits.max_model_len)
        return self._pages_bytes(tokens) + self.page_size_bytes

    @property
    def uniform_kind(self) -> Hashable:
        """Layers with different windows drop blocks at different times."""
        return (super().uniform_kind, self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """State tensors of a recurrent layer, such as a convolution's window and an SSM's state.

    A page holds one request's states one behind the other, in the order of `shapes`. `block_size`
    is the number of tokens after which a state may be kept for a prefix.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise CacheSpecError(
                "a recurrent layer needs one dtype per state shape, and at least one state",
                shapes=self.shapes,
                dtypes=self.dtypes,
            )
        for size in chain(*self.shapes):
            require_at_least_one(state_size=size)
        if not all(isinstance(dtype, DType) for dtype in self.dtypes):
            raise CacheSpecError("a dtype must be a DType", dtypes=self.dtypes)

    @property
    def state_sizes_bytes(self) -> tuple[int, ...]:
        """Bytes of each state tensor."""
        states = zip(self.shapes, self.dtypes, strict=True)
        return tuple(prod(shape) * dtype.item_size_bytes for shape, dtype in states)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of all states."""
        return sum(self.state_sizes_bytes)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """One page: the state does not grow with the request."""
        return self.page_size_bytes
