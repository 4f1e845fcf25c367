"""What every cache spec is: a frozen value that knows its page, its memory and how it merges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvconnector.errors import CacheSpecError


def ceil_div(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, rounded up."""
    return -(-numerator // denominator)


def require_at_least_one(**values: int) -> None:
    """Raise CacheSpecError for a value that is no positive integer, by its name."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise CacheSpecError(f"{name} must be a positive integer", **{name: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What the worst case of a request's memory depends on, beside its cache specs; all positive, or CacheSpecError."""

    max_model_len: int
    """Tokens that one request may have, prompt and output together."""
    max_num_batched_tokens: int
    """Tokens that one step may compute, over all its requests."""
    decode_context_parallel_size: int = 1
    """Ranks over which the tokens of one request are spread."""

    def __post_init__(self) -> None:
        require_at_least_one(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            decode_context_parallel_size=self.decode_context_parallel_size,
        )


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """The cache format of one layer. A *page* is its memory for one block of tokens.

    Raises CacheSpecError: a field is out of range.
    """

    block_size: int

    def __post_init__(self) -> None:
        require_at_least_one(block_size=self.block_size)

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one page."""

    @abstractmethod
    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Bytes that one request can need at most in this layer, on one rank. Raises CacheSpecError: this kind of cache
        cannot do what the limits ask for.
        """

    @property
    def uniform_kind(self) -> Hashable:
        """Layers of equal kind and block size always need the same blocks: one block table does."""
        return type(self).__name__


def merge_specs(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    """The one spec that stands for all of `specs`. Raises CacheSpecError: there is none, or two differ."""
    if not specs:
        raise CacheSpecError("there is no spec to merge")
    for spec in specs:
        if spec != specs[0]:
            raise CacheSpecError("unequal specs cannot be merged", one=specs[0], other=spec)
    return specs[0]
