"""The base of cache specs: frozen values with the size of a page, the worst case of a request, and a rule to merge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from kvconnector.errors import CacheSpecError, require_at_least

SpecT = TypeVar("SpecT", bound="KVCacheSpec")

ITEM_SIZES_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every known type, by torch's name without its prefix. So no tensor library is needed."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type of a cache.

    Raises:
        CacheSpecError: `ITEM_SIZES_BYTES` lacks the name.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in ITEM_SIZES_BYTES:
            raise CacheSpecError("unknown element type", name=self.name, known=[*ITEM_SIZES_BYTES])

    @property
    def item_size_bytes(self) -> int:
        return ITEM_SIZES_BYTES[self.name]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Limits of an engine on which, besides the cache specs, the worst case of a request's memory depends.

    Raises:
        CacheSpecError: a limit is not positive (encoder tokens may be zero).
    """

    max_model_len: int
    """The most tokens of a request, prompt and output together."""
    max_num_batched_tokens: int
    """The most tokens that a step computes, over all its requests."""
    decode_context_parallel_size: int = 1
    """The number of ranks that share a request's tokens."""
    max_num_encoder_tokens: int = 0
    """The most tokens of encoder output that the cross-attention of a request reads."""

    def __post_init__(self) -> None:
        sizes = asdict(self)
        encoder_tokens = sizes.pop("max_num_encoder_tokens")
        require_at_least(0, CacheSpecError, max_num_encoder_tokens=encoder_tokens)
        require_at_least(1, CacheSpecError, **sizes)


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """The cache of one layer. A *page* is its memory for one block of `block_size` tokens, or for their rows if several
    tokens share one.

    Raises:
        CacheSpecError: a field is out of range.
    """

    block_size: int

    def __post_init__(self) -> None:
        require_at_least(1, CacheSpecError, block_size=self.block_size)

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Size of a page in bytes."""

    @abstractmethod
    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Return the most bytes, in whole pages, that one request can need in this layer on one rank.

        Raises:
            CacheSpecError: this kind of cache cannot work under these limits.
        """

    @property
    def is_cached(self) -> bool:
        """True if the layer keeps data between steps, and so needs blocks and memory."""
        return True

    @property
    def uniform_kind(self) -> Hashable:
        """A key for sharing block tables: layers with equal keys and block sizes need the same blocks."""
        return type(self).__name__

    @classmethod
    def merge(cls, specs: Sequence[SpecT]) -> SpecT:
        """Return one spec that stands for all of `specs`.

        Raises:
            CacheSpecError: `specs` is empty, or two differ.
        """
        if not specs:
            raise CacheSpecError("there is no spec to merge")
        for spec in specs:
            if spec != specs[0]:
                raise CacheSpecError("unequal specs cannot be merged", one=specs[0], other=spec)
        return specs[0]


def merge_specs(specs: Sequence[SpecT]) -> SpecT:
    """Return one spec that stands for all of `specs`, by the rules of their type.

    Raises:
        CacheSpecError: `specs` is empty, or two cannot be merged.
    """
    return (type(specs[0]) if specs else KVCacheSpec).merge(specs)


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)
