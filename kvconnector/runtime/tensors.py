"""Torch tensors as `KVView`s and cache groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvconnector.datapath.pools import CacheGroup
from kvconnector.errors import GeometryError, require_counts
from kvconnector.layout import NO_CONTEXT_PARALLEL, ContextParallel, KVView
from kvconnector.topology import GroupGeometry, PartGeometry
from kvconnector.topology.geometry import ELEMENTS, ROUNDINGS

if TYPE_CHECKING:
    import torch


def view_of(cache_BHND: torch.Tensor) -> KVView:
    """Return a tensor as a view, without a copy.

    Args:
        cache_BHND: The cache, shape `[num_blocks, num_heads, block_size, head_dim]`, any dtype, device and strides.
            Permute or slice the engine's tensor into that shape first. The caller keeps its memory alive.

    Returns:
        Address, shape, strides and element size in bytes.

    Raises:
        GeometryError: the tensor does not have four axes, or its strides make elements overlap.
    """
    _check_tensor(cache_BHND)
    if cache_BHND.dim() != 4:
        raise GeometryError(
            "a cache view must have four axes: block, head, token, dim",
            shape=tuple(cache_BHND.shape),
        )
    item = cache_BHND.element_size()
    return KVView(
        cache_BHND.data_ptr(),
        tuple(cache_BHND.shape),
        tuple(stride * item for stride in cache_BHND.stride()),
        item,
    )


def cache_groups(
    caches: Mapping[int, Sequence[torch.Tensor]] | Sequence[CacheGroup],
    *,
    total_heads: int,
    head_start: int,
) -> list[CacheGroup]:
    """Return the cache groups given to `Worker.register`, or the one group made from the tensors given to it.

    Raises:
        GeometryError: `caches` has neither tensors by layer nor cache groups, or the tensors do not make a group.
    """
    if isinstance(caches, Mapping):
        return [cache_group(caches, total_heads=total_heads, head_start=head_start)]
    groups = list(caches) if isinstance(caches, Sequence) else [caches]
    if not groups or not all(isinstance(group, CacheGroup) for group in groups):
        raise GeometryError(
            "caches must be tensors by layer, as in {0: (k, v)}, or a list of cache groups",
            got=type(caches).__name__,
            of=sorted({type(group).__name__ for group in groups}),
        )
    return groups


PART_NAMES = {1: ("kv",), 2: ("k", "v")}
"""The default names of a layer's parts, by the number of its tensors."""


