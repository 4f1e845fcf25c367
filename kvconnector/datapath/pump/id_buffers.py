"""Memory for the block ids of reads on a GPU, both pinned host memory and device memory, lent to one read after
another.
"""

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
    """Room for the same number of ids on the host, in the bytes of `here`, and on the device. `memory` owns both, and
    one stream alone uses it. `free` are the buffers like it that are not lent.
    """

    here: memoryview
    here_address: int
    there_address: int
    memory: tuple[Any, ...]
    free: list[IdBuffer]

    def give_back(self) -> None:
        """Return the buffer. No kernel that reads it is under way, and none will be launched."""
        self.free.append(self)


class IdBuffers:
    """All buffers of one worker. They are as many and as long as the reads at any one time have needed, and are kept:
    allocating pinned memory takes longer than a small read. So each of the streams has one of `MIN_IDS` from the start.

    Args:
        allocate: Called with a number of ids, a stream and the free buffers like it, it makes one, of memory that no
            kernel of anyone else's may still write.
        num_streams: How many streams there are.
    """

    def __init__(
        self, allocate: Callable[[int, int, list[IdBuffer]], IdBuffer], num_streams: int
    ) -> None:
        self._allocate = allocate
        self._free: dict[tuple[int, int], list[IdBuffer]] = {}
        for stream in range(num_streams):
            buffer, *_ = self.lend([], stream)
            buffer.give_back()

    def lend(self, blocks: Sequence[GroupBlocks], stream: int) -> tuple[IdBuffer, list[int], int]:
        """Lend a buffer that nothing else uses until it is given back, with the ids of `blocks` on the host.

        Ids that were sent to it earlier and never used arrive before those that are sent next.

        Args:
            blocks: The blocks of each group.
            stream: The stream that will use the buffer.

        Returns:
            The buffer, the addresses of each group's ids on the device, and the bytes that all ids take.
        """
        places, nbytes = [0], 0
        for group in blocks:
            nbytes += -(-len(group.wire_ids) // _ALIGN_BYTES) * _ALIGN_BYTES
            places.append(nbytes)
        num_ids = max(MIN_IDS, 1 << (-(-nbytes // 4) - 1).bit_length())
        free = self._free.setdefault((stream, num_ids), [])
        buffer = free.pop() if free else self._allocate(num_ids, stream, free)
        for at, group in zip(places, blocks, strict=False):
            buffer.here[at : at + len(group.wire_ids)] = group.wire_ids
        return buffer, [buffer.there_address + at for at in places[:-1]], nbytes
