"""Torch tensors as `KVView`s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconnector.cache.views import KVView
from kvconnector.errors import GeometryError

if TYPE_CHECKING:
    import torch


def view_of(cache_BHND: torch.Tensor) -> KVView:
    """The view of a tensor that is seen as logical `[num_blocks, num_heads, block_size, head_dim]`; no copy.

    Permute or slice the engine's tensor into that shape first; any strides will do. The caller keeps it alive.

    Raises:
        GeometryError: the tensor does not have four axes, or its strides make elements overlap.
    """
    if cache_BHND.dim() != 4:
        raise GeometryError(
            "a cache view has four axes: block, head, token, dim", shape=tuple(cache_BHND.shape)
        )
    item = cache_BHND.element_size()
    return KVView.from_strides(
        cache_BHND.data_ptr(),
        tuple(cache_BHND.shape),
        tuple(stride * item for stride in cache_BHND.stride()),
        item,
    )
