"""Groups of layers that share block ids, and the pool of blocks that the groups share.

A *pool* is a range of block ids with their memory. Each id belongs to one group at a time, so layers of different
groups may use the same memory: the first layers of all groups share a tensor, the second layers another, and so on.
Most pools have one group. An engine that keeps a pool for each group has a `KVCacheConfig` for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product, zip_longest
from types import MappingProxyType

from kvconnector.cache.specs.spec import CacheLimits, KVCacheSpec, ceil_div
from kvconnector.errors import CacheSpecError, require_at_least


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Specs by layer name, of layers that share a block table but may differ in heads or element type.

    A page of the group is one page of each layer.

    Raises:
        CacheSpecError: there is no layer, the layers differ in kind, or they have another block size than the group.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec] = field(hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # a copy, so that a caller who changes its dict later does not change a frozen value
        object.__setattr__(self, "kv_cache_specs", MappingProxyType(dict(self.kv_cache_specs)))
        specs = self.kv_cache_specs.values()
        block_sizes = {spec.block_size for spec in specs}
        if not self.is_uniform_type(self.kv_cache_specs) or block_sizes != {self.block_size}:
            raise CacheSpecError(
                "the layers of a group must have one kind, and the group's block size",
                kinds=sorted({str(spec.uniform_kind) for spec in specs}),
                block_sizes=sorted(block_sizes),
                block_size=self.block_size,
            )

    def __reduce__(self) -> tuple[object, ...]:
        # Engines copy configs to their workers, and a read-only view of a dict cannot be copied as such.
        return (UniformTypeKVCacheSpecs.from_specs, (dict(self.kv_cache_specs),))

    @staticmethod
    def is_uniform_type(kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Return True if there are layers, and one block table can serve all of them."""
        specs = list(kv_cache_specs.values())
        if any(isinstance(spec, UniformTypeKVCacheSpecs) for spec in specs):
            return False
        return len({(spec.block_size, spec.uniform_kind) for spec in specs}) == 1

    @classmethod
    def from_specs(
        cls, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> UniformTypeKVCacheSpecs | None:
        """Return one group for all these layers, or None if they are not uniform."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    @property
    def is_cached(self) -> bool:
        return any(spec.is_cached for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Return the bytes of as many pages as the neediest layer has, because the layers share block ids."""
        num_pages = max(
            ceil_div(spec.max_memory_usage_bytes(limits), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return num_pages * self.page_size_bytes


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table, so that a block id stands for the same tokens in all of them.

    `spec` is every layer's, or a `UniformTypeKVCacheSpecs` with a spec for each.

    Raises:
        CacheSpecError: there is no layer, or the layers are not those of the `UniformTypeKVCacheSpecs`.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    def __post_init__(self) -> None:
        if not self.layer_names or set(self.layer_names) != set(self.layer_specs):
            raise CacheSpecError(
                "a group needs layers, the same as its spec has",
                layer_names=self.layer_names,
                layers_of_spec=[*self.layer_specs],
            )

    @property
    def layer_specs(self) -> Mapping[str, KVCacheSpec]:
        """The spec of each layer, by name."""
        if isinstance(self.spec, UniformTypeKVCacheSpecs):
            return self.spec.kv_cache_specs
        return dict.fromkeys(self.layer_names, self.spec)

    def max_blocks_per_request(self, limits: CacheLimits) -> int:
        """Return the most blocks that one request can hold in this group.

        Raises:
            CacheSpecError: the layers cannot work under these limits.
        """
        return ceil_div(self.spec.max_memory_usage_bytes(limits), self.spec.page_size_bytes)


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One allocation of `size` bytes, and the layers that use it.

    Block `b` is bytes `[b x page, (b + 1) x page)`. In a block, layers of one group follow each other, and layers of
    different groups use the same bytes.
    """

    size: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """A pool of `num_blocks` block ids, its memory, and the groups that take blocks from it.

    Layers that cache nothing (`KVCacheSpec.is_cached`) may be in a group, but are in no tensor.

    Raises:
        CacheSpecError: a layer is in several groups or tensors; a cached layer is in none; or the size of a tensor is
            not `num_blocks` pages of its layers in each group.
    """

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroupSpec, ...]

    def __post_init__(self) -> None:
        require_at_least(1 if self.tensors else 0, CacheSpecError, num_blocks=self.num_blocks)
        grouped = [name for group in self.groups for name in group.layer_names]
        placed = [name for tensor in self.tensors for name in tensor.shared_by]
        cached = [
            name
            for group in self.groups
            for name, spec in group.layer_specs.items()
            if spec.is_cached
        ]
        repeated = [
            name for names in (grouped, placed) for name, n in Counter(names).items() if n > 1
        ]
        if repeated or set(cached) != set(placed):
            raise CacheSpecError(
                "every layer must be in one group, and in one tensor if it caches data",
                repeated=repeated,
                without_tensor=sorted(set(cached) - set(placed)),
                without_cache=sorted(set(placed) - set(cached)),
            )
        for tensor, group in product(self.tensors, self.groups):
            specs = group.layer_specs
            page = sum(specs[name].page_size_bytes for name in tensor.shared_by if name in specs)
            if page and tensor.size != self.num_blocks * page:
                raise CacheSpecError(
                    "a tensor must hold one page of its layers for each block",
                    tensor=tensor,
                    num_blocks=self.num_blocks,
                    page_size_bytes=page,
                )

    @classmethod
    def of(
        cls,
        kv_cache_specs: Mapping[str, KVCacheSpec],
        num_blocks: int,
        *,
        cross_layers: bool = False,
    ) -> KVCacheConfig:
        """Return a pool of `num_blocks` blocks for these layers.

        Layers of one kind form a group. With several kinds, each group has as many layers as the rarest kind (a kind's
        last group may have fewer), and the i-th layers of all groups share a tensor.

        Args:
            kv_cache_specs: Specs by layer name. Layers that cache nothing are left out.
            num_blocks: The number of block ids.
            cross_layers: True for a single tensor with all layers, which must be equal.

        Raises:
            CacheSpecError: `num_blocks` is not positive though some layer caches data; layers that would share a tensor
                have pages of different sizes; or layers differ despite `cross_layers`.
        """
        groups = tuple(_groups(kv_cache_specs))
        layers = [tuple(group.layer_names) for group in groups]
        if cross_layers and layers:
            if len(groups) > 1 or len(set(groups[0].layer_specs.values())) > 1:
                raise CacheSpecError(
                    "layers of one tensor need equal specs", layer_names=[*kv_cache_specs]
                )
            shared = [layers[0]]
        else:
            shared = [tuple(filter(None, names)) for names in zip_longest(*layers)]
        tensors = []
        for names in shared:
            pages = {name: kv_cache_specs[name].page_size_bytes for name in names}
            if len(set(pages.values())) > 1:
                raise CacheSpecError(
                    "layers that share a tensor need pages of one size: pad them, or give each group a pool",
                    page_sizes_bytes=pages,
                )
            page = sum(pages.values()) if cross_layers else pages[names[0]]
            tensors.append(KVCacheTensor(num_blocks * page, names))
        return cls(num_blocks, tuple(tensors), groups)

    @property
    def block_size_bytes(self) -> int:
        """Size of a block in bytes, over all tensors; 0 if nothing is cached."""
        return sum(tensor.size for tensor in self.tensors) // max(1, self.num_blocks)

    def max_blocks_per_request(self, limits: CacheLimits) -> int:
        """Return the most blocks that one request can hold, over all groups.

        Raises:
            CacheSpecError: a layer cannot work under these limits.
        """
        return sum(group.max_blocks_per_request(limits) for group in self.groups)


def plan_kv_cache(
    kv_cache_specs: Mapping[str, KVCacheSpec],
    limits: CacheLimits,
    available_bytes: int,
    *,
    cross_layers: bool = False,
) -> KVCacheConfig:
    """Return the largest pool that fits into `available_bytes` of one rank, as `KVCacheConfig.of` makes it.

    The ranks of an engine need equal numbers of blocks: make all pools again with the smallest number.

    Returns:
        The pool, without blocks, tensors and groups if no layer caches data.

    Raises:
        CacheSpecError: the memory does not hold one request of `limits.max_model_len` tokens, the layers cannot work
            under `limits`, or as `KVCacheConfig.of`.
    """
    if not any(spec.is_cached for spec in kv_cache_specs.values()):
        return KVCacheConfig(0, (), ())
    smallest = KVCacheConfig.of(kv_cache_specs, 1, cross_layers=cross_layers)
    num_blocks = available_bytes // smallest.block_size_bytes
    needed = max(1, smallest.max_blocks_per_request(limits))
    if num_blocks < needed:
        raise CacheSpecError(
            "the available memory cannot hold one request of full length",
            available_bytes=available_bytes,
            needed_bytes=needed * smallest.block_size_bytes,
            max_model_len=limits.max_model_len,
        )
    return KVCacheConfig.of(kv_cache_specs, num_blocks, cross_layers=cross_layers)


def _groups(kv_cache_specs: Mapping[str, KVCacheSpec]) -> Iterator[KVCacheGroupSpec]:
    kinds: dict[object, dict[str, KVCacheSpec]] = {}
    for name, spec in kv_cache_specs.items():
        if spec.is_cached:
            kinds.setdefault((spec.block_size, spec.uniform_kind), {})[name] = spec
    size = min(map(len, kinds.values()), default=0)
    for layers in kinds.values():
        remaining = iter(layers.items())
        while specs := dict(islice(remaining, size)):
            yield _group(specs)


def _group(specs: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    first, *others = specs.values()
    if any(spec != first for spec in others):
        first = UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=specs)
    return KVCacheGroupSpec(tuple(specs), first)
