"""The whole cache of one rank: its tensors, the layers in them, and who shares block ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvconnector.cache.specs.base import KVCacheSpec, require_at_least
from kvconnector.cache.specs.uniform import UniformTypeKVCacheSpecs
from kvconnector.errors import CacheSpecError


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One allocation of `size` bytes, and the layers that live in it: at most one of each group.

    Layers of different groups can share memory, because a block id is given to one group at a time.
    """

    size: int
    shared_by: tuple[str, ...]

    def __post_init__(self) -> None:
        require_at_least(1, size=self.size)
        if not self.shared_by:
            raise CacheSpecError("a tensor without a layer", size=self.size)


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table: a block id means the same tokens in all of them."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    def __post_init__(self) -> None:
        if not self.layer_names:
            raise CacheSpecError("a group without a layer", spec=self.spec)
        if isinstance(self.spec, UniformTypeKVCacheSpecs):
            known = set(self.spec.kv_cache_specs)
            if known != set(self.layer_names):
                raise CacheSpecError(
                    "the group's layers are not those of its spec",
                    without_spec=sorted(set(self.layer_names) - known),
                    without_layer=sorted(known - set(self.layer_names)),
                )

    def layer_spec(self, layer_name: str) -> KVCacheSpec:
        """The spec of one layer of this group."""
        if isinstance(self.spec, UniformTypeKVCacheSpecs):
            return self.spec.kv_cache_specs[layer_name]
        return self.spec


@dataclass(frozen=True)
class KVCacheConfig:
    """`num_blocks` blocks, shared by all groups, in the given tensors.

    Block `b` of a layer is bytes `[b x page, (b + 1) x page)` of its tensor.

    Raises:
        CacheSpecError: a layer is in no tensor or in several, in several groups, or unknown; two
            layers of one group share a tensor; or a tensor is not `num_blocks` pages of each of its
            layers.
    """

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroupSpec, ...]

    def __post_init__(self) -> None:
        require_at_least(1, num_blocks=self.num_blocks)
        _refuse_repeats("group", [name for group in self.groups for name in group.layer_names])
        placed = [name for tensor in self.tensors for name in tensor.shared_by]
        _refuse_repeats("tensor", placed)
        grouped = {name for group in self.groups for name in group.layer_names}
        if grouped != set(placed):
            raise CacheSpecError(
                "the layers of the tensors are not those of the groups",
                without_tensor=sorted(grouped - set(placed)),
                without_group=sorted(set(placed) - grouped),
            )
        for tensor in self.tensors:
            self._check_tensor(tensor)

    def _check_tensor(self, tensor: KVCacheTensor) -> None:
        group_indices = [self.group_index(name) for name in tensor.shared_by]
        if len(set(group_indices)) < len(group_indices):
            raise CacheSpecError(
                "layers of one group cannot share a tensor: they use the same blocks",
                shared_by=tensor.shared_by,
                groups=group_indices,
            )
        for name in tensor.shared_by:
            page_size_bytes = self.layer_spec(name).page_size_bytes
            if tensor.size != self.num_blocks * page_size_bytes:
                raise CacheSpecError(
                    "the tensor's size is not its number of blocks times the layer's page",
                    layer_name=name,
                    size=tensor.size,
                    num_blocks=self.num_blocks,
                    page_size_bytes=page_size_bytes,
                )

    @cached_property
    def _group_of_layer(self) -> Mapping[str, int]:
        return {
            name: index for index, group in enumerate(self.groups) for name in group.layer_names
        }

    def group_index(self, layer_name: str) -> int:
        """Which group a layer is in.

        Raises:
            CacheSpecError: the layer is in none.
        """
        index = self._group_of_layer.get(layer_name)
        if index is None:
            raise CacheSpecError("no group has this layer", layer_name=layer_name)
        return index

    def layer_spec(self, layer_name: str) -> KVCacheSpec:
        """The spec of one layer.

        Raises:
            CacheSpecError: the layer is in no group.
        """
        return self.groups[self.group_index(layer_name)].layer_spec(layer_name)


def _refuse_repeats(place: str, layer_names: Sequence[str]) -> None:
    repeated = sorted(name for name, count in Counter(layer_names).items() if count > 1)
    if repeated:
        raise CacheSpecError(f"a layer is in more than one {place}", layer_names=repeated)


def _tensor_layers(groups: Sequence[KVCacheGroupSpec]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Page size and layers of every tensor: the i-th layers of all groups share the i-th one."""
    for index in range(max((len(group.layer_names) for group in groups), default=0)):
        sharing = [group for group in groups if index < len(group.layer_names)]
        names = tuple(group.layer_names[index] for group in sharing)
        pages = [
            group.layer_spec(name).page_size_bytes
            for group, name in zip(sharing, names, strict=True)
        ]
        if len(set(pages)) > 1:
            raise CacheSpecError(
                "layers that share a tensor must have pages of one size",
                layer_names=names,
                page_sizes_bytes=pages,
            )
        yield pages[0], names


def lay_out_tensors(groups: Sequence[KVCacheGroupSpec], num_blocks: int) -> KVCacheConfig:
    """A config of `num_blocks` blocks in which the i-th layers of all groups share a tensor.

    Raises:
        CacheSpecError: layers that would share a tensor have pages of different sizes, or the
            groups overlap.
    """
    tensors = tuple(
        KVCacheTensor(num_blocks * page_size_bytes, names)
        for page_size_bytes, names in _tensor_layers(groups)
    )
    return KVCacheConfig(num_blocks, tensors, tuple(groups))


def max_num_blocks(groups: Sequence[KVCacheGroupSpec], available_bytes: int) -> int:
    """How many blocks `lay_out_tensors` can place in `available_bytes`; 0 without a group.

    Raises:
        CacheSpecError: as `lay_out_tensors`, or the memory is negative.
    """
    require_at_least(0, available_bytes=available_bytes)
    block_bytes = sum(page_size_bytes for page_size_bytes, _ in _tensor_layers(groups))
    return available_bytes // block_bytes if block_bytes else 0
