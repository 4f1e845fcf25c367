"""The rows of SGLang's `MetadataBuffers` (first token, log probabilities, ...) as one pool that is moved like a cache.

SGLang keeps a dozen tensors in host memory, of which a request has one row each. A worker's caches are all on one
device, so a mirror on the caches' device has these rows joined: the prefill side fills a row before it publishes the
prompt's end, the decode side spreads it over its own tensors once the load is complete, and before SGLang sees that.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from kvconnector.errors import GeometryError


class MetadataRows:
    """Both forms of the rows, and the copies between them.

    Args:
        args: SGLang's `KVArgs`, which lists its tensors in host memory (`aux_data_ptrs` and what belongs to it).
        device: Where the caches are: "cpu" or "cuda:N".

    Raises:
        GeometryError: tensors with different numbers of rows.
    """

    def __init__(self, args: Any, device: str) -> None:
        lengths, self._widths = args.aux_data_lens, list(args.aux_item_lens)
        counts = {
            nbytes // row if row else 0 for nbytes, row in zip(lengths, self._widths, strict=True)
        }
        if len(counts) != 1 or not min(counts):
            raise GeometryError("metadata tensors differ in their rows", rows=sorted(counts))
        self.num_rows = counts.pop()
        self._tensors = [
            _rows((ctypes.c_ubyte * nbytes).from_address(address), self.num_rows)
            for address, nbytes in zip(args.aux_data_ptrs, lengths, strict=True)
        ]
        self.row_bytes = sum(self._widths) + -sum(self._widths) % 8
        # pages of its own: on a CPU they can become shared memory
        mirror = _rows(mmap.mmap(-1, self.num_rows * self.row_bytes), self.num_rows)
        self._mirror = mirror if device == "cpu" else mirror.to(device)
        self.address = self._mirror.data_ptr()

    def fill(self, row: int) -> None:
        """Join a request's row in the mirror. On a GPU the copy is on the current stream."""
        joined = torch.cat([tensor[row] for tensor in self._tensors])
        self._mirror[row, : len(joined)].copy_(joined)

    def spread(self, row: int) -> None:
        """Copy a row that has arrived to SGLang's tensors. On a GPU this waits for the current stream."""
        parts = self._mirror[row, : sum(self._widths)].cpu().split(self._widths)
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor[row] = part


def _rows(memory: ctypes.Array[ctypes.c_ubyte] | mmap.mmap, num_rows: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, -1)
