"""Cache layouts of attention backends, and their views compared with real strided tensors element by element."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvconnector.errors import ConfigError, GeometryError
from kvconnector.layout import KVView, memory_orders
from kvconnector.topology import (
    FlashAttentionBackend,
    current_attention_backend,
    probe_layout,
    required_cache_layout,
)

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 5, 4, 2, 6


@dataclass(frozen=True)
class Backend:
    """`axes` name the logical axes in order: (l)ayers, (2) K and V, (b)locks, (t)okens, (h)eads, (d)im, (p)acked K|V.

    `memory` has the same letters in physical order, slowest first; with `l` it is the cross-layer order.
    """

    axes: str
    memory: str

    def get_kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        if block_size % 16:
            raise ValueError("a block has a multiple of 16 tokens")
        sizes = {"2": 2, "b": num_blocks, "t": block_size, "h": num_kv_heads, "d": head_size}
        sizes["p"] = 2 * head_size
        return tuple(sizes[axis] for axis in self.axes)

    def get_kv_cache_stride_order(self, include_num_layers_dimension=False):
        axes = "l" + self.axes if include_num_layers_dimension else self.axes
        return tuple(axes.index(axis) for axis in self.memory)


SIZES = {"l": LAYERS, "2": 2, "b": BLOCKS, "t": TOKENS, "h": HEADS, "d": DIM, "p": 2 * DIM}

BACKENDS = {
    "FlashAttention NHD": Backend("2bthd", "2bthd"),
    "FlashAttention HND": Backend("2bthd", "2bhtd"),
    "FlashInfer NHD": Backend("b2thd", "b2thd"),
    "FlashInfer HND": Backend("b2thd", "b2htd"),
    "packed": Backend("bhtp", "bhtp"),
    "packed NHD": Backend("bhtp", "bthp"),
    "MLA": Backend("btd", "btd"),
    "cross-layer NHD": Backend("2bthd", "bl2thd"),
    "cross-layer HND": Backend("2bthd", "bhl2td"),
    "cross-layer FlashInfer": Backend("b2thd", "bhl2td"),
    "cross-layer MLA": Backend("btd", "bltd"),
}


def logical_tensor(backend, dtype=np.int32):
    """A tensor as an engine registers it: logical shape, physical order. Each element is its own index in memory."""
    memory = np.arange(np.prod([SIZES[a] for a in backend.memory]), dtype=dtype)
    physical = memory.reshape([SIZES[axis] for axis in backend.memory])
    axes = "l" + backend.axes if "l" in backend.memory else backend.axes
    return physical.transpose([backend.memory.index(axis) for axis in axes]), axes


def parts_of(tensor, axes):
    """Return the tensor as `[layers][part][block, head, token, dim]`, split by the names of its axes."""
    if "l" not in axes:
        tensor, axes = tensor[None], "l" + axes
    tensor = tensor.transpose([axes.index(axis) for axis in "l2bhtdp" if axis in axes])
    if "h" not in axes:
        tensor = tensor[..., None, :, :]
    if "2" in axes:
        return [[layer[0], layer[1]] for layer in tensor]
    if "p" in axes:
        return [[layer[..., :DIM], layer[..., DIM:]] for layer in tensor]
    return [[layer] for layer in tensor]


def indices_in_memory(view, base_address):
    """Return each element's index in memory, `[block, head, token, dim]`, counted from the pool's first element."""
    steps = np.ogrid[tuple(slice(count) for count in view.shape)]
    offsets = sum(step * stride for step, stride in zip(steps, view.strides_bytes, strict=True))
    return (offsets + (view.address - base_address)) // view.item_size_bytes


@pytest.mark.parametrize("name", BACKENDS)
def test_views_address_every_element_of_the_tensor(name):
    backend = BACKENDS[name]
    tensor, axes = logical_tensor(backend)
    layout = probe_layout(backend, cross_layers="l" in axes)
    address = tensor.__array_interface__["data"][0]
    views = layout.views(address, tensor.shape, tensor.strides, tensor.itemsize)
    stored = backend.memory.upper().replace("T", "N").replace("P", "2D")
    assert memory_orders(dict(enumerate(views))) == (stored,) * len(layout.part_names)
    expected = parts_of(tensor, axes)
    assert len(views) == len(expected)
    for parts, arrays in zip(views, expected, strict=True):
        assert len(parts) == len(arrays) == len(layout.part_names)
        for view, array in zip(parts, arrays, strict=True):
            assert view.shape == array.shape
            np.testing.assert_array_equal(indices_in_memory(view, address), array)


def test_memory_orders_of_separate_and_joint_parts():
    def part(address, shape=(5, 2, 4, 6), strides=(96, 48, 12, 2)):
        return KVView(address, shape, strides, 2)

    k, v = part(0), part(10_000)
    transposed = part(10_000, strides=(96, 48, 2, 8))
    assert memory_orders({0: (k, v)}) == ("2BHND",) * 2
    assert memory_orders({0: (v, k)}) == ("2BHND",) * 2
    assert memory_orders({0: (k, transposed)}) == ("2BHND", "2BHDN")
    assert memory_orders({0: (k,), 1: (v,)}) == ("BHND",)
    assert memory_orders({0: (k,), 1: (v,), 2: (k,)}) == ("BHND",)
    # two layers and two parts in each block of 384 bytes
    together = [part(96 * at, strides=(384, 48, 12, 2)) for at in range(4)]
    assert memory_orders({0: together[:2], 1: together[2:]}) == ("BL2HND",) * 2
    assert memory_orders({0: together[::2], 1: together[1::2]}) == ("B2LHND",) * 2
    # one head of one token, and a pool of one block
    state = part(0, (5, 1, 1, 6), (12, 12, 12, 2))
    assert memory_orders({0: (state,)}) == ("BD",)
    assert memory_orders({0: (part(0, (1, 2, 4, 6)), part(96, (1, 2, 4, 6)))}) == ("B2HND",) * 2


class WithoutOrder(FlashAttentionBackend):
    def get_kv_cache_stride_order(self, include_num_layers_dimension=False):
        raise NotImplementedError


class BrokenOrder(FlashAttentionBackend):
    def get_kv_cache_stride_order(self, include_num_layers_dimension=False):
        return self.order_that_its_base_class_lacks


class ShapeOnly:
    get_kv_cache_shape = FlashAttentionBackend.get_kv_cache_shape


@pytest.mark.parametrize("backend", [WithoutOrder(), ShapeOnly()])
def test_a_backend_without_a_stride_order_has_its_shapes_order(backend):
    assert probe_layout(backend) == probe_layout(BACKENDS["FlashAttention NHD"])


def test_a_backend_whose_stride_order_is_broken_is_refused():
    """Its order is not known: that of the shape could read wrong bytes."""
    with pytest.raises(GeometryError, match="order_that_its_base_class_lacks") as refused:
        probe_layout(BrokenOrder())
    assert refused.value.context == {"backend": "BrokenOrder"}


class Shaped:
    def __init__(self, shape, order=None):
        self.shape = shape
        self.order = order or tuple(range(len(shape)))

    def get_kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        named = {"b": num_blocks, "t": block_size, "h": num_kv_heads, "d": head_size}
        return tuple(named.get(axis, axis) for axis in self.shape)

    def get_kv_cache_stride_order(self, include_num_layers_dimension=False):
        return self.order


@pytest.mark.parametrize(
    "shape,order,complaint",
    [
        (("b", "t", "d", 7), None, "cannot tell"),
        (("b", "b", "t", "d"), None, "cannot tell"),
        (("b", "t", "h"), None, "cannot tell the axes"),
        (("t", "h", "d"), None, "cannot tell the axes"),
        (("b", "t", "h", "d"), (0, 1, 1, 3), "every axis once"),
        (("b", "t", "h", "d"), (0, 1, 2), "every axis once"),
    ],
)
def test_ambiguous_shapes_and_orders_are_refused(shape, order, complaint):
    with pytest.raises(GeometryError, match=complaint):
        probe_layout(Shaped(shape, order))


def test_tensors_of_another_shape_are_refused():
    with pytest.raises(GeometryError, match="axes"):
        probe_layout(BACKENDS["MLA"]).views(0, (2, 3), (6, 2), 2)
    with pytest.raises(GeometryError, match="even"):
        probe_layout(BACKENDS["packed"]).views(0, (2, 2, 2, 3), (24, 12, 6, 2), 2)


def test_the_current_attention_backend_is_the_layers():
    one, two = BACKENDS["packed"], BACKENDS["MLA"]
    assert isinstance(current_attention_backend({}, "a"), FlashAttentionBackend)
    assert current_attention_backend({"a": one, "b": two}, "b") is two
    with pytest.raises(ConfigError, match="no attention backend"):
        current_attention_backend({"a": one}, "c")


def test_connectors_require_hnd_unless_configured():
    assert required_cache_layout({}) == "NHD"
    assert required_cache_layout({"kv_connector": "KVConnector"}) == "HND"
    assert required_cache_layout({"kv_connector": "c", "kv_cache_layout": "NHD"}) == "NHD"
    with pytest.raises(ConfigError, match="HND or NHD"):
        required_cache_layout({"kv_cache_layout": "DHN"})
