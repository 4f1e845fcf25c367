"""Staging memory: one arena for each direction, cut into equal slots that are reused, latest first.

One allocation per direction matters on GPUs: CUDA IPC maps whole allocations, so the first message maps all slots.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable

import numpy as np

from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.errors import ConfigError, TransportError
from kvconnector.transport import Buffer

logger = logging.getLogger(__name__)


MAX_SLOTS = 16


def slots_within(budget_bytes: int, slot_bytes: int, directions: int) -> int:
    """Slots of each direction that the budget pays for, the scratch slot included; at least one, at most `MAX_SLOTS`:
    more do not move bytes faster, and fewer stay in cache.
    """
    return max(1, min(MAX_SLOTS, budget_bytes // slot_bytes // directions - 1))


class SlotPool:
    """`num_slots` slots of `slot_bytes` each on `device`, and a scratch slot that nobody takes: warm-up messages, whose
    bytes mean nothing, are sent from it and received into it. Not thread safe.

    A slot that the network may still read or write is quarantined: other memory, allocated if need be, takes its place
    until that is over, so that one lost peer does not starve the others. Without such memory they share what is left.

    Raises:
        ConfigError: no slot, or slots without bytes.
        TransportError: the device has no such memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: str) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ConfigError("staging needs slots", num_slots=num_slots, slot_bytes=slot_bytes)
        self.slot_bytes = slot_bytes
        self.device = device
        self.num_slots = num_slots
        arena, address = _allocate((num_slots + 1) * slot_bytes, device)
        self._places = [(arena, address + slot * slot_bytes) for slot in range(num_slots + 1)]
        self._free = list(range(num_slots))
        self._spare: list[int] = []
        self._quarantined: list[tuple[Callable[[], bool], int]] = []
        self._num_missing = 0

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_busy(self) -> int:
        """Slots that somebody holds; those in quarantine have a free one in their place."""
        return self.num_slots - len(self._free)

    def take(self) -> int | None:
        """A free slot, the one used last if possible (its memory is warm), or None."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Return a slot that nothing reads or writes any more."""
        self._free.append(slot)

    def quarantine(self, slot: int, is_over: Callable[[], bool]) -> None:
        """Keep a taken slot until `is_over`; another one is free in its place, if there is memory for it."""
        self._quarantined.append((is_over, slot))
        if not self._spare:
            try:
                self._places.append(_allocate(self.slot_bytes, self.device))
            except TransportError as error:
                logger.warning(
                    "a slot of staging memory less until a lost peer's is out of quarantine: %s",
                    error,
                )
                self._num_missing += 1
                return
            self._spare.append(len(self._places) - 1)
        self._free.append(self._spare.pop())

    def end_quarantines(self) -> None:
        """Let slots whose quarantine is over be used again."""
        if not self._quarantined:
            return
        ended = [(is_over(), is_over, slot) for is_over, slot in self._quarantined]
        self._quarantined = [(is_over, slot) for over, is_over, slot in ended if not over]
        for over, _, slot in ended:
            if over and self._num_missing:
                self._num_missing -= 1
                self._free.append(slot)
            elif over:
                self._spare.append(slot)

    def address(self, slot: int) -> int:
        """Address of a slot's first byte."""
        return self._places[slot][1]

    def scratch(self, max_bytes: int) -> Buffer:
        """Memory for bytes without meaning, at most a slot's."""
        return self.buffer(self.num_slots, min(max_bytes, self.slot_bytes))

    def buffer(self, slot: int, nbytes: int) -> Buffer:
        """The first `nbytes` of a slot, as the transport wants them."""
        owner, address = self._places[slot]
        return Buffer(address=address, nbytes=nbytes, device=self.device, owner=owner)


def _allocate(nbytes: int, device: str) -> tuple[object, int]:
    """Memory that is resident, and its address; page aligned on the CPU.

    Raises:
        TransportError: there is no such memory.
    """
    try:
        if device.startswith("cuda"):
            # PyTorch's expandable segments cannot be mapped by a peer: UCX would copy through host memory
            memory = CudaDriver().allocate(int(device.partition(":")[2] or 0), nbytes)
            return memory, memory.address
        # present from the start: no request pays for page faults, and the process does not grow under load
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        array = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=np.uint8)
    except (OSError, ValueError, OverflowError) as exc:
        raise TransportError(f"no memory for staging: {exc}", nbytes=nbytes, device=device) from exc
    return array, array.ctypes.data
