"""Fakes of an engine's side: a clock that tests move, and caches in numpy arrays of any layout."""

import math
import mmap
import time
from dataclasses import dataclass

import numpy as np

from kvconnector.datapath import CacheGroup
from kvconnector.layout import KVView
from kvconnector.runtime import WorkerMetadata
from kvconnector.topology import (
    EngineGeometry,
    GroupGeometry,
    ModelDescription,
    PartGeometry,
    RankGeometry,
    TpKVTopology,
)

LAYOUTS = ("HND", "NHD", "K-transposed", "interleaved")


class FakeClock:
    """A clock that only a test advances."""

    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds


class AheadClock(FakeClock):
    """The monotonic time, plus the seconds by which a test advances it."""

    def __call__(self):
        return time.monotonic() + self.now_s


@dataclass(frozen=True, slots=True)
class FakePart:
    """One part of a model's cache, e.g. K. `item_size_bytes` is 1, 2, 4 or 8."""

    name: str
    total_heads: int
    head_dim: int
    item_size_bytes: int = 2


@dataclass(frozen=True, slots=True)
class FakeGroup:
    """Layers of a model that share block tables. `row_tokens` tokens share a row. Some layers may be optional."""

    layers: tuple[int, ...]
    parts: tuple[FakePart, ...]
    row_tokens: int = 1
    optional_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model's cache. Every layer from 0 to `num_layers - 1` is in one of the groups."""

    num_layers: int
    groups: tuple[FakeGroup, ...]
    name: str = "model"
    dtype: str = "bfloat16"

    def description(self):
        """Return the description that engines exchange."""
        return ModelDescription(model=self.name, dtype=self.dtype, num_layers=self.num_layers)


def attention_model(num_layers=2, total_heads=2, head_dim=4, item_size_bytes=2):
    """Return a model with K and V in every layer, in one cache group."""
    parts = tuple(FakePart(name, total_heads, head_dim, item_size_bytes) for name in ("k", "v"))
    return FakeModel(num_layers, (FakeGroup(tuple(range(num_layers)), parts),))


