"""Caches of attention layers: keys and values per token, or one latent per token (MLA)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TypeVar

from kvconnector.cache.dtypes import DType
from kvconnector.cache.specs.base import (
    CacheLimits,
    KVCacheSpec,
    ceil_div,
    difference,
    require_at_least,
)
from kvconnector.errors import CacheSpecError

FullT = TypeVar("FullT", bound="FullAttentionSpec")


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
        require_at_least(1, num_kv_heads=self.num_kv_heads, head_size=self.head_size)
        if not isinstance(self.dtype, DType):
            raise CacheSpecError("dtype must be a DType: DType.of converts", dtype=self.dtype)

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
    """Every token stays cached.

    `sliding_window` and `attention_chunk_size` are kept when a layer of that kind is treated as
    full, so that its attention can still mask; they save no memory. A layer has at most one of the
    two.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(
            1,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise CacheSpecError(
                "a layer has a sliding window or attention chunks, not both",
                sliding_window=self.sliding_window,
                attention_chunk_size=self.attention_chunk_size,
            )

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Pages of the longest request, or of one rank's share of its tokens."""
        tokens = ceil_div(limits.max_model_len, limits.decode_context_parallel_size)
        return self._pages_bytes(tokens)

    @property
    def uniform_kind(self) -> Hashable:
        """Windows and chunks that are treated as full need as many blocks as full attention."""
        return FullAttentionSpec.__name__

    @classmethod
    def merge(cls: type[FullT], specs: Sequence[FullT]) -> FullT:
        """All fields must agree, but a window or chunk size of some layers is taken over by all.

        Raises:
            CacheSpecError: two windows, two chunk sizes, a window beside a chunk size, or another
                field differ.
        """
        first = cls.first_of_own_type(specs)
        window = _one_value("sliding_window", [spec.sliding_window for spec in specs])
        chunk = _one_value("attention_chunk_size", [spec.attention_chunk_size for spec in specs])
        merged = replace(first, sliding_window=window, attention_chunk_size=chunk)
        for spec in specs:
            completed = replace(spec, sliding_window=window, attention_chunk_size=chunk)
            if completed != merged:
                raise CacheSpecError(
                    "unequal specs cannot be merged", **difference(merged, completed)
                )
        return merged


def _one_value(name: str, values: Sequence[int | None]) -> int | None:
    """The value that is set, if any is; two different ones are refused."""
    found = sorted({value for value in values if value is not None})
    if len(found) > 1:
        raise CacheSpecError(f"layers with different {name} cannot be merged", **{name: found})
    return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token attends within its chunk of `attention_chunk_size` tokens, and no further back."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, attention_chunk_size=self.attention_chunk_size)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Pages of one chunk and of the tokens that one step adds before it is dropped.

        A chunk that is no multiple of the block may start inside a block, at most at the last
        multiple of their common divisor; the tokens before it in that block count too.
        """
        first_offset = self.block_size - gcd(self.block_size, self.attention_chunk_size)
        tokens = first_offset + self.attention_chunk_size + limits.max_num_batched_tokens
        return self._pages_bytes(min(tokens, limits.max_model_len))

    @property
    def uniform_kind(self) -> Hashable:
        """Layers with different chunks drop blocks at different times."""
        return (super().uniform_kind, self.attention_chunk_size)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to the last `sliding_window` tokens, itself included, and no further back."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, sliding_window=self.sliding_window)
        if self.use_mla:
            raise CacheSpecError(
                "a sliding window over MLA latents is not supported",
                sliding_window=self.sliding_window,
            )

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Pages of the window before a step and of the step's tokens.

        One page more, because the window may start inside a block: six tokens fill `xxxx|xx..`, two
        blocks of four, but also `...x|xxxx|x...`, three.

        Raises:
            CacheSpecError: with context parallelism a window's tokens do not stay together.
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
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention over tokens that are all computed in one step: nothing is cached between steps."""

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Nothing."""
        return 0


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of the encoder's output, written once per request."""

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Pages of the longest encoder output."""
        return self._pages_bytes(limits.max_num_encoder_tokens)
