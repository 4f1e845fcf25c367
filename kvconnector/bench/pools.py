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
    dtype = _DTYPES[model.item_size_bytes]
    words = -(-num_tokens * model.num_kv_heads * model.head_dim * model.item_size_bytes // 8)
    raw = np.random.SFC64([seed, layer, part]).random_raw(words)
    return raw.view(dtype)[: num_tokens * model.num_kv_heads * model.head_dim].reshape(shape)


class RankPools:
    """All caches of one rank on `device`, one allocation per part of each layer, filled with `POISON`."""

    def __init__(
        self, model: ModelShape, shape: EngineShape, rank: Rank, *, num_blocks: int, device: str
    ) -> None:
        self.model = model
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        self.geometry = rank_geometry(model, shape, rank).groups[0]
        part = self.geometry.parts[0]
        self.heads = slice(part.head_start, part.head_stop)
        axes = (num_blocks, shape.block, part.num_heads, model.head_dim)
        stored = (axes[0], axes[2], axes[1], axes[3]) if shape.layout == "HND" else axes
        self.storage = {
            (layer, index): _allocate(stored, model.item_size_bytes, device)
            for layer in self.geometry.layers
            for index in range(len(model.part_names))
        }

    def cache_group(self) -> CacheGroup:
        """As a worker registers it."""
        parts = range(len(self.model.part_names))
        views = {
            layer: tuple(self._view(layer, part) for part in parts)
            for layer in self.geometry.layers
        }
        return CacheGroup(self.geometry, views, self.device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one part."""
        return self.geometry.block_size * self.geometry.parts[0].token_bytes

    def addresses(self) -> list[int]:
        """Address of every part, layer by layer."""
        return [_address(storage) for storage in self.storage.values()]

    def poison(self) -> None:
        """Fill everything with `POISON`."""
        for storage in self.storage.values():
            _bytes(storage)[...] = POISON

    def write(self, seed: int, block_ids: Sequence[int], num_tokens: int) -> None:
        """Put what the rank holds of a sequence into these blocks; the room behind that is zero."""
        ids = np.asarray(block_ids, dtype=np.int64)
        for layer, part in self.storage:
            values = self._values(seed, layer, part, num_tokens)
            blocks = np.zeros((len(ids), self.shape.block, *values.shape[1:]), dtype=values.dtype)
            blocks.reshape(-1, *values.shape[1:])[: len(values)] = values
            stored = self._tokens_first(layer, part)
            if isinstance(stored, np.ndarray):
                stored[ids] = blocks
            else:
                import torch

                # torch copies signed integers of every size
                signed = torch.from_numpy(blocks.view(f"i{blocks.itemsize}")).to(stored.device)
                stored.view(signed.dtype)[torch.from_numpy(ids).to(stored.device)] = signed

    def mismatch(self, seed: int, block_ids: Sequence[int], num_tokens: int) -> str:
        """Where these blocks do not hold exactly that sequence, or others are not poisoned; empty if all is well."""
        others = np.setdiff1d(np.arange(self.num_blocks), np.asarray(block_ids))
        for layer, part in self.storage:
            where = f"layer {layer}, part {self.model.part_names[part]}"
            values = self._values(seed, layer, part, num_tokens)
            stored = _host(self._tokens_first(layer, part)).view(values.dtype)
            found = stored[np.asarray(block_ids, dtype=np.int64)].reshape(-1, *values.shape[1:])
            held = len(values)
            wrong = np.flatnonzero((found[:held] != values).any((1, 2)))
            if wrong.size:
                return (
                    f"{where}: {wrong.size} of {held} tokens differ, first that in slot {wrong[0]}"
                )
            if (_bytes(np.ascontiguousarray(found[held:])) != POISON).any():
                return f"{where}: the room behind the last token was written"
            if (_bytes(stored[others]) != POISON).any():
                return f"{where}: a block of another request was written"
        return ""

    def _tokens_first(self, layer: int, part: int) -> Any:
        """The storage of a part as `[block, token, head, dim]`, whatever the layout."""
        storage = self.storage[layer, part]
        return storage.swapaxes(1, 2) if self.shape.layout == "HND" else storage

    def _view(self, layer: int, part: int) -> KVView:
        heads_first, item = (
            self._tokens_first(layer, part).swapaxes(1, 2),
            self.model.item_size_bytes,
        )
        if isinstance(heads_first, np.ndarray):
            strides = heads_first.strides
        else:
            strides = tuple(stride * item for stride in heads_first.stride())
        return KVView(_address(heads_first), tuple(heads_first.shape), strides, item)

    def _values(self, seed: int, layer: int, part: int, num_tokens: int) -> npt.NDArray[Any]:
        """What the rank holds of a sequence, `[tokens, heads, head_dim]`: its heads of every token that is its turn."""
        turn = np.arange(num_tokens) // self.shape.interleave % self.shape.dcp
        mine = turn == self.geometry.dcp_rank
        values = sequence_values(self.model, seed, layer, part, num_tokens)
        return np.ascontiguousarray(values[mine, self.heads])


def choose_blocks(
    num_needed: int, num_blocks: int, *, scattered: bool, rng: np.random.Generator
) -> list[int]:
    """Block ids of one request: a random choice in random order, or one run at a random place."""
    if scattered:
        return [int(block) for block in rng.permutation(num_blocks)[:num_needed]]
    start = int(rng.integers(num_blocks - num_needed + 1))
    return list(range(start, start + num_needed))


def _allocate(stored: tuple[int, ...], item_size_bytes: int, device: str) -> Any:
    """Memory of that shape that holds `POISON`, each page touched."""
    nbytes = int(np.prod(stored)) * item_size_bytes
    if device == "cpu":
        raw = np.full(nbytes, POISON, dtype=np.uint8)
        return raw.view(_DTYPES[item_size_bytes]).reshape(stored)
    import torch

    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    memory = torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)
    return memory.view(dtypes[item_size_bytes]).view(stored)


def _bytes(storage: Any) -> Any:
    if isinstance(storage, np.ndarray):
        return storage.reshape(-1).view(np.uint8)
    import torch

    return storage.view(-1).view(torch.uint8)


def _host(storage: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = storage if isinstance(storage, np.ndarray) else storage.cpu().numpy()
    return array


def _address(storage: Any) -> int:
    return int(storage.ctypes.data if isinstance(storage, np.ndarray) else storage.data_ptr())
