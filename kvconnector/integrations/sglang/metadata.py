"""SGLang's per-request metadata (first token, log probabilities, ...) as a pool that is transferred like a cache.

SGLang's `MetadataBuffers` are a dozen tensors in host memory with one row per request. A worker's pools must all be on
one device, so the rows are joined in a mirror on the caches' device. The prefill side fills the mirror's row before it
publishes the end of the prompt. The decode side copies the row to its own tensors before SGLang sees the load complete.

SGLang lists the tensors without saying which is which, and another release may list others. So at the start a hook
notes the attribute that each of them is. An attribute that we do not know is refused. In the mirror the columns have an
order of our own, so the rows of two releases fit each other whatever order SGLang has.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from kvconnector.errors import GeometryError

logger = logging.getLogger(__name__)

ROOM, HIDDEN = "bootstrap_room", "output_hidden_states"
MASKS = (
    "output_token_sampling_mask_len",
    "output_token_sampling_mask_idx",
    "output_token_sampling_logprobs",
)
OWN_COLUMNS = (
    "output_ids",
    "cached_tokens",
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    *MASKS,
    ROOM,
)
NEEDED = ("output_ids", ROOM)
"""A request cannot go on without them. The room, which is never 0, also shows that a row has come."""
SEED_COLUMNS = ("output_topk_p", "output_topk_index", HIDDEN, "output_dsa_topk_indices")
"""What only a draft model needs. The last is for sparse attention."""
NEEDED_SEEDS = SEED_COLUMNS[:3]
UNUSED_HIDDEN_BYTES = 64
"""Bytes of a hidden state where nobody speculates: SGLang allocates 16 elements."""
KNOWN = (*OWN_COLUMNS, *SEED_COLUMNS)
"""The attributes of `MetadataBuffers` that we know, in the mirror's order. That is also the order of releases 0.5.21 to
0.5.23, so rows fit those of earlier builds of kvconnector, which took the columns as SGLang lists them.
"""


class NamedPointers(list[int]):
    """Addresses of tensors, with the tensors' names: "" for one that has none.

    Args:
        pointers: The addresses.
        names: As many names.
    """

    def __init__(self, pointers: Iterable[int], names: Iterable[str]) -> None:
        super().__init__(pointers)
        self.names = tuple(names)


def name_columns(found: tuple[Any, ...], buffers: Any) -> tuple[Any, ...]:
    """Add the names of its attributes to the addresses that `MetadataBuffers.get_buf_infos` returns: a hook after it.

    Args:
        found: The tensors' addresses, and lists that stay as they are.
        buffers: The `MetadataBuffers`.

    Returns:
        The same, with `NamedPointers` first.
    """
    pointers, *others = found
    names: dict[int, str] = {}
    for name, value in vars(buffers).items():
        # a known name stays if a release gives the same tensor a second one
        if isinstance(value, torch.Tensor) and names.get(value.data_ptr()) not in KNOWN:
            names[value.data_ptr()] = name
    return NamedPointers(pointers, [names.get(each, "") for each in pointers]), *others


def forget_earlier_request(buffers: Any, req: Any) -> None:
    """Empty the columns of a row that SGLang fills only if the request asks for them: a hook before `set_buf`.

    A decode server may be asked for more than its prefill server, as when a router leaves log probabilities out of the
    prefill request. It would then answer with those of the request that had the row before. Emptied, the row has NaN,
    which SGLang's answers show as null, and an empty sampling mask.

    Args:
        buffers: The `MetadataBuffers`.
        req: The request, with its row's number in `metadata_buffer_index`.
    """
    row = req.metadata_buffer_index
    for name in ("output_token_logprobs_val", "output_top_logprobs_val", MASKS[2]):
        if (values := getattr(buffers, name, None)) is not None:
            values[row].fill_(math.nan)
    for name in ("output_token_logprobs_idx", "output_top_logprobs_idx", MASKS[0]):
        if (values := getattr(buffers, name, None)) is not None:
            values[row].zero_()


class MetadataRows:
    """SGLang's metadata tensors, their mirror, and the copies between the two.

    `address`, `num_rows` and `row_bytes` describe the mirror, uint8 `[num_rows, row_bytes]`. A row begins with
    `own_bytes` that every engine has. `seed_bytes` follow that only engines with speculative decoding use: what their
    draft model needs of the prompt's last step. Without it there are none. In both the columns have the order of
    `KNOWN`, whatever SGLang's is. `lacks` names the columns that every known release has and this one has not.

    Args:
        args: SGLang's `KVArgs`, whose `aux_data_ptrs`, `aux_data_lens` and `aux_item_lens` list the tensors. The
            first are `NamedPointers`.
        device: The caches' device: "cpu" or "cuda:N".

    Raises:
        GeometryError: the tensors have different numbers of rows, or their names are not known, or one is missing
            that is needed.
    """

    def __init__(self, args: Any, device: str) -> None:
        lengths, self._widths = args.aux_data_lens, list(args.aux_item_lens)
        counts = {
            nbytes // row if row else 0 for nbytes, row in zip(lengths, self._widths, strict=True)
        }
        if len(counts) != 1 or not min(counts):
            raise GeometryError(
                "metadata tensors have different numbers of rows", rows=sorted(counts)
            )
        self.num_rows = counts.pop()
        tensors = [
            _rows((ctypes.c_ubyte * nbytes).from_address(address), self.num_rows)
            for address, nbytes in zip(args.aux_data_ptrs, lengths, strict=True)
        ]
        places = _places(getattr(args.aux_data_ptrs, "names", ()), len(tensors))
        own = [places[name] for name in OWN_COLUMNS if name in places]
        self.lacks = _lacking(places)
        seeds: list[int] = []
        if missing := [name for name in NEEDED_SEEDS if name not in places]:
            logger.warning(
                "SGLang's metadata has no %s: nothing of what a draft model needs is moved", missing
            )
        else:
            seeds = [places[name] for name in SEED_COLUMNS if name in places]
        speculates = bool(seeds) and (
            bool(args.num_draft_entries) or self._widths[places[HIDDEN]] > UNUSED_HIDDEN_BYTES
        )
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


def _places(names: Sequence[str], num_columns: int) -> dict[str, int]:
    """Return where each column is. Raises GeometryError: a column is not known, or one is missing."""
    if len(names) != num_columns:
        raise GeometryError(
            "nothing says which column of SGLang's metadata is which: our hook after"
            " MetadataBuffers.get_buf_infos did"
            " not run, so use a release that was tested",
            columns=num_columns,
            named=len(names),
        )
    unknown = [
        name or f"column {at} without a name" for at, name in enumerate(names) if name not in KNOWN
    ]
    if unknown:
        raise GeometryError(
            "this release of SGLang has metadata that kvconnector does not know: use a release that was tested",
            unknown=unknown,
        )
    places = {name: at for at, name in enumerate(names)}
    missing = [name for name in NEEDED if name not in places]
    if missing or len(places) < num_columns:
        raise GeometryError(
            "this release of SGLang lacks metadata, or has some twice: use a release that was tested",
            missing=missing,
            columns=names,
        )
    return places


def _lacking(names: Container[str]) -> tuple[str, ...]:
    """Return the columns of a known release that are missing. Sampling masks, all three, are there only if used."""
    needs_masks = any(name in names for name in MASKS)
    expected = [name for name in OWN_COLUMNS if needs_masks or name not in MASKS]
    return tuple(name for name in expected if name not in names)


def _rows(memory: ctypes.Array[ctypes.c_ubyte] | mmap.mmap, num_rows: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, -1)
