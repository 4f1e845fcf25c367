"""SGLang's per-request metadata (first token, log probabilities, ...) as a pool that is transferred like a cache.

SGLang's `MetadataBuffers` are a dozen tensors in host memory with one row per request. A worker's pools must all be on
one device, so the rows are joined in a mirror on the caches' device. The prefill side fills the mirror's row before it
publishes the end of the prompt. The decode side copies the row to its own tensors before SGLang sees the load complete.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch

from kvconnector.errors import GeometryError

PLAIN_COLUMNS, MASK_COLUMNS = 10, 3
KNOWN_COLUMNS = (10, 11, 13, 14)
"""How many there are, plain, for sparse attention, and each with sampling masks."""
HIDDEN = 2
"""Place of the hidden state among the seeds."""
UNUSED_HIDDEN_BYTES = 64
"""Bytes of a hidden state where nobody speculates: SGLang allocates 16 elements."""


class MetadataRows:
    """SGLang's metadata tensors, their mirror, and the copies between the two.

    `address`, `num_rows` and `row_bytes` describe the mirror, uint8 `[num_rows, row_bytes]`. A row begins with
    `own_bytes` that every engine has. `seed_bytes` follow that only engines with speculative decoding use: what their
    draft model needs of the prompt's last step. Without it there are none.

    Args:
        args: SGLang's `KVArgs`, whose `aux_data_ptrs`, `aux_data_lens` and `aux_item_lens` list the tensors.
        device: The caches' device: "cpu" or "cuda:N".

    Raises:
        GeometryError: the tensors have different numbers of rows, or there are more than are known.
    """

    def __init__(self, args: Any, device: str) -> None:
        lengths, self._widths = args.aux_data_lens, list(args.aux_item_lens)
        counts = {
            nbytes // row if row else 0 for nbytes, row in zip(lengths, self._widths, strict=True)
        }
        if len(counts) != 1 or not min(counts):
            raise GeometryError("metadata tensors differ in their rows", rows=sorted(counts))
        self.num_rows = counts.pop()
        tensors = [
            _rows((ctypes.c_ubyte * nbytes).from_address(address), self.num_rows)
            for address, nbytes in zip(args.aux_data_ptrs, lengths, strict=True)
        ]
        seeds = _seed_columns(self._widths)
        speculates = bool(args.num_draft_entries) or (
            len(seeds) > HIDDEN and self._widths[seeds[HIDDEN]] > UNUSED_HIDDEN_BYTES
        )
        own = [at for at in range(len(tensors)) if at not in seeds]
        order = [*own, *seeds] if speculates else own
        self._tensors = [tensors[at] for at in order]
        self._widths = [self._widths[at] for at in order]
        own_bytes = sum(self._widths[: len(own)])
        seed_bytes = sum(self._widths[len(own) :])
        self.own_bytes, self.seed_bytes = (each + -each % 8 for each in (own_bytes, seed_bytes))
        self._paddings = own_bytes, self.own_bytes - own_bytes, len(own)
        self.row_bytes = self.own_bytes + self.seed_bytes
        # pages of its own: on a CPU they can become shared memory
        mirror = _rows(mmap.mmap(-1, self.num_rows * self.row_bytes), self.num_rows)
        self._mirror = mirror if device == "cpu" else mirror.to(device)
        self.address = self._mirror.data_ptr()

    def fill(self, row: int) -> None:
        """Copy a request's row to the mirror, on the current stream of a GPU."""
        _, padding, num_own = self._paddings
        parts = [tensor[row] for tensor in self._tensors]
        parts.insert(num_own, torch.zeros(padding, dtype=torch.uint8))
        joined = torch.cat(parts)
        self._mirror[row, : len(joined)].copy_(joined)

    def clear(self, row: int) -> None:
        """Clear the mirror's row before a load, which may bring no seeds, or nothing of it: it may be an earlier
        request's.
        """
        self._mirror[row].zero_()

    def spread(self, row: int) -> bool:
        """Copy a received row from the mirror to SGLang's tensors. On a GPU this waits for the current stream.

        Returns:
            False if nothing has come since `clear`: the row has no room. Then nothing is copied.
        """
        own_bytes, _, num_own = self._paddings
        found = self._mirror[row].cpu()
        own = found[:own_bytes].split(self._widths[:num_own])
        if not own[-1].any():
            return False
        seed_widths = self._widths[num_own:]
        seeds = (
            found[self.own_bytes : self.own_bytes + sum(seed_widths)].split(seed_widths)
            if seed_widths
            else ()
        )
        for tensor, part in zip(self._tensors, (*own, *seeds), strict=True):
            tensor[row] = part
        return True

    def put_first_token(self, row: int, token: int, room: int) -> None:
        """Fill SGLang's row of a request with the prompt's first token alone: no log probabilities, no seeds."""
        for tensor in self._tensors:
            tensor[row] = 0
        *_, rooms = self._tensors[: self._paddings[2]]
        for tensor, number in ((self._tensors[0], token), (rooms, room)):
            written = number.to_bytes(min(8, tensor.shape[1]), sys.byteorder)
            tensor[row, : len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)


def _seed_columns(widths: Sequence[int]) -> list[int]:
    """Return which of `MetadataBuffers.get_buf_infos` are a draft model's: probabilities, tokens, hidden states and,
    for sparse attention, selected tokens. Before them come 6 tensors, or 9 with sampling masks; the room is the last.
    Raises GeometryError: there are as many as in no release that is known, so none can be told by its place.
    """
    if len(widths) < PLAIN_COLUMNS:
        return []
    if len(widths) not in KNOWN_COLUMNS:
        raise GeometryError(
            "this release of SGLang has a row of metadata whose columns are not known: use a release that was tested",
            columns=len(widths),
            known=KNOWN_COLUMNS,
        )
    first = 6 if len(widths) < PLAIN_COLUMNS + MASK_COLUMNS else 6 + MASK_COLUMNS
    return [*range(first, len(widths) - 1)]


def _rows(memory: ctypes.Array[ctypes.c_ubyte] | mmap.mmap, num_rows: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, -1)
