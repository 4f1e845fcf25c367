"""Caches of recurrent layers: one fixed state per request instead of entries per token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod

from kvconnector.cache.dtypes import DType
from kvconnector.cache.specs.base import CacheLimits, KVCacheSpec, require_at_least_one
from kvconnector.errors import CacheSpecError


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
