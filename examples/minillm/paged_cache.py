"""The paged KV cache of one rank: real strided tensors in any layout, seen as logical [B, H, N, D].

Legend: B blocks, H heads, N tokens of a block, D head dim, C latent dim, T tokens of a step, L tokens of one sequence.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvconnector.cache.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from kvconnector.errors import ConfigError
from kvconnector.layout import (
    AttentionBackend,
    FlashAttentionBackend,
    KVView,
    current_attention_backend,
    probe_layout,
)
from minillm.cache_groups import COMPRESSED_KINDS, LayerGroup, cache_name

if TYPE_CHECKING:
    from minillm.config import CacheKind, Layout
    from minillm.partition import RankShare


class PagedCache:
    """The caches of one rank's layers, in the tensors of its pools, laid out as specs and attention backends define.

    Caches have the names that specs give them. `views[name]` are the parts of one (K and V, the one latent, or the
    parts of a state as one token each) in allocated blocks, which the connector registers. `parts[name]` are the same
    memory as tensors `[B, H, N, D]`, in the blocks that attention reads. `group_of[name]` is its cache group.

    Where ranks share tokens, the blocks hold only this rank's, and `tokens_below` says which those are.

    Layouts: HND and NHD are those of attention backends; HDN is HND but with K, or the latent, stored transposed; in
    CROSS all attention layers of a pool of one group are in one tensor, block by block.

    Args:
        groups: of the whole model.
        pools: this rank's, in the order of `LayerGroup.pool`.
        pinned: in host memory that a GPU can read.
    """

    def __init__(
        self,
        share: RankShare,
        groups: Sequence[LayerGroup],
        pools: Sequence[KVCacheConfig],
        *,
        layout: Layout,
        device: str,
        pinned: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.device = device
        self.context_parallel = share.context_parallel
        self.layer_of = {name: layer for group in groups for name, layer in group.names.items()}
        self.group_of: dict[str, int] = {}
        self.views: dict[str, tuple[KVView, ...]] = {}
        self.parts: dict[str, tuple[Tensor, ...]] = {}
        self._backends = attention_backends(share, layout)
        self._is_transposed = layout == "HDN"
        index_of = {name: index for index, group in enumerate(groups) for name in group.names}
        for pool in pools:
            for tensor in pool.tensors:
                memory = _allocate(tensor.size, device, pinned)
                for group in pool.groups:
                    if names := [name for name in tensor.shared_by if name in group.layer_specs]:
                        self._place(names, index_of[names[0]], group, memory, pool.num_blocks)

    def _place(
        self,
        names: Sequence[str],
        index: int,
        group: KVCacheGroupSpec,
        memory: Tensor,
        num_blocks: int,
    ) -> None:
        """Make views of the caches of one group in a tensor."""
        spec = group.layer_specs[names[0]]
        views_of = _layer_views(spec, names, memory, num_blocks, self._backends)
        for name, views in zip(names, views_of, strict=True):
            is_transposed = self._is_transposed and isinstance(spec, AttentionSpec)
            kept = (_transposed(views[0]), *views[1:]) if is_transposed else views
            self.group_of[name] = index
            self.views[name] = kept
            self.parts[name] = tuple(
                _as_tensor(_in_blocks_of(view, self.groups[index].kernel_block_rows), memory)
                for view in kept
            )

    def names_of(self, group: int) -> tuple[str, ...]:
        """Return this rank's caches of a group, by ascending layer."""
        return tuple(name for name, own in self.group_of.items() if own == group)

    def block_ids(self, name: str, tables: Sequence[Tensor]) -> Tensor:
        """Choose a cache's block table from a sequence's tables by group."""
        return tables[self.group_of[name]]

    def write(self, name: str, values_THD: Sequence[Tensor], slots: Slots) -> None:
        """Store one `[T, H, D]` tensor per part at `slots`."""
        for part_BHND, value_THD in zip(self.parts[name], values_THD, strict=True):
            kept_THD = value_THD if slots.rows is None else value_THD[slots.rows]
            part_BHND[slots.block_ids, :, slots.offsets] = kept_THD

    def tokens_below(self, stop: int) -> Tensor:
        """Return positions below `stop` of the tokens that this rank caches, in the order of its blocks."""
        group = self.context_parallel
        turns = torch.arange(stop, device=self.device) // group.interleave_tokens
        return (turns % group.world_size == group.rank).nonzero().squeeze(1)

    def read(self, name: str, block_ids: Tensor, tokens: range) -> tuple[Tensor, ...]:
        """Copy some tokens, or rows, of a sequence's blocks: one `[H, L, D]` tensor per part."""
        block_size = self.groups[self.group_of[name]].kernel_block_rows
        used = block_ids[tokens.start // block_size : -(-tokens.stop // block_size)]
        first = tokens.start % block_size
        return tuple(
            part_BHND[used].permute(1, 0, 2, 3).flatten(1, 2)[:, first : first + len(tokens)]
            for part_BHND in self.parts[name]
        )


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of a step's tokens in one group: block and offset per cached row, int64. `rows` are cached; None: all."""

    block_ids: Tensor
    offsets: Tensor
    rows: Tensor | None = None


class HeadsFirstAttention(FlashAttentionBackend):
    """The backend of layers with K and V in the layouts HND and CROSS. NHD uses the default backend."""

    def get_kv_cache_stride_order(
        self, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        """All layers: blocks, heads, layers, K and V, tokens, so that a head slice of a block is one run."""
        return (2, 4, 0, 1, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)


class LatentPagedAttention:
    """The backend of MLA: one latent for all heads, `[B, N, C]`."""

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Blocks of tokens."""
        return (num_blocks, block_size, head_size)

    def get_kv_cache_stride_order(
        self, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        """Axes as in the shape; blocks first in the tensor of all layers."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)


def _allocate(nbytes: int, device: str, pinned: bool) -> Tensor:
    if device == "cpu" and not pinned:
        # in pages of its own: so small caches could not be shared with other engines otherwise
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def attention_backends(share: RankShare, layout: Layout) -> dict[str, AttentionBackend]:
    """Return the backends of a rank's layers; none for those with the default one."""
    backend = LatentPagedAttention() if share.is_mla else HeadsFirstAttention()
    has_default = layout == "NHD" and not share.is_mla
    kinds: tuple[CacheKind, ...] = ("full", "cross", *COMPRESSED_KINDS)
    names = [cache_name(layer, kind) for layer in share.layers for kind in kinds]
    return {} if has_default else dict.fromkeys(names, backend)


def _layer_views(
    spec: KVCacheSpec,
    names: Sequence[str],
    memory: Tensor,
    num_blocks: int,
    backends: Mapping[str, AttentionBackend],
) -> list[tuple[KVView, ...]]:
    """Return the parts of one layer, or of several that share a tensor, in the memory that their spec asks for."""
    if isinstance(spec, MambaSpec):
        return [tuple(_state_views(spec, memory.data_ptr(), num_blocks))]
    if not isinstance(spec, AttentionSpec):
        raise ConfigError("minillm has no layer with such a cache", layers=names, spec=spec)
    backend, cross_layers = current_attention_backend(backends, names[0]), len(names) > 1
    item = spec.dtype.item_size_bytes
    shape = backend.get_kv_cache_shape(
        num_blocks, spec.rows_per_page, spec.num_kv_heads, spec.head_size
    )
    if cross_layers:
        shape = (len(names), *shape)
    layout = probe_layout(backend, cross_layers=cross_layers)
    strides, stride = [0] * len(shape), item
    for axis in reversed(layout.stride_order):
        strides[axis], stride = stride, stride * shape[axis]
    if stride != memory.numel():
        raise ConfigError(
            "the backend's shape is not what the spec says", layers=names, shape=shape, spec=spec
        )
    return layout.views(memory.data_ptr(), shape, strides, item)


def _state_views(spec: MambaSpec, address: int, num_blocks: int) -> Iterator[KVView]:
    """A page holds a state's parts one after the other, each `[H, width]`: one token to the connector."""
    sizes = zip(spec.shapes, spec.dtypes, spec.state_sizes_bytes, strict=True)
    for (heads, width), dtype, size in sizes:
        row = width * dtype.item_size_bytes
        yield KVView(
            address,
            (num_blocks, heads, 1, width),
            (spec.page_size_bytes, row, row, dtype.item_size_bytes),
            dtype.item_size_bytes,
        )
        address += size


def _transposed(view: KVView) -> KVView:
    """Return the same memory with a block's and head's tokens adjacent in every dim."""
    item, tokens = view.item_size_bytes, view.block_size
    strides = (tokens * view.head_dim * item, item, tokens * item)
    return replace(view, strides_bytes=(view.strides_bytes[0], *strides))


def _in_blocks_of(view: KVView, block_size: int) -> KVView:
    """Return the same memory in smaller blocks, for a pool in which a block's consecutive tokens are evenly spaced."""
    if view.block_size <= block_size:
        return view
    num_blocks = view.num_blocks * (view.block_size // block_size)
    block_stride = view.strides_bytes[2] * block_size
    return replace(
        view,
        shape=(num_blocks, view.num_heads, block_size, view.head_dim),
        strides_bytes=(block_stride, *view.strides_bytes[1:]),
    )


def _as_tensor(view: KVView, memory: Tensor) -> Tensor:
    """Return a view of float32 elements as a tensor `[B, H, N, D]`."""
    item = view.item_size_bytes
    return memory.view(torch.float32).as_strided(
        view.shape,
        tuple(stride // item for stride in view.strides_bytes),
        (view.address - memory.data_ptr()) // item,
    )
