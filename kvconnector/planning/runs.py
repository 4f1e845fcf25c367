"""Which chunks lie in a pool as they travel: one run of memory in the chunk's order, which needs no copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def run_addresses(
    rows: Int64s,
    block_ids: npt.NDArray[np.integer],
    *,
    block_size: int,
    head_start: int,
    token_start: int,
    counts: tuple[int, int, int],
    strides_bytes: tuple[int, int, int],
) -> Int64s:
    """Where each part's run begins; 0 for a part whose elements do not lie as they travel.

    `rows` is int64 `[num_parts, 5]`: address and block, head, token and dim strides. `counts` are heads, tokens and
    elements from `head_start` and from position `token_start` of `block_ids` on; `strides_bytes` are theirs in a
    chunk. Tokens of several blocks are one run if the blocks follow each other, by id and without gaps.
    """
    first, offset = divmod(token_start, block_size)
    last = (token_start + counts[1] - 1) // block_size
    ids = block_ids[first : last + 1].astype(np.int64)
    address, block_stride, *own_strides = rows.T
    if block_size == 1:
        own_strides[1] = block_stride  # there is no other token to step to
    is_run = np.ones(len(rows), bool)
    if last > first:
        is_run &= bool((np.diff(ids) == 1).all())
        is_run &= block_stride == block_size * own_strides[1]
    for count, own, travelling in zip(counts, own_strides, strides_bytes, strict=True):
        if count > 1:
            is_run &= own == travelling
    begins = address + ids[0] * block_stride + head_start * own_strides[0] + offset * own_strides[1]
    found: Int64s = np.where(is_run, begins, 0)
    return found


def joined_runs(
    addresses: Int64s, first_rows: Int64s, num_parts: Int64s, part_bytes: int
) -> Int64s:
    """Where each chunk begins whose parts' runs follow each other; 0 for the others.

    `addresses` are those of all parts of a table, see `run_addresses`. Chunk `i` has the `num_parts[i]` parts from
    `first_rows[i]` on, of `part_bytes` each.
    """
    is_apart = np.ones(len(addresses), np.int64)
    is_apart[1:] = np.diff(addresses) != part_bytes
    num_apart = np.cumsum(is_apart)
    begins = addresses[first_rows]
    is_joined = num_apart[first_rows + num_parts - 1] == num_apart[first_rows]
    # a part that is no run follows none, and none follows it: its address is no multiple away
    is_joined &= addresses[first_rows + num_parts - 1] == begins + (num_parts - 1) * part_bytes
    found: Int64s = np.where(is_joined & (begins != 0), begins, 0)
    return found
