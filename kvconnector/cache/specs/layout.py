"""From a config and base addresses to the `KVView`s that a connector registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from kvconnector.cache.specs.attention import AttentionSpec
from kvconnector.cache.specs.base import KVCacheSpec
from kvconnector.cache.specs.config import KVCacheConfig
from kvconnector.cache.specs.state import MambaSpec
from kvconnector.cache.views import KVView
from kvconnector.errors import CacheSpecError, GeometryError


class CacheLayout(StrEnum):
    """Order of the axes inside one part of a page: H heads, N tokens, D elements."""

    HND = "HND"
    NHD = "NHD"


class PartKind(StrEnum):
    """What one part of a layer's page holds."""

    KEY = "key"
    VALUE = "value"
    LATENT = "latent"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """One array of one layer's cache.

    `part_index` is its place among the arrays of the page; `group_index` names its block table.
    """

    layer_name: str
    group_index: int
    part_index: int
    kind: PartKind
    view: KVView


def layer_parts(
    config: KVCacheConfig, addresses: Sequence[int], *, layout: CacheLayout | str
) -> Iterator[LayerPart]:
    """Every part of every cached layer, tensor by tensor, with its view.

    Pages are contiguous (blocks first), so layers of different groups that share a tensor agree on
    where a block is. Within a page K precedes V, and states follow each other. A state is one head
    of one token.

    Args:
        config: the cache.
        addresses: base address of each of `config.tensors`, in their order.
        layout: order of the axes of K, V and latents; states have none.

    Raises:
        GeometryError: the layout is unknown, addresses are missing, or a part would not be aligned
            to its elements. CacheSpecError: a layer's spec is of a kind without a page layout.
    """
    if layout not in tuple(CacheLayout):
        raise GeometryError(
            "unknown cache layout", layout=layout, known=[each.value for each in CacheLayout]
        )
    if len(addresses) != len(config.tensors):
        raise GeometryError(
            "every tensor needs one base address",
            num_tensors=len(config.tensors),
            num_addresses=len(addresses),
        )
    return _parts(config, addresses, CacheLayout(layout))


def _parts(
    config: KVCacheConfig, addresses: Sequence[int], layout: CacheLayout
) -> Iterator[LayerPart]:
    for tensor, address in zip(config.tensors, addresses, strict=True):
        for name in tensor.shared_by:
            spec = config.layer_spec(name)
            for part_index, (kind, view) in enumerate(
                _page_views(spec, address, config.num_blocks, layout)
            ):
                if (view.address | view.block_stride_bytes) % view.item_size_bytes:
                    raise GeometryError(
                        "a part of a page is not aligned to its elements",
                        layer_name=name,
                        part=kind.value,
                        address=view.address,
                        block_stride_bytes=view.block_stride_bytes,
                        item_size_bytes=view.item_size_bytes,
                    )
                yield LayerPart(
                    layer_name=name,
                    group_index=config.group_index(name),
                    part_index=part_index,
                    kind=kind,
                    view=view,
                )


def _page_views(
    spec: KVCacheSpec, address: int, num_blocks: int, layout: CacheLayout
) -> Iterator[tuple[PartKind, KVView]]:
    if isinstance(spec, AttentionSpec):
        kinds = (PartKind.LATENT,) if spec.use_mla else (PartKind.KEY, PartKind.VALUE)
        part_bytes = spec.page_size_bytes // len(kinds)
        for index, kind in enumerate(kinds):
            yield kind, _attention_view(spec, address + index * part_bytes, num_blocks, layout)
    elif isinstance(spec, MambaSpec):
        offset = 0
        for shape, dtype, size in zip(
            spec.shapes, spec.dtypes, spec.state_sizes_bytes, strict=True
        ):
            item = dtype.item_size_bytes
            yield (
                PartKind.STATE,
                KVView.from_strides(
                    address + offset,
                    (num_blocks, 1, 1, prod(shape)),
                    (spec.page_size_bytes, size, size, item),
                    item,
                ),
            )
            offset += size
    else:
        raise CacheSpecError("no page layout for this kind of spec", spec=spec)


def _attention_view(
    spec: AttentionSpec, address: int, num_blocks: int, layout: CacheLayout
) -> KVView:
    item = spec.dtype.item_size_bytes
    row = spec.head_size * item
    if layout is CacheLayout.HND:
        head_stride, token_stride = spec.block_size * row, row
    else:
        head_stride, token_stride = row, spec.num_kv_heads * row
    return KVView.from_strides(
        address,
        (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size),
        (spec.page_size_bytes, head_stride, token_stride, item),
        item,
    )
