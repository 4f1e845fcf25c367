"""Layers that differ in heads or element type but need the same blocks: one group, one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvconnector.cache.specs.base import CacheLimits, KVCacheSpec, ceil_div
from kvconnector.errors import CacheSpecError


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One allocation of `size` bytes, and the layers that live in it."""

    size: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """The specs of several layers of one kind, by layer name. Its page is a page of every layer.

    Raises CacheSpecError: there is no layer, or the layers are not of one kind and the group's block size.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]

    def __post_init__(self) -> None:
        super().__post_init__()
        # A private copy: a caller that goes on filling its dict must not change a frozen value.
        object.__setattr__(self, "kv_cache_specs", MappingProxyType(dict(self.kv_cache_specs)))
        specs = self.kv_cache_specs.values()
        block_sizes = {spec.block_size for spec in specs}
        if not self.is_uniform_type(self.kv_cache_specs) or block_sizes != {self.block_size}:
            raise CacheSpecError(
                "the layers of one group must be of one kind, and of its block size",
                kinds=sorted({str(spec.uniform_kind) for spec in specs}),
                block_sizes=sorted(block_sizes),
                block_size=self.block_size,
            )

    @staticmethod
    def is_uniform_type(kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether one block table can serve all these layers, of which there must be some."""
        specs = list(kv_cache_specs.values())
        if any(isinstance(spec, UniformTypeKVCacheSpecs) for spec in specs):
            return False
        return len({(spec.block_size, spec.uniform_kind) for spec in specs}) == 1

    @classmethod
    def from_specs(
        cls, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> UniformTypeKVCacheSpecs | None:
        """One group for all these layers, or None when they are not uniform."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page of every layer together."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """The layers share block ids, so all hold as many pages as the one that needs most."""
        num_pages = max(
            ceil_div(spec.max_memory_usage_bytes(limits), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return num_pages * self.page_size_bytes

    def tensors(self, num_blocks: int, *, cross_layers: bool = False) -> tuple[KVCacheTensor, ...]:
        """The memory of `num_blocks` blocks: a tensor for each layer, or with `cross_layers` one for all. Raises
        CacheSpecError: the layers' pages differ, so that they cannot be an axis of one tensor.
        """
        sizes = {
            name: num_blocks * spec.page_size_bytes for name, spec in self.kv_cache_specs.items()
        }
        if not cross_layers:
            return tuple(KVCacheTensor(size, (name,)) for name, size in sizes.items())
        if len(set(self.kv_cache_specs.values())) > 1:
            raise CacheSpecError("layers of one tensor need equal specs", layer_names=list(sizes))
        return (KVCacheTensor(sum(sizes.values()), tuple(sizes)),)
