"""Block ids of reads on a GPU: pinned and device memory that is lent to a read, and then to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector_kernels.relayout import BlockIdsAt

MIN_IDS = 1 << 12
_ALIGN_IDS = 4
"""Each group's ids begin at 16 bytes, as kernels may assume."""


@dataclass(frozen=True, slots=True, eq=False)
class IdBuffer:
    """Room for as many ids on the host, in pinned memory, as on the GPU. `memory` is what both are in, and `stream`
    the only one on which anything uses it.
    """

    here: npt.NDArray[np.int32]
    here_address: int
    there_address: int
    memory: tuple[Any, ...]
    stream: int = 0

    def write(
        self, vectors: Sequence[npt.NDArray[np.int32]], device: str
    ) -> tuple[list[BlockIdsAt], int]:
        """Put the ids of each group on the host. Where they will be on the GPU, and how many bytes are to be sent."""
        places: list[BlockIdsAt] = []
        at = 0
        for ids in vectors:
            count = len(ids)
            self.here[at : at + count] = ids
            places.append(BlockIdsAt(self.there_address + 4 * at, count, device))
            at += _padded(count)
        return places, 4 * at


class IdBuffers:
    """All buffers of one worker. They are as many and as long as the reads at any one time have needed, and are kept:
    allocating pinned memory takes longer than a small read.

    `allocate` makes one of so many ids for a stream, of memory that no kernel of anybody else's may still write.
    """

    def __init__(self, allocate: Callable[[int, int], IdBuffer]) -> None:
        self._allocate = allocate
        self._free: dict[tuple[int, int], list[IdBuffer]] = {}
        # whoever keeps these buffers keeps those that are lent as well
        self._lent: dict[int, IdBuffer] = {}

    def lend(self, vectors: Sequence[npt.NDArray[np.int32]], stream: int) -> IdBuffer:
        """A buffer for these ids, to be used on a stream, that nobody else has until it is given back. What was sent to
        it before and never used comes in front of what is sent next.
        """
        count = sum(map(_padded, map(len, vectors)))
        num_ids = max(MIN_IDS, 1 << (count - 1).bit_length())
        free = self._free.get((stream, num_ids))
        buffer = free.pop() if free else self._allocate(num_ids, stream)
        self._lent[buffer.there_address] = buffer
        return buffer

    def give_back(self, buffer: IdBuffer) -> None:
        """End a loan: no kernel that reads the buffer is under way or will be."""
        # our own invariant: two reads with one buffer would read each other's blocks
        del self._lent[buffer.there_address]
        self._free.setdefault((buffer.stream, len(buffer.here)), []).append(buffer)


def _padded(count: int) -> int:
    return count + -count % _ALIGN_IDS
