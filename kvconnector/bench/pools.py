"""A rank's caches, with contents that another process can make again and compare.

Element (layer, part, token, head, dim) of a sequence depends on the seed alone. So one engine can write a sequence into
its blocks, and another can check its own blocks, whatever the shapes, layouts and block sizes of the two. Contents are
made and compared where the caches are.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.bench.shapes import Layout
from kvconnector.datapath import CacheGroup
from kvconnector.errors import ConfigError
from kvconnector.layout import KVView
from kvconnector.topology import GroupGeometry, PartGeometry
from kvconnector_kernels import relayout

POISON = 0xA5


def random_values(part: PartGeometry, seed: Sequence[int], rows: int) -> npt.NDArray[Any]:
    """Return random integers `[rows, total_heads, head_dim]` of the item's size; more rows begin with the same ones."""
    shape = (rows, part.total_heads, part.head_dim)
    nbytes = math.prod(shape) * part.item_size_bytes
    raw = np.random.SFC64(seed).random_raw(-(-nbytes // 8)).view(np.uint8)[:nbytes]
    return raw.view(f"int{8 * part.item_size_bytes}").reshape(shape)


class RankPools:
    """The caches of one group of one rank on `device`, poisoned; `storage` has the bytes of each layer's parts, in an
    array or a GPU tensor. `written` is the group of the engine that writes sequences, if its elements may have another
    type or other scales.
    """

    def __init__(
        self,
        geometry: GroupGeometry,
        layout: Layout,
        *,
        num_blocks: int,
        device: str,
        written: GroupGeometry | None = None,
    ) -> None:
        self._written = geometry if written is None else written
        self.num_blocks = num_blocks
        self.device = device
        self.geometry = geometry
        self._layout = layout
        self.storage = {
            (layer, index): _allocate(num_blocks * self.block_bytes(index), device)
            for layer in geometry.layers
            for index in range(len(geometry.parts))
        }

    def cache_group(self) -> CacheGroup:
        """Return the group that a worker registers."""
        parts = range(len(self.geometry.parts))
        views = {
            layer: tuple(self._view(self.storage[layer, part], part) for part in parts)
            for layer in self.geometry.layers
        }
        return CacheGroup(self.geometry, views, self.device)

    def block_bytes(self, part: int) -> int:
        """Return the bytes of one block of a part, by its index."""
        return self.geometry.block_size * self.geometry.parts[part].token_bytes

    def addresses(self) -> list[int]:
        """Return the address of every part, layer by layer."""
        return [_address(storage) for storage in self.storage.values()]

    def poison(self) -> None:
        for storage in self.storage.values():
            storage[...] = POISON

    def write(self, seed: int, block_ids: Sequence[int], num_tokens: int) -> None:
        """Write the rank's part of a sequence into its last blocks, `block_ids`, with zeros after the last token."""
        for _, elements, values in self._contents(seed, len(block_ids), num_tokens):
            ids = _placed(values, np.asarray(block_ids))
            blocks = elements[ids]
            rows = blocks.reshape(-1, *values.shape[1:])
            rows[: len(values)], rows[len(values) :] = values, 0
            elements[ids] = rows.reshape(blocks.shape)

    def mismatch(
        self, seed: int, block_ids: Sequence[int], num_tokens: int, *, first_token: int = 0
    ) -> str:
        """Return where these blocks differ from the sequence, from its `first_token` on, or the others from poison;
        empty if nowhere. A window may begin inside a block.
        """
        unit = self.geometry.virtual_block_tokens
        skipped = max(0, first_token - (-(-num_tokens // unit) - len(block_ids)) * unit)
        unused = np.setdiff1d(np.arange(self.num_blocks), np.asarray(block_ids))
        for where, elements, values in self._contents(seed, len(block_ids), num_tokens):
            ids, others = (_placed(values, np.asarray(each)) for each in (block_ids, unused))
            found, held = elements[ids].reshape(-1, *values.shape[1:]), len(values)
            poison = int.from_bytes(bytes([POISON] * values.itemsize), "little", signed=True)
            differs = found[skipped:held] != values[skipped:]
            if differs.any():
                wrong = differs.any(2).any(1).tolist()
                slot = skipped + wrong.index(True)
                return f"{where}: {sum(wrong)} of {held} tokens differ, first that in slot {slot}"
            if (found[held:] != poison).any():
                return f"{where}: the room after the last token was written"
            if (elements[others] != poison).any():
                return f"{where}: a block of another request was written"
        return ""

    def _contents(
        self, seed: int, num_blocks: int, num_tokens: int
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield, for each part, its name, its elements `[block, token, head, head_dim]` in any layout, and in the same
        memory the contents of the last `num_blocks` blocks of a sequence, `[tokens, heads, head_dim]`: the rank's heads
        of its own tokens. Each part has the elements of the sequence, changed by a key for each head and dimension.
        """
        group, tokens = self.geometry, self.geometry.block_size
        unit = group.virtual_block_tokens
        first = max(0, -(-num_tokens // unit) - num_blocks) * unit
        turn = np.arange(first, num_tokens) // group.interleave_tokens % group.dcp_size
        sequences: dict[PartGeometry, Any] = {}
        for (layer, index), storage in self.storage.items():
            part = group.parts[index]
            heads, dim, own = part.num_heads, part.head_dim, slice(part.head_start, part.head_stop)
            # a soak's other release may not know element types
            typed = {
                name: getattr(self._written.parts[index], name)
                for name in ("element", "item_size_bytes")
                if hasattr(part, name)
            }
            source = msgspec.structs.replace(part, **typed)
            alike = msgspec.structs.replace(source, name="")
            if alike not in sequences:
                rows = random_values(source, [seed], num_tokens)[first:]
                sequences[alike] = _placed(storage, rows[turn == group.dcp_rank, own])
            keys = _placed(storage, random_values(source, [seed, layer, index], 1)[:, own])
            values = sequences[alike] ^ keys
            scales = _scale(self._written, index), _scale(group, index)
            if (typed.get("element", ""), scales[0]) != (getattr(part, "element", ""), scales[1]):
                values = _converted(values, source.element, part, scales)
            elements = storage.view(values.dtype)
            if self._layout == "NHD":
                elements = elements.reshape(-1, tokens, heads, dim)
            else:
                elements = elements.reshape(-1, heads, tokens, dim).swapaxes(1, 2)
            yield f"layer {layer}, part {group.parts[index].name}", elements, values

    def _view(self, storage: Any, index: int) -> KVView:
        part = self.geometry.parts[index]
        heads, tokens, dim = part.num_heads, self.geometry.block_size, part.head_dim
        item = part.item_size_bytes
        row = dim * item
        head, token = (row, heads * row) if self._layout == "NHD" else (tokens * row, row)
        shape, strides = (
            (self.num_blocks, heads, tokens, dim),
            (self.block_bytes(index), head, token, item),
        )
        return KVView(_address(storage), shape, strides, item)


def _scale(group: GroupGeometry, part: int) -> float:
    """Return the scale of a part's elements, which is the same for all layers and heads; 1 if there is none."""
    scales = getattr(group, "scales", ())  # a soak's other release may not know them
    return float(scales[0][part][0]) if scales else 1.0


def _converted(numbers: Any, source: str, target: PartGeometry, scales: tuple[float, float]) -> Any:
    """Return numbers `[tokens, heads, head_dim]` of one type in another one, or with another scale, by the kernels'
    oracle, which the kernels are compared with.
    """
    import torch

    given = torch.as_tensor(numbers)
    num_tokens, num_heads, head_dim = given.shape
    conversion = relayout.Conversion(
        source,
        target.element,
        np.full((1, num_heads, 2), scales, np.float32),
        str(given.device),
        rounding=target.rounding,
    )
    # the oracle takes one token after the other: to it, all of them are one
    src = given.transpose(0, 1).reshape(1, num_heads, 1, num_tokens * head_dim)
    stored = {1: torch.int8, 2: torch.int16}[target.item_size_bytes]
    dst = torch.empty_like(src, dtype=stored)
    relayout.relayout_naive(
        [src], [dst], [0], [0], num_heads=num_heads, num_tokens=1, conversion=conversion
    )
    found = dst.reshape(num_heads, num_tokens, head_dim).transpose(0, 1)
    return found.numpy() if isinstance(numbers, np.ndarray) else found


def _allocate(nbytes: int, device: str) -> Any:
    """Return `nbytes` bytes, with each page touched."""
    if device == "cpu":
        try:
            # in pages of its own, so that the worker can share it
            storage = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"no memory for a cache: {error}", nbytes=nbytes) from error
        storage[...] = POISON
        return storage
    import torch

    return torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)


def _placed(storage: Any, host: npt.NDArray[Any]) -> Any:
    """Return these elements in the same memory as `storage`."""
    if isinstance(storage, np.ndarray):
        return host
    import torch

    return torch.from_numpy(host).to(storage.device)


def _address(storage: Any) -> int:
    return int(storage.ctypes.data if isinstance(storage, np.ndarray) else storage.data_ptr())
