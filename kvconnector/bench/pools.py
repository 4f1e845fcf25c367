"""A rank's caches with content that can be made again elsewhere, so that two processes agree on it without talking.

Element (layer, part, token, head, dim) of the sequence depends on the seed alone: what one engine writes into
its blocks another can check in its own, whatever the two's cuts, layouts and block sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector.bench.shapes import EngineShape, ModelShape, rank_geometry
from kvconnector.cache.views import KVView
from kvconnector.datapath import CacheGroup
from kvconnector.ids import Rank

POISON = 0xA5
_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def sequence_values(
    model: ModelShape, seed: int, layer: int, part: int, num_tokens: int
) -> npt.NDArray[Any]:
    """Random elements of one part of one layer, `[num_tokens, num_kv_heads, head_dim]`, unsigned of the item's size."""
    shape = (num_tokens, model.num_kv_heads, model.head_dim)
    count = num_tokens * model.num_kv_heads * model.head_dim
    words = -(-count * model.item_size_bytes // 8)
    raw = np.random.SFC64([seed, layer, part]).random_raw(words)
    return raw.view(_DTYPES[model.item_size_bytes])[:count].reshape(shape)


class RankPools:
    """All caches of one rank on `device`, poisoned; `storage` has each part's bytes, in an array or a GPU tensor."""

    def __init__(
        self, model: ModelShape, shape: EngineShape, rank: Rank, *, num_blocks: int, device: str
    ) -> None:
        self.model = model
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        self.geometry = rank_geometry(model, shape, rank).groups[0]
        self._part = self.geometry.parts[0]
        self.storage = {
            (layer, index): _allocate(num_blocks * self.block_bytes, device)
            for layer in self.geometry.layers
            for index in range(len(model.part_names))
        }

    def cache_group(self) -> CacheGroup:
        """As a worker registers it."""
        parts = range(len(self.model.part_names))
        views = {
            layer: tuple(self._view(self.storage[layer, part]) for part in parts)
            for layer in self.geometry.layers
        }
        return CacheGroup(self.geometry, views, self.device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one part."""
        return self.geometry.block_size * self._part.token_bytes

    def addresses(self) -> list[int]:
        """Address of every part, layer by layer."""
        return [_address(storage) for storage in self.storage.values()]

    def poison(self) -> None:
        for storage in self.storage.values():
            storage[...] = POISON

    def write(self, seed: int, block_ids: Sequence[int], num_tokens: int) -> None:
        """Put what the rank holds of a sequence into these blocks; the room behind that is zero."""
        for (layer, part), storage in self.storage.items():
            values = self._values(seed, layer, part, num_tokens)
            blocks = np.zeros((len(block_ids), self.shape.block, *values.shape[1:]), values.dtype)
            blocks.reshape(-1, *values.shape[1:])[: len(values)] = values
            stored = np.empty((len(block_ids), self.block_bytes), np.uint8)
            self._tokens_first(stored)[...] = blocks
            self._rows(storage)[np.asarray(block_ids)] = _beside(storage, stored)

    def mismatch(self, seed: int, block_ids: Sequence[int], num_tokens: int) -> str:
        """Where these blocks do not hold exactly that sequence, or others are not poisoned; empty if all is well."""
        others = np.setdiff1d(np.arange(self.num_blocks), np.asarray(block_ids))
        for (layer, part), storage in self.storage.items():
            where = f"layer {layer}, part {self.model.part_names[part]}"
            values, rows = self._values(seed, layer, part, num_tokens), self._rows(storage)
            stored = self._tokens_first(_host(rows[np.asarray(block_ids)]))
            found = stored.reshape(-1, *values.shape[1:])
            held = len(values)
            wrong = np.flatnonzero((found[:held] != values).any((1, 2)))
            if wrong.size:
                return (
                    f"{where}: {wrong.size} of {held} tokens differ, first that in slot {wrong[0]}"
                )
            if (np.ascontiguousarray(found[held:]).view(np.uint8) != POISON).any():
                return f"{where}: the room behind the last token was written"
            if (rows[others] != POISON).any():
                return f"{where}: a block of another request was written"
        return ""

    def _rows(self, storage: Any) -> Any:
        """A part's bytes, a row for each block."""
        return storage.reshape(self.num_blocks, self.block_bytes)

    def _tokens_first(self, host: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Blocks' bytes as elements `[block, token, head, dim]`, whatever the layout."""
        elements = host.view(_DTYPES[self.model.item_size_bytes])
        heads, tokens, dim = self._part.num_heads, self.shape.block, self.model.head_dim
        if self.shape.layout == "NHD":
            return elements.reshape(-1, tokens, heads, dim)
        return elements.reshape(-1, heads, tokens, dim).swapaxes(1, 2)

    def _view(self, storage: Any) -> KVView:
        heads, tokens, dim = self._part.num_heads, self.shape.block, self.model.head_dim
        item = self.model.item_size_bytes
        row = dim * item
        head, token = (row, heads * row) if self.shape.layout == "NHD" else (tokens * row, row)
        shape, strides = (
            (self.num_blocks, heads, tokens, dim),
            (self.block_bytes, head, token, item),
        )
        return KVView(_address(storage), shape, strides, item)

    def _values(self, seed: int, layer: int, part: int, num_tokens: int) -> npt.NDArray[Any]:
        """What the rank holds of a sequence, `[tokens, heads, head_dim]`: its heads of every token that is its turn."""
        turn = np.arange(num_tokens) // self.shape.interleave % self.shape.dcp
        heads = slice(self._part.head_start, self._part.head_stop)
        values = sequence_values(self.model, seed, layer, part, num_tokens)
        return np.ascontiguousarray(values[turn == self.geometry.dcp_rank, heads])


def choose_blocks(
    num_needed: int, num_blocks: int, *, scattered: bool, rng: np.random.Generator
) -> list[int]:
    """Block ids of one request: a random choice in random order, or one run at a random place."""
    if scattered:
        return [int(block) for block in rng.permutation(num_blocks)[:num_needed]]
    start = int(rng.integers(num_blocks - num_needed + 1))
    return list(range(start, start + num_needed))


def _allocate(nbytes: int, device: str) -> Any:
    """That many bytes, each page touched."""
    if device == "cpu":
        return np.full(nbytes, POISON, dtype=np.uint8)
    import torch

    return torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)


def _host(storage: Any) -> npt.NDArray[np.uint8]:
    """Its bytes, or a copy of them."""
    host: npt.NDArray[np.uint8]
    host = storage if isinstance(storage, np.ndarray) else storage.cpu().numpy()
    return host


def _beside(storage: Any, host: npt.NDArray[np.uint8]) -> Any:
    """These bytes in the same memory as `storage`."""
    if isinstance(storage, np.ndarray):
        return host
    import torch

    return torch.from_numpy(host).to(storage.device)


def _address(storage: Any) -> int:
    return int(storage.ctypes.data if isinstance(storage, np.ndarray) else storage.data_ptr())
