"""The rows of SGLang's `MetadataBuffers` (first token, log probabilities, ...) as one pool that is moved like a cache.

SGLang keeps a dozen tensors in host memory, of which a request has one row each. A worker's caches are all on one
device, so a mirror on the caches' device has these rows joined: the prefill side fills a row before it publishes the
prompt's end, the decode side spreads it over its own tensors once the load is complete, and before SGLang sees that.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from itertools import pairwise

import torch

from kvconnector.errors import GeometryError


class MetadataRows:
    """Both forms of the rows, and the copies between them.

    Args:
        addresses: Of SGLang's tensors in host memory.
        lengths: Their bytes.
        item_lengths: The bytes of one row of each.
        device: Where the caches are: "cpu" or "cuda:N".

    Raises:
        GeometryError: tensors with different numbers of rows.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        lengths: Sequence[int],
        item_lengths: Sequence[int],
        device: str,
    ) -> None:
        counts = {
            nbytes // row if row else 0 for nbytes, row in zip(lengths, item_lengths, strict=True)
        }
        if len(counts) != 1 or not min(counts):
            raise GeometryError("metadata tensors differ in their rows", rows=sorted(counts))
        self.num_rows = counts.pop()
        self._tensors = [
            _tensor_at(address, self.num_rows, row)
            for address, row in zip(addresses, item_lengths, strict=True)
        ]
        stops = [0]
        for row in item_lengths:
            stops.append(stops[-1] + row)
        self._spans = list(pairwise(stops))
        self.row_bytes = stops[-1] + -stops[-1] % 8
        self._mirror = _zeros(self.num_rows, self.row_bytes, device)

    @property
    def address(self) -> int:
        """Of the mirror."""
        return self._mirror.data_ptr()

    def fill(self, row: int) -> None:
        """Join a request's row in the mirror. On a GPU the copy is on the current stream."""
        joined = torch.zeros(self.row_bytes, dtype=torch.uint8)
        for tensor, (start, stop) in zip(self._tensors, self._spans, strict=True):
            joined[start:stop] = tensor[row]
        self._mirror[row].copy_(joined)

    def spread(self, row: int) -> None:
        """Copy a row that has arrived to SGLang's tensors. On a GPU this waits for the current stream."""
        joined = self._mirror[row].cpu()
        for tensor, (start, stop) in zip(self._tensors, self._spans, strict=True):
            tensor[row] = joined[start:stop]


def _tensor_at(address: int, num_rows: int, row_bytes: int) -> torch.Tensor:
    memory = (ctypes.c_ubyte * (num_rows * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, row_bytes)


def _zeros(num_rows: int, row_bytes: int, device: str) -> torch.Tensor:
    if device != "cpu":
        return torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=device)
    # pages of its own: they can become shared memory
    memory = mmap.mmap(-1, num_rows * row_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, row_bytes)