def cut_engine(
    shape, *, engine_id, stages, block_sizes, tp_size, splits=None, dcp=(), num_optional=0
):
    """Return the geometry of an engine of `shape`: `stages[pp_rank]` are layers.

    `dcp[group]` are the number of neighbouring tensor ranks that share that group's tokens, and the interleave in
    tokens. By default no ranks do. `splits[total_heads, shares]` are the heads of each of the `tp_size / dcp_size`
    shares, by default those of `TpKVTopology.heads_of`. No part of a rank's holding is ever empty, except that a stage
    may lack a group's layers.
    """
    dcp = dcp or [(1, 1)] * len(shape.groups)
    ranks = tuple(
        RankGeometry(
            pp_rank=pp_rank,
            tp_rank=tp_rank,
            groups=tuple(
                GroupGeometry(
                    block_size=block_size,
                    layers=tuple(layer for layer in group.layers if layer in layers),
                    parts=tuple(
                        _part(part, tp_rank // dcp_size, tp_size // dcp_size, splits)
                        for part in group.parts
                    ),
                    dcp_size=dcp_size,
                    dcp_rank=tp_rank % dcp_size,
                    interleave_tokens=interleave,
                    row_tokens=group.row_tokens,
                    optional_layers=tuple(n for n in group.optional_layers if n in layers),
                )
                for group, block_size, (dcp_size, interleave) in zip(
                    shape.groups, block_sizes, dcp, strict=True
                )
            ),
        )
        for pp_rank, layers in enumerate(stages)
        for tp_rank in range(tp_size)
    )
    return EngineGeometry(
        engine_id=engine_id,
        tp_size=tp_size,
        pp_size=len(stages),
        model=shape.description(),
        ranks=ranks,
        num_optional=num_optional,
    )


def _part(part, share, num_shares, splits):
    if splits is None:
        heads = TpKVTopology.heads_of(part.total_heads, tp_rank=share, tp_size=num_shares)
    else:
        heads = splits[part.total_heads, num_shares][share]
    return PartGeometry(
        name=part.name,
        total_heads=part.total_heads,
        head_start=heads.start,
        head_stop=heads.stop,
        head_dim=part.head_dim,
        item_size_bytes=part.item_size_bytes,
    )


@dataclass(frozen=True, slots=True)
class FakeEngine:
    """The shape of an engine that runs a model. `block_sizes` and `num_blocks` have one entry per cache group.

    `dcp_size` neighbouring tensor ranks hold the same heads and share the tokens, `interleave_tokens` at a time. The
    last `num_optional` groups are optional.
    """

    engine_id: str
    model: FakeModel
    tp_size: int = 1
    pp_size: int = 1
    block_sizes: tuple[int, ...] = (4,)
    num_blocks: tuple[int, ...] = (32,)
    layout: str = "HND"
    dcp_size: int = 1
    interleave_tokens: int = 1
    num_optional: int = 0

    def geometry(self):
        """Return the geometry of all ranks, with layers and heads as `TpKVTopology` divides them."""
        layers = self.model.num_layers
        return cut_engine(
            self.model,
            engine_id=self.engine_id,
            stages=[
                TpKVTopology.layers_of(layers, pp_rank=pp_rank, pp_size=self.pp_size)
                for pp_rank in range(self.pp_size)
            ],
            block_sizes=self.block_sizes,
            tp_size=self.tp_size,
            dcp=[(self.dcp_size, self.interleave_tokens)] * len(self.model.groups),
            num_optional=self.num_optional,
        )


def metadata_of(shape=None, role="consumer"):
    """Return the metadata that an engine's workers give to its scheduler; the engine's id is "d" by default."""
    shape = shape or FakeEngine("d", attention_model())
    geometry = shape.geometry()
    return [
        WorkerMetadata(
            engine_id=shape.engine_id,
            geometry=rank,
            model=geometry.model,
            control_address="tcp://127.0.0.1:1",
            public_key="",
            incarnation="one",
            role=role,
            num_blocks=shape.num_blocks,
            num_optional=shape.num_optional,
        )
        for rank in geometry.ranks
    ]


def make_caches(shape, rank, rng, device="cpu"):
    """Make one rank's caches on a device."""
    if device == "cpu":
        return FakeCaches(shape, rank, rng)
    from tests.support.gpu_caches import GpuCaches

    return GpuCaches(shape, rank, rng, device)


class FakeCaches:
    """One rank's caches, zeros without `rng`. `arrays[group, layer, part]` is a view `[num_blocks, num_heads,
    block_size, head_dim]`.
    """

    device = "cpu"

    def __init__(self, shape, rank, rng):
        self.rank = rank
        self.arrays = {}
        self._rng = rng
        for index, group in enumerate(rank.groups):
            for layer in group.layers:
                arrays = _allocate(group, shape.num_blocks[index], shape.layout)
                for part, array in enumerate(arrays):
                    self.arrays[index, layer, part] = array
                    if rng is not None:
                        _fill(array, rng)

    def groups(self):
        """Return the groups that a worker registers."""
        return [
            CacheGroup(
                group,
                {
                    layer: [self._view((index, layer, part)) for part in range(len(group.parts))]
                    for layer in group.layers
                },
                self.device,
            )
            for index, group in enumerate(self.rank.groups)
        ]

    def _address(self, key):
        return self.arrays[key].__array_interface__["data"][0]

    def _view(self, key):
        array = self.arrays[key]
        return KVView(self._address(key), array.shape, array.strides, array.itemsize)

    def scribble(self, group, block_ids):
        """Overwrite whole blocks of one group with new random bytes, as their next owner would."""
        for (index, _, _), array in self.arrays.items():
            if index == group:
                fresh = np.empty_like(array[list(block_ids)])
                _fill(fresh, self._rng)
                array[list(block_ids)] = fresh

    def tokens(self, group, layer, part, block_ids):
        """Return a copy of this rank's heads in these blocks, in order: `[num_heads, num_tokens, head_dim]`."""
        BHND = self.arrays[group, layer, part][list(block_ids)]
        return np.concatenate(list(BHND), axis=1) if len(BHND) else BHND[:, 0]


def dense_of(caches, block_ids, num_tokens):
    """Return a copy of a request's whole cache, gathered from all ranks: `[total_heads, num_tokens, head_dim]` by
    (group, layer, part). Replicas are made equal first.
    """
    dense = {}
    for cache in caches:
        for index, group in enumerate(cache.rank.groups):
            for layer in group.layers:
                for part, geometry in enumerate(group.parts):
                    mine = cache.tokens(index, layer, part, block_ids[index])
                    shape = (geometry.total_heads, num_tokens, geometry.head_dim)
                    whole = dense.setdefault(
                        (index, layer, part), np.zeros(shape, dtype=mine.dtype)
                    )
                    tokens = _own_tokens(group, num_tokens)
                    heads = slice(geometry.head_start, geometry.head_stop)
                    whole[heads, tokens] = mine[:, : len(tokens)]
    return dense


def _own_tokens(group, num_tokens):
    """Return the tokens that a rank holds, in the order in which it stores them."""
    turns = group.interleave_tokens
    return [t for t in range(num_tokens) if t // turns % group.dcp_size == group.dcp_rank]


def equalise_replicas(caches):
    """Make ranks with the same heads and tokens hold the same bytes, as real ones do."""
    first = {}
    for cache in caches:
        for (group, layer, part), array in cache.arrays.items():
            geometry = cache.rank.groups[group]
            start = geometry.parts[part].head_start
            for local in range(array.shape[1]):
                key = (group, layer, part, start + local, geometry.dcp_rank)
                if key in first:
                    array[:, local] = first[key]
                else:
                    first[key] = array[:, local]


def _allocate(group, num_blocks, layout):
    shapes = [(p.num_heads, p.head_dim, f"u{p.item_size_bytes}") for p in group.parts]
    size = group.block_size
    if layout == "interleaved" and len(set(shapes)) == 1:
        heads, dim, dtype = shapes[0]
        together = shareable((num_blocks, len(shapes), size, heads, dim), dtype)
        return [together[:, part].transpose(0, 2, 1, 3) for part in range(len(shapes))]
    arrays = []
    for index, (heads, dim, dtype) in enumerate(shapes):
        if layout == "NHD":
            array = shareable((num_blocks, size, heads, dim), dtype).transpose(0, 2, 1, 3)
        elif layout == "K-transposed" and index == 0:
            array = shareable((num_blocks, heads, dim, size), dtype).transpose(0, 1, 3, 2)
        else:
            array = shareable((num_blocks, heads, size, dim), dtype)
        arrays.append(array)
    return arrays


def shareable(shape, dtype):
    """Return zeros that a worker can share with its peers, because they are in pages of their own."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype, math.prod(shape)).reshape(shape)


def _fill(array, rng):
    limit = np.iinfo(array.dtype).max
    array[...] = rng.integers(0, limit, size=array.shape, dtype=array.dtype, endpoint=True)
