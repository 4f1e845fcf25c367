"""SGLang's per-request metadata (first token, log probabilities, ...) as a pool that is transferred like a cache.

SGLang's `MetadataBuffers` are a dozen tensors in host memory with one row per request. A worker's pools must all be on
one device, so the rows are joined in a mirror on the caches' device. The prefill side fills the mirror's row before it
publishes the end of the prompt. The decode side copies the row to its own tensors before SGLang sees the load complete.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from kvconnector.errors import GeometryError


class MetadataRows:
    """SGLang's metadata tensors, their mirror, and the copies between the two.

    `address`, `num_rows` and `row_bytes` describe the mirror, uint8 `[num_rows, row_bytes]`.

    Args:
        args: SGLang's `KVArgs`, whose `aux_data_ptrs`, `aux_data_lens` and `aux_item_lens` list the tensors.
        device: The caches' device: "cpu" or "cuda:N".

    Raises:
        GeometryError: the tensors have different numbers of rows.
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
        """Copy a request's row to the mirror, on the current stream of a GPU."""
        joined = torch.cat([tensor[row] for tensor in self._tensors])
        self._mirror[row, : len(joined)].copy_(joined)

    def spread(self, row: int) -> None:
        """Copy a received row from the mirror to SGLang's tensors. On a GPU this waits for the current stream."""
        parts = self._mirror[row, : sum(self._widths)].cpu().split(self._widths)
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor[row] = part


def _rows(memory: ctypes.Array[ctypes.c_ubyte] | mmap.mmap, num_rows: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, -1)
