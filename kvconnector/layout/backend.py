"""From an attention backend's cache shape to `KVView`s.

An engine's attention backend states the shape and the order of its cache. `probe_layout` finds out which axis is
which, and the `CacheLayout` that it returns makes views of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvconnector.errors import ConfigError, GeometryError
from kvconnector.layout.views import KVView

# All differ, also from twice the head size, so that a probed shape's axes are known by their sizes. Some backends
# refuse block sizes that are not multiples of 16 or 128, or unusual head sizes.
_PROBE_BLOCKS, _PROBE_TOKENS, _PROBE_HEADS, _PROBE_DIM = 1009, 256, 12, 64


class AttentionBackend(Protocol):
    """An engine's attention backend, which states its cache's shape and order, with vLLM's method names."""

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the logical shape of one layer's cache tensor."""

    def get_kv_cache_stride_order(
        self, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        """Return the logical axes in memory order, slowest first; on request with an axis for layers before the others.
        A backend that lacks this method, or raises NotImplementedError, uses the shape's order.
        """


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The axes of one cache tensor, by their positions in its logical shape; None for an axis that it lacks.

    `kv_axis` separates K and V. If `packed_kv` is True, the last axis holds K and then V instead. `stride_order` lists
    the logical axes in memory order. `layers_axis` is that of a cross-layer tensor, which holds all layers of a rank.
    """

    block_axis: int
    token_axis: int
    dim_axis: int
    head_axis: int | None
    kv_axis: int | None
    layers_axis: int | None
    packed_kv: bool
    stride_order: tuple[int, ...]

    @property
    def part_names(self) -> tuple[str, ...]:
        """`("k", "v")`, or `("latent",)` for a cache without separate K and V."""
        return ("k", "v") if self.kv_axis is not None or self.packed_kv else ("latent",)

    def views(
        self,
        address: int,
        shape: Sequence[int],
        strides_bytes: Sequence[int],
        item_size_bytes: int,
    ) -> list[tuple[KVView, ...]]:
        """Return the views of one tensor: a view per part for each layer (for one, without a layers axis). Raises
        GeometryError: the tensor has another number of axes, or a packed last axis of odd length.
        """
        num_axes = len(self.stride_order)
        if len(shape) != num_axes or len(strides_bytes) != num_axes:
            raise GeometryError(
                "the tensor's axes do not match its backend's shape",
                shape=tuple(shape),
                strides_bytes=tuple(strides_bytes),
                expected_axes=num_axes,
            )
        axis = self.layers_axis
        layers, step = (1, 0) if axis is None else (shape[axis], strides_bytes[axis])
        return [
            self._parts(address + layer * step, shape, strides_bytes, item_size_bytes)
            for layer in range(layers)
        ]

    def _parts(
        self, address: int, shape: Sequence[int], strides: Sequence[int], item_size: int
    ) -> tuple[KVView, ...]:
        head_dim = shape[self.dim_axis]
        part_step = 0
        if self.packed_kv:
            if head_dim % 2:
                raise GeometryError(
                    "a packed K and V axis must have even length", shape=tuple(shape)
                )
            head_dim //= 2
            part_step = head_dim * strides[self.dim_axis]
        elif self.kv_axis is not None:
            part_step = strides[self.kv_axis]
        axes = (self.block_axis, self.head_axis, self.token_axis)
        counts = [1 if axis is None else shape[axis] for axis in axes]
        steps = [0 if axis is None else strides[axis] for axis in (*axes, self.dim_axis)]
        return tuple(
            KVView(address + part * part_step, (*counts, head_dim), tuple(steps), item_size)
            for part in range(len(self.part_names))
        )


def probe_layout(backend: AttentionBackend, *, cross_layers: bool = False) -> CacheLayout:
    """Return the layout of a backend's cache, from its shape and order for sizes that cannot be confused. Raises
    GeometryError: an axis of the shape cannot be identified, or the stride order is not a permutation or not available.
    """
    shape = list(backend.get_kv_cache_shape(_PROBE_BLOCKS, _PROBE_TOKENS, _PROBE_HEADS, _PROBE_DIM))
    if cross_layers:
        shape.insert(0, -1)
    order = _stride_order(backend, len(shape), cross_layers)
    packed = 2 * _PROBE_DIM in shape
    known = {_PROBE_BLOCKS, _PROBE_TOKENS, _PROBE_HEADS, _PROBE_DIM, 2 * _PROBE_DIM, 2, -1}
    dim_size = 2 * _PROBE_DIM if packed else _PROBE_DIM
    axis = {size: index for index, size in enumerate(shape)}
    is_known = {_PROBE_BLOCKS, _PROBE_TOKENS, dim_size} <= set(shape) <= known
    if not is_known or len(axis) != len(shape):
        raise GeometryError("cannot tell the axes of the backend's cache shape", shape=tuple(shape))
    return CacheLayout(
        block_axis=axis[_PROBE_BLOCKS],
        token_axis=axis[_PROBE_TOKENS],
        dim_axis=axis[dim_size],
        head_axis=axis.get(_PROBE_HEADS),
        kv_axis=axis.get(2),
        layers_axis=axis.get(-1),
        packed_kv=packed,
        stride_order=order,
    )


def _stride_order(backend: AttentionBackend, num_axes: int, cross_layers: bool) -> tuple[int, ...]:
    order = tuple(range(num_axes))
    stated = getattr(backend, "get_kv_cache_stride_order", None)
    if stated is None:
        return order
    try:
        order = tuple(stated(cross_layers))
    except NotImplementedError:
        return order
    except AttributeError as error:
        # to use the shape's order would be a guess, and a wrong guess reads wrong bytes
        raise GeometryError(
            f"the backend's get_kv_cache_stride_order looks for what is not there: {error}",
            backend=getattr(backend, "__name__", type(backend).__name__),
        ) from error
    if sorted(order) != list(range(num_axes)):
        raise GeometryError(
            "a stride order must name every axis once", stride_order=order, num_axes=num_axes
        )
    return order


class FlashAttentionBackend:
    """The default backend: `[2, num_blocks, block_size, num_kv_heads, head_size]`, in the order of its axes (NHD)."""

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def get_kv_cache_stride_order(
        self, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        return tuple(range(6 if include_num_layers_dimension else 5))


def current_attention_backend(
    backends: Mapping[str, AttentionBackend], layer: str
) -> AttentionBackend:
    """Return the backend of `layer`: the default if `backends` is empty. Raises ConfigError: the layer has none."""
    if not backends:
        return FlashAttentionBackend()
    if layer not in backends:
        raise ConfigError("no attention backend for this layer", layer=layer, known=list(backends))
    return backends[layer]


def required_cache_layout(settings: Mapping[str, object]) -> str:
    """Return the layout that the engine should use: `settings["kv_cache_layout"]` if it is set, "HND" if a KV connector
    is (a block's heads are contiguous there), or else "NHD". Raises ConfigError: the setting is another layout.
    """
    layout = settings.get("kv_cache_layout")
    if layout is None:
        return "HND" if settings.get("kv_connector") else "NHD"
    if layout not in ("HND", "NHD"):
        raise ConfigError("kv_cache_layout must be HND or NHD", kv_cache_layout=layout)
    return str(layout)