def cache_group(
    caches: Mapping[int, Sequence[torch.Tensor]],
    *,
    total_heads: int = 0,
    head_start: int = 0,
    context_parallel: ContextParallel = NO_CONTEXT_PARALLEL,
    row_tokens: int = 1,
    scales: Mapping[int, Sequence[Sequence[float]]] | None = None,
    rounding: str = "nearest",
    part_names: Sequence[str] = (),
) -> CacheGroup:
    """Make a cache group of this rank from its tensors.

    Args:
        caches: The tensors of each layer by its number, which is the same in all engines: K and V, one tensor with both
            or with a latent, or as many as `part_names` names. Each is seen as
            `[num_blocks, num_heads, block_size, head_dim]`, with any strides.
        total_heads: KV heads of the model; 0 if this rank holds all.
        head_start: The first of the heads that this rank holds.
        context_parallel: Which tokens this rank holds.
        row_tokens: Tokens that share a row of a compressed cache. The tensors' `block_size` and the interleave of
            `context_parallel` then count rows.
        scales: For a cache in fp8, the scales of each layer's parts, `scales[layer][part]`: one scale, or one for each
            head of this rank. Without them values are not converted for engines that have another type.
        rounding: The rule by which the engine stores fp8, one of `topology.ROUNDINGS`; docs/conversion.md describes
            them.
        part_names: What each tensor of a layer holds. All engines must use the same names: vLLM and SGLang call an MLA
            cache "latent". By default "k" and "v", or "kv" for one tensor.

    Returns:
        The group, for `Worker.register`.

    Raises:
        GeometryError: there is no layer, tensors are not alike or do not have four axes, the numbers of tensors and
            names differ, heads are beyond `total_heads`, the rule is unknown, or a layer, a part or a head has no
            scale.
    """
    require_counts(
        GeometryError, total_heads=total_heads, head_start=head_start, row_tokens=row_tokens
    )
    if not isinstance(context_parallel, ContextParallel):
        raise GeometryError(
            "context_parallel must be a ContextParallel", got=type(context_parallel).__name__
        )
    if rounding not in ROUNDINGS:
        raise GeometryError("unknown rounding rule for fp8", rounding=rounding, known=ROUNDINGS)
    for layer, tensors in caches.items():
        _check_layer(layer, tensors)
    layers = tuple(sorted(caches))
    shown = {
        tuple((*tensor.shape[1:], tensor.dtype, str(tensor.device)) for tensor in tensors)
        for tensors in caches.values()
    }
    if len(shown) != 1:
        raise GeometryError(
            "a cache group needs at least one layer, and the tensors of all layers must be alike",
            found=shown,
        )
    tensors = caches[layers[0]]
    if isinstance(part_names, str) or not all(
        isinstance(name, str) and name for name in part_names
    ):
        raise GeometryError("part_names must be a list of names", part_names=part_names)
    names = tuple(part_names) or PART_NAMES.get(len(tensors), ())
    if not tensors or len(names) != len(tensors):
        raise GeometryError(
            "each tensor of a layer is a part: part_names must name them if there are more than two",
            tensors=len(tensors),
            part_names=tuple(part_names),
        )
    if scales is not None and set(scales) != set(layers):
        raise GeometryError(
            "scales must be given for each layer", layers=layers, scaled=sorted(scales)
        )
    stated = _checked_scales(scales or {})
    views = {layer: tuple(view_of(tensor) for tensor in caches[layer]) for layer in layers}
    parts = tuple(
        PartGeometry(
            name=name,
            total_heads=total_heads or view.num_heads,
            head_start=head_start,
            head_stop=head_start + view.num_heads,
            head_dim=view.head_dim,
            item_size_bytes=view.item_size_bytes,
            element=_element(tensor),
            rounding=rounding,
        )
        for name, tensor, view in zip(names, tensors, views[layers[0]], strict=True)
    )
    geometry = GroupGeometry(
        block_size=views[layers[0]][0].block_size,
        layers=layers,
        parts=parts,
        dcp_size=context_parallel.world_size,
        dcp_rank=context_parallel.rank,
        interleave_tokens=context_parallel.interleave_tokens,
        row_tokens=row_tokens,
        scales=stated,
    )
    return CacheGroup(
        geometry=geometry,
        views=views,
        device=device_name(tensors[0].device),
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        memory=tuple(tensor for layer in layers for tensor in caches[layer]),
    )


def _checked_scales(
    scales: Mapping[int, Sequence[Sequence[float]]],
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return the scales of each layer's parts, layer by layer. Raises GeometryError: they are not numbers above 0."""
    try:
        found = tuple(
            tuple(tuple(map(float, part)) for part in parts) for _, parts in sorted(scales.items())
        )
    except (TypeError, ValueError) as error:
        raise GeometryError(
            "scales must be numbers, scales[layer][part]: one, or one for each head", scales=scales
        ) from error
    if not all(0.0 < each < math.inf for layer in found for part in layer for each in part):
        raise GeometryError("scales must be above 0 and finite", scales=scales)
    return found


def _element(tensor: torch.Tensor) -> str:
    """Return a tensor's type as `PartGeometry.element`; "" if it cannot be converted."""
    name = str(tensor.dtype).removeprefix("torch.")
    return name if name in ELEMENTS else ""


def _check_layer(layer: object, tensors: object) -> None:
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise GeometryError("layers must be numbered from 0, and alike in all engines", layer=layer)
    if not isinstance(tensors, list | tuple):
        raise GeometryError(
            "a layer's cache must be a tuple of tensors: (k, v), or (kv,) if one tensor holds both",
            layer=layer,
            got=type(tensors).__name__,
        )
    for tensor in tensors:
        _check_tensor(tensor, layer=layer)


def _check_tensor(tensor: object, **context: object) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise GeometryError(
            "a cache must be a torch tensor: torch.from_numpy makes one from an array, without a copy",
            **context,
            got=type(tensor).__name__,
        )
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise GeometryError(
            "a cache must be a dense tensor on a CPU or a CUDA GPU",
            **context,
            layout=str(tensor.layout),
            device=str(tensor.device),
        )


def device_name(device: torch.device) -> str:
    """Return a device's name as in `CacheGroup`: "cpu" or "cuda:N"."""
    return f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
