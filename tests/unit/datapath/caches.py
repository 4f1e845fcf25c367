"""Small caches of one worker, filled from a seed, in host or GPU memory, and reads of them."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvconnector.datapath.pools import Pools
from kvconnector.ids import Rank
from kvconnector.layout import ALL_LAYERS
from kvconnector.planning import GroupBlocks, Route, SegmentWindow, SourceRead
from kvconnector.planning.plan import Cut
from tests.support.fakes import LAYOUTS, FakeEngine, attention_model, make_caches

BLOCKS = 12
ORDERS = ("HND", "NHD", "HDN")


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
    """Two workers with the same layers and heads but different blocks and layouts; tokens and heads of a read."""
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


@dataclass(frozen=True)
class Half:
    """One side of a read: its route, its chunks, and the blocks that it reads or fills."""

    source: SourceRead
    blocks: tuple[GroupBlocks, ...]

    @property
    def chunks(self):
        return self.source.chunks


def half(window, cut, blocks, tokens, *, there=()):
    """Return a read of one segment, cut in any way."""
    num_rows = cut.rows[-1]
    nbytes = num_rows * len(tokens) * window.part_token_bytes
    route = Route(Rank(0, 0), 1, (), (), here=(window,), there=there)
    ends = tokens.stop, ALL_LAYERS.stop
    source = SourceRead(
        route, (tokens,), ALL_LAYERS, 1, (tokens,), (range(num_rows),), nbytes, *ends
    )
    vars(source)["cuts"] = [cut]  # not as its route would cut it
    return Half(source, (blocks,))


class Caches:
    """K and V of every layer; zeros without a seed. On a GPU, `arrays` are what `dense` last found there, and `place`
    may copy a tensor to the memory that it is to be in.
    """

    def __init__(self, shape, *, seed, device="cpu", place=None):
        self.shape = shape
        model = attention_model(shape.layers, shape.heads, shape.dim, shape.item)
        sizes = {"block_sizes": (shape.block,), "num_blocks": (shape.blocks,)}
        engine = FakeEngine("e", model, layout=shape.layout, **sizes)
        rng = None if seed is None else np.random.default_rng(seed)
        self._caches = make_caches(engine, engine.geometry().ranks[0], rng, device)
        self.arrays = self._caches.arrays
        if place is not None:
            self._caches.move(place)
        self.restore = getattr(self._caches, "restore", None)
        self.pools = Pools(self._caches.groups(), device)

    def dense(self, block_ids, tokens):
        """A request's tokens, `[row, head, token, dim]`."""
        rows = [self._caches.tokens(*key, block_ids) for key in self.arrays]
        return np.stack(rows)[:, :, tokens.start : tokens.stop]

    def program(self, block_ids, tokens, *, order, chunk_tokens, chunk_rows, heads=None):
        """A read of `tokens`, cut without regard for anything."""
        heads = heads or range(self.shape.heads)
        num_rows = 2 * self.shape.layers
        per_token = len(heads) * self.shape.dim * self.shape.item
        rows = [*range(0, num_rows, chunk_rows), num_rows]
        cut = Cut(0, rows, [*range(tokens.start, tokens.stop, chunk_tokens), tokens.stop])
        window = SegmentWindow(0, 0, 0, heads.start, len(heads), per_token, order)
        return half(window, cut, GroupBlocks.of(block_ids), tokens)
