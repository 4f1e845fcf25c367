"""Memory for the block ids of reads, which is lent to one read after another: on a GPU, pinned and device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnector.planning import GroupBlocks

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
    ) -> tuple[IdBuffer, list[int], int]:
        """A buffer that nobody else has until it is given back, with the ids of `blocks` on the host.

        What was sent to it before and never used comes before what is sent next.

        Args:
            blocks: the blocks of each group.
            stream: what the buffer is to be used on.
            more_bytes: room after the ids.

        Returns:
            The buffer, where the ids of each group will be on the device, and the bytes that all ids take.
        """
        places, nbytes = [0], 0
        for group in blocks:
            nbytes += -(-len(group.wire_ids) // _ALIGN_BYTES) * _ALIGN_BYTES
            places.append(nbytes)
        num_ids = max(MIN_IDS, 1 << (-(-(nbytes + more_bytes) // 4) - 1).bit_length())
        free = self._free.get((stream, num_ids))
        buffer = free.pop() if free else self._allocate(num_ids, stream)
        self._lent[buffer.there_address] = buffer
        for at, group in zip(places, blocks, strict=False):
            buffer.here[at : at + len(group.wire_ids)] = group.wire_ids
        return buffer, [buffer.there_address + at for at in places[:-1]], nbytes

    def give_back(self, buffer: IdBuffer | None) -> None:
        """End a loan, if there was one: no kernel that reads the buffer is under way or will be."""
        if buffer is None:
            return
        # our own invariant: two reads with one buffer would read each other's blocks
        del self._lent[buffer.there_address]
        self._free.setdefault((buffer.stream, buffer.here.nbytes // 4), []).append(buffer)
