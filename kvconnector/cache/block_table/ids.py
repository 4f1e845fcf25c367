"""Block ids on their way from the allocator into a table."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError

BlockIds = Sequence[int] | npt.NDArray[np.integer]
"""The allocator's ids of consecutive blocks of one request."""

MAX_BLOCK_ID = 2**31 - 1
"""Tables are int32."""


def stage_block_ids(block_ids: BlockIds, out: npt.NDArray[np.integer], ratio: int) -> None:
    """Write allocation ids to `out` once each is known to expand to kernel ids that an int32 holds.

    Raises:
        BlockIdError: an id is no integer, negative or too large.
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
