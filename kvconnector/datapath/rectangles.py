"""What a read brings, as a few rectangles of rows and tokens instead of many chunks."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector_kernels.relayout import RelayoutError

# columns of `CHUNK_DTYPE`: the first part and token, and how many of each
_STARTS, _COUNTS, _NUM_COLUMNS = [1, 3], [2, 4], 5


class Rectangle(msgspec.Struct, frozen=True):
    """What a segment of a read brings: rows of its window from `part_start`, of its stripe from `token_start`."""

    segment: int
    part_start: int
    num_parts: int
    token_start: int
    num_tokens: int


def rectangles_of(chunks: npt.NDArray[np.void], num_segments: int) -> tuple[Rectangle, ...]:
    """The chunks of each segment, put together. They have dtype `planning.CHUNK_DTYPE`.

    Raises:
        RelayoutError: those of a segment are no rectangle of rows and tokens.
    """
    rectangles = []
    for index in range(num_segments):
        mine = chunks if num_segments == 1 else chunks[chunks["segment"] == index]
        if len(mine):
            rectangles.append(_rectangle_of(index, mine))
    return tuple(rectangles)


def _rectangle_of(index: int, chunks: npt.NDArray[np.void]) -> Rectangle:
    numbers = np.ascontiguousarray(chunks).view(np.int32).reshape(-1, _NUM_COLUMNS).astype(np.int64)
    starts, counts = numbers[:, _STARTS], numbers[:, _COUNTS]
    part_start, token_start = starts.min(axis=0).tolist()
    part_stop, token_stop = (starts + counts).max(axis=0).tolist()
    num_parts, num_tokens = part_stop - part_start, token_stop - token_start
    # chunks never overlap, so as much area is the same area
    if int(counts.prod(axis=1).sum()) != num_parts * num_tokens:
        raise RelayoutError(f"the chunks of segment {index} are no rectangle of rows and tokens")
    return Rectangle(index, part_start, num_parts, token_start, num_tokens)
