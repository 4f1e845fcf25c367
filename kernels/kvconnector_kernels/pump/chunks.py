"""What the chunks of a program have in common, in one call: numpy takes one for every field."""

from __future__ import annotations

from typing import Any

from numba import njit


@njit("UniTuple(int64, 6)(int32[:,::1])", cache=True)
def measure_chunks(chunks: Any) -> Any:
    """Of chunks, int32 `[chunk, field of CHUNK_DTYPE]`: how many of the first differ in their parts only; behind which
    part the last of these ends, how many parts the largest has; and the segment, first token and tokens of all of them.
    """
    num_alike = part_stop = most_parts = segment = token_start = num_tokens = 0
    for index in range(len(chunks)):
        chunk = chunks[index]
        if index == 0:
            segment, token_start, num_tokens = chunk[0], chunk[3], chunk[4]
        elif chunk[0] != segment or chunk[3] != token_start or chunk[4] != num_tokens:
            break
        num_alike += 1
        part_stop = max(part_stop, chunk[1] + chunk[2])
        most_parts = max(most_parts, chunk[2])
    return num_alike, part_stop, most_parts, segment, token_start, num_tokens
