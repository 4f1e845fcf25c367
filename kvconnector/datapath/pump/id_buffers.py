"""Memory for the block ids of reads, which is lent to one read after another: on a GPU, pinned and device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnector.planning import GroupBlocks
from kvconnector_kernels.relayout import BlockIdsAt

MIN_IDS = 1 << 12
_ALIGN_BYTES = 16
"""Each group's ids begin at a multiple, as kernels may assume."""


@dataclass(frozen=True, slots=True, eq=False)
class IdBuffer:
    """Room for as many ids on the host, in the bytes of `here`, as on the device; on the CPU it is the same memory.
    `memory` owns both, and `stream` is the only one on which anything uses it.
    """

    here: memoryview
    here_address: int
    there_address: int
    memory: tuple[Any, ...]
    stream: int = 0

    def write(self, blocks: Sequence[GroupBlocks], device: str) -> tuple[list[BlockIdsAt], int]:
        """Put the ids of each group on the host. Returns where they will be on the device, and the bytes to be sent."""
        places: list[BlockIdsAt] = []
        at = 0
        for group in blocks:
            ids = group.wire_ids
            self.here[at : at + len(ids)] = ids
            places.append(BlockIdsAt(self.there_address + at, len(ids) // 4, device))
            at += _padded(len(ids))
        return places, at


class IdBuffers:
    """All buffers of one worker. They are as many and as long as the reads at any one time have needed, and are kept:
    allocating pinned memory takes longer than a small read.

    `allocate(num_ids, stream)` makes one, of memory that no kernel of anybody else's may still write.
    """

    def __init__(self, allocate: Callable[[int, int], IdBuffer]) -> None:
        self._allocate = allocate
        self._free: dict[tuple[int, int], list[IdBuffer]] = {}
        # whoever keeps these buffers keeps those that are lent as well
        self._lent: dict[int, IdBuffer] = {}

    def lend(
        self, blocks: Sequence[GroupBlocks], stream: int = 0, *, more_bytes: int = 0
    ) -> IdBuffer:
        """A buffer for the ids of `blocks` and `more_bytes` after them, to be used on a stream, that nobody else has
        until it is given back. What was sent to it before and never used comes before what is sent next.
        """
        nbytes = sum([_padded(len(group.wire_ids)) for group in blocks]) + more_bytes
        num_ids = max(MIN_IDS, 1 << (-(-nbytes // 4) - 1).bit_length())
        free = self._free.get((stream, num_ids))
        buffer = free.pop() if free else self._allocate(num_ids, stream)
        self._lent[buffer.there_address] = buffer
        return buffer

    def give_back(self, buffer: IdBuffer) -> None:
        """End a loan: no kernel that reads the buffer is under way or will be."""
        # our own invariant: two reads with one buffer would read each other's blocks
        del self._lent[buffer.there_address]
        self._free.setdefault((buffer.stream, buffer.here.nbytes // 4), []).append(buffer)


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN_BYTES
