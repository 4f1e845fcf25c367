"""Finds the place of each element in a block of vLLM's CPU attention, with vLLM's own store operation.

The tensor's shape is `[block, head, token, 2 * dim]`, but the order inside a (block, head) depends on the instruction
set: vector code stores K as `[dim][token]`, then V as `[token][dim]`; AMX code stores tiles. To find out, a block is
written with coded values. Elements at plain strides can be exchanged between any two engines. Elements in tiles of
several tokens and dims are transferred in whole tiles, between engines with the same tiles.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvconnector.errors import GeometryError


@dataclass(frozen=True, slots=True)
class CpuStore:
    """How vLLM's CPU attention stores a layer: for an instruction set (`isa`), in blocks of `num_heads` x `block_size`
    x twice `head_dim` elements.
    """

    num_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    isa: str
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class PartStrides:
    """A part of a block: the offset of its `[0, 0, 0]` from the block's start, and the strides of head, token and dim,
    all in elements. In a tiled part a tile of tokens counts as one token, with the tile's elements as its `width` dims.
    """

    name: str
    offset: int
    head: int
    token: int
    dim: int
    width: int


def probe_block(store: CpuStore) -> tuple[int, list[PartStrides]]:
    """Return the number of tokens in a tile, and the parts of a layer's blocks, as vLLM writes them. With plain strides
    a tile has one token, and the parts are K and V.

    Every element's index is written bit by bit, as zeros and ones, which every element type holds exactly.

    Raises:
        GeometryError: the elements lie neither at plain strides nor in tiles.
    """
    shape = (2, store.num_heads, store.block_size, store.head_dim)
    count = int(np.prod(shape))
    codes = np.arange(1, count + 1).reshape(shape)
    found = np.zeros(count, dtype=np.int64)
    for bit in range(count.bit_length()):
        found |= _stored(store, (codes >> bit) & 1).astype(np.int64) << bit
    if not np.array_equal(np.sort(found), np.arange(1, count + 1)):
        raise _not_understood(store, "some elements are stored nowhere, or twice")
    places = np.empty(count, dtype=np.int64)
    places[found - 1] = np.arange(count)
    k, v = places.reshape(shape)
    plain = [_strides(part, name, shape[3]) for name, part in (("k", k), ("v", v))]
    if None not in plain:
        return 1, [part for part in plain if part is not None]
    for tile_tokens in _divisors(store.block_size):
        tiled = _tiles(k, "k", tile_tokens), _tiles(v, "v", tile_tokens)
        if all(tiled):
            return tile_tokens, [*tiled[0], *tiled[1]]
    raise _not_understood(store, "the elements lie neither at plain strides nor in tiles")


def _stored(store: CpuStore, bits: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Let vLLM store K and V from `bits` (`[2, H, N, D]`) in a block, and return the block's bits in memory order."""
    from vllm import _custom_ops as ops

    _, heads, tokens, dim = bits.shape
    cache = torch.zeros(1, heads, tokens * 2, dim, dtype=store.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    source_dtype = torch.bfloat16 if cache.element_size() == 1 else store.dtype
    key_NHD, value_NHD = (
        torch.from_numpy(np.ascontiguousarray(part.transpose(1, 0, 2))).to(source_dtype)
        for part in bits
    )
    ops.cpu_attn_reshape_and_cache(
        key_NHD,
        value_NHD,
        key_cache,
        value_cache,
        torch.arange(tokens, dtype=torch.int64),
        store.isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype=store.kv_cache_dtype,
    )
    raw = cache.view(torch.uint8).numpy().reshape(-1, cache.element_size())
    written: npt.NDArray[np.bool_] = np.any(raw, axis=1)
    return written


def _strides(places: npt.NDArray[np.int64], name: str, width: int) -> PartStrides | None:
    """Return the strides of an index array `[H, N, D]`, or None if plain strides do not describe it."""
    offset = int(places[0, 0, 0])
    steps = [
        int(places[tuple(int(axis == other) for other in range(3))]) - offset
        if places.shape[axis] > 1
        else 0
        for axis in range(3)
    ]
    grid = np.indices(places.shape)
    expected = offset + sum(step * index for step, index in zip(steps, grid, strict=True))
    if not np.array_equal(places, expected) or min(steps) < 0:
        return None
    head, token, dim = steps
    return PartStrides(name, offset, head, token, dim, width)


def _tiles(places: npt.NDArray[np.int64], name: str, tile_tokens: int) -> list[PartStrides]:
    """Return a part for each run of dims, as few as possible, whose tiles of `tile_tokens` tokens are contiguous and
    equal; none if there are no such tiles. Parts with equal names have equal tiles.
    """
    heads, tokens, dims = places.shape
    for run in reversed(_divisors(dims)):
        size = tile_tokens * run
        tiles_HTRX = (
            places.reshape(heads, tokens // tile_tokens, tile_tokens, dims // run, run)
            .transpose(0, 1, 3, 2, 4)
            .reshape(heads, tokens // tile_tokens, dims // run, size)
        )
        first = tiles_HTRX.min(axis=3, keepdims=True)
        inside = tiles_HTRX - first
        order = inside[0, 0, 0]
        if (inside != order).any() or not np.array_equal(np.sort(order), np.arange(size)):
            continue
        kind = f"{tile_tokens}x{run}-{zlib.crc32(order.astype('<i8').tobytes()):08x}"
        elements = np.arange(min(size, 2))
        parts = [
            _strides(first[:, :, index] + elements, f"{name}{index}-{kind}", size)
            for index in range(dims // run)
        ]
        if None not in parts:
            return [part for part in parts if part is not None]
    return []


def _divisors(number: int) -> list[int]:
    return [factor for factor in range(1, number + 1) if number % factor == 0]


def _not_understood(store: CpuStore, why: str) -> GeometryError:
    return GeometryError(
        f"vLLM's CPU attention stores blocks in a way that KVConnector does not support: {why}",
        isa=store.isa,
        dtype=str(store.dtype),
        block_size=store.block_size,
        head_dim=store.head_dim,
        kv_cache_dtype=store.kv_cache_dtype,
    )
