"""Small caches of one worker, filled from a seed, in host or GPU memory, and reads of them."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvconnector.cache.views import KVView
from kvconnector.datapath.base import Program, SegmentWindow
from kvconnector.datapath.pools import CacheGroup, Pools
from kvconnector.planning import GroupBlocks
from kvconnector.planning.plan import CHUNK_DTYPE
from tests.support.fakes import FakeEngine, attention_model, shareable

BLOCKS = 12
LAYOUTS = ("HND", "NHD", "HDN")


@dataclass(frozen=True)
class Shape:
    """A cache of one worker: `layers` layers of K and V."""

    layers: int = 2
    heads: int = 2
    dim: int = 4
    item: int = 2
    block: int = 4
    blocks: int = BLOCKS
    layout: str = "HND"


@st.composite
def unlike_sides(draw):
    """Two workers with the same layers and heads but blocks and layouts of their own; tokens and heads of a read."""
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dim, item = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4, 8]))
    source, destination = (
        Shape(layers, heads, dim, item, draw(st.integers(1, 6)), BLOCKS, layout)
        for layout in draw(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)))
    )
    limit = BLOCKS * min(source.block, destination.block)
    start = draw(st.integers(0, limit - 1))
    tokens = range(start, draw(st.integers(start + 1, limit)))
    edges = draw(st.lists(st.integers(0, heads), min_size=2, max_size=2, unique=True))
    return source, destination, tokens, range(*sorted(edges))


class Caches:
    """K and V of every layer, each part in memory of its own; zeros without a seed."""

    def __init__(self, shape, *, seed, device="cpu"):
        self.shape = shape
        stored = [
            _allocate(shape, None if seed is None else seed + row)
            for row in range(2 * shape.layers)
        ]
        self._memory = stored
        addresses = [array.ctypes.data for array in stored]
        if device != "cpu":
            import torch

            self._memory = [
                torch.from_numpy(array.view(np.uint8).reshape(-1)).to(device) for array in stored
            ]
            addresses = [tensor.data_ptr() for tensor in self._memory]
        model = attention_model(shape.layers, shape.heads, shape.dim, shape.item)
        (rank,) = FakeEngine("e", model, block_sizes=(shape.block,)).geometry().ranks
        views = [
            _view_of(address, _logical(shape, array))
            for address, array in zip(addresses, stored, strict=True)
        ]
        by_layer = {layer: views[2 * layer : 2 * layer + 2] for layer in range(shape.layers)}
        self.pools = Pools([CacheGroup(rank.groups[0], by_layer)], device)

    @property
    def arrays(self):
        """The parts, `[block, head, token, dim]`: the memory itself, or a copy of the GPU's."""
        return [_logical(self.shape, _on_host(self.shape, memory)) for memory in self._memory]

    def dense(self, block_ids, tokens):
        """A request's tokens, `[row, head, token, dim]`."""
        rows = [
            array[block_ids].transpose(1, 0, 2, 3).reshape(self.shape.heads, -1, self.shape.dim)
            for array in self.arrays
        ]
        return np.stack(rows)[:, :, tokens.start : tokens.stop]

    def program(self, block_ids, tokens, *, order, chunk_tokens, chunk_rows, heads=None):
        """A read of `tokens`, cut without regard for anything."""
        heads = heads or range(self.shape.heads)
        num_rows = 2 * self.shape.layers
        per_token = len(heads) * self.shape.dim * self.shape.item
        chunks = [
            (
                0,
                row,
                min(chunk_rows, num_rows - row),
                start,
                min(chunk_tokens, tokens.stop - start),
            )
            for row in range(0, num_rows, chunk_rows)
            for start in range(tokens.start, tokens.stop, chunk_tokens)
        ]
        return Program(
            segments=(SegmentWindow(0, 0, 0, heads.start, len(heads), per_token, order),),
            chunks=np.array(chunks, CHUNK_DTYPE),
            blocks=(GroupBlocks.of(block_ids),),
        )


def _sizes(shape):
    """The axes of a part as it is stored, and their lengths."""
    sizes = {"b": shape.blocks, "h": shape.heads, "t": shape.block, "d": shape.dim}
    stored = {"HND": "bhtd", "NHD": "bthd", "HDN": "bhdt"}[shape.layout]
    return stored, [sizes[axis] for axis in stored]


def _allocate(shape, seed):
    dtype = np.dtype(f"u{shape.item}")
    _, sizes = _sizes(shape)
    stored = shareable(sizes, dtype)
    if seed is not None:
        rng = np.random.default_rng(seed)
        stored[...] = rng.integers(1, np.iinfo(dtype).max, sizes, dtype, endpoint=True)
    return stored


def _logical(shape, stored):
    axes, _ = _sizes(shape)
    return stored.transpose([axes.index(axis) for axis in "bhtd"])


def _on_host(shape, memory):
    if isinstance(memory, np.ndarray):
        return memory
    _, sizes = _sizes(shape)
    return memory.cpu().numpy().view(f"u{shape.item}").reshape(sizes)


def _view_of(address, like):
    return KVView(address, like.shape, like.strides, like.itemsize)
