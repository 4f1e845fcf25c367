"""Block ids on their way from the allocator into a table."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError, GeometryError

BlockIds = Sequence[int] | npt.NDArray[np.integer]
"""The allocator's ids of consecutive blocks of one request."""

MAX_BLOCK_ID = 2**31 - 1
"""Tables are int32."""


def check_every_group(block_ids: Sequence[BlockIds], num_groups: int) -> None:
    """Raise GeometryError unless there is a sequence of ids for each cache group."""
    if len(block_ids) != num_groups:
        raise GeometryError(
            "every cache group needs its block ids", num_groups=num_groups, num_given=len(block_ids)
        )


def check_at_least_one(**counts: int) -> None:
    """Raise GeometryError for a table without room."""
    for name, count in counts.items():
        if count < 1:
            raise GeometryError(f"{name} must be at least 1", **{name: count})


def check_room(held: int, count: int, limit: int) -> None:
    """Raise BlockIdError unless a row of that limit has room for so many more blocks."""
    if held + count > limit:
        raise BlockIdError(
            "the row has no room for these blocks",
            num_blocks=held,
            num_new_blocks=count,
            max_num_blocks=limit,
        )


def check_count(name: str, count: int, limit: int) -> None:
    """Raise GeometryError unless a table of that limit has room for so many."""
    if not 0 <= count <= limit:
        raise GeometryError(f"{name} is out of the table's range", **{name: count}, limit=limit)


def stage_block_ids(block_ids: BlockIds, out: npt.NDArray[np.integer], ratio: int) -> None:
    """Write allocation ids to `out` once each is known to expand to kernel ids that an int32 holds.

    Raises BlockIdError: an id is no integer, negative or too large.
    """
    if isinstance(block_ids, np.ndarray) and block_ids.dtype.kind not in "iu":
        raise BlockIdError("block ids must be integers", dtype=str(block_ids.dtype))
    if not len(block_ids):
        return
    try:
        if not isinstance(block_ids, np.ndarray):
            for block_id in block_ids:
                index(block_id)  # the assignment alone would truncate fractions
        out[:] = block_ids
    except (TypeError, ValueError, OverflowError) as error:
        raise BlockIdError("block ids must be integers", block_ids=block_ids) from error
    lowest, highest = int(out.min()), int(out.max())
    limit = (MAX_BLOCK_ID + 1) // ratio - 1
    if lowest < 0 or highest > limit:
        raise BlockIdError(
            "block ids are negative or too large", lowest=lowest, highest=highest, limit=limit
        )
