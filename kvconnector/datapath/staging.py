"""Staging memory: one arena for each direction, cut into equal slots.

One allocation per direction matters on GPUs: CUDA IPC maps whole allocations, so the first message maps all slots.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable

import numpy as np

from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.errors import TransportError
from kvconnector.transport import Buffer

logger = logging.getLogger(__name__)


MAX_SLOTS = 16
WARM_UP_BYTES = 1 << 20
"""Of a warm-up message, and so of scratch memory."""


def slots_within(budget_bytes: int, slot_bytes: int, directions: int) -> int:
    """Slots of each direction that the budget pays for, beside scratch memory; at least one, at most `MAX_SLOTS`: more
    do not move bytes faster, and fewer stay in cache.
    """
    room_bytes = budget_bytes // directions - _scratch_bytes(slot_bytes)
    return max(1, min(MAX_SLOTS, room_bytes // slot_bytes))


def _scratch_bytes(slot_bytes: int) -> int:
    return min(slot_bytes, WARM_UP_BYTES)


class SlotPool:
    """Memory of `num_slots` slots of `slot_bytes` each on `device`, and scratch memory: warm-up messages, whose bytes
    mean nothing, are sent from it and received into it. Not thread safe.

    Memory that the network may still read or write is quarantined: the slot gets other memory, allocated if need be, so
    that one lost peer does not starve the others.

    Raises:
        TransportError: the device has no such memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: str) -> None:
        self.slot_bytes = slot_bytes
        self.device = device
        self.num_slots = num_slots
        self._scratch_bytes = _scratch_bytes(slot_bytes)
        arena, address = _allocate(num_slots * slot_bytes + self._scratch_bytes, device)
        self._memory = [(arena, address + slot * slot_bytes) for slot in range(num_slots + 1)]
        self._spare: list[tuple[object, int]] = []
        self._quarantined: list[tuple[Callable[[], bool], tuple[object, int]]] = []

    def quarantine(self, slot: int, is_over: Callable[[], bool]) -> bool:
        """Keep a slot's memory until `is_over`, and give the slot other memory. False if there is none yet."""
        self._quarantined.append((is_over, self._memory[slot]))
        if self.refill(slot):
            return True
        try:
            self._memory[slot] = _allocate(self.slot_bytes, self.device)
        except TransportError as error:
            logger.warning(
                "a slot of staging memory less until a lost peer's is out of quarantine: %s", error
            )
            return False
        return True

    def refill(self, slot: int) -> bool:
        """Give a slot memory that is out of quarantine, if there is some. Returns True if there is."""
        if self._spare:
            self._memory[slot] = self._spare.pop()
            return True
        return False

    def end_quarantines(self) -> None:
        """Let memory whose quarantine is over be used again."""
        quarantined, self._quarantined = self._quarantined, []
        for is_over, memory in quarantined:
            if is_over():
                self._spare.append(memory)
            else:
                self._quarantined.append((is_over, memory))

    def address(self, slot: int) -> int:
        """Address of a slot's first byte."""
        return self._memory[slot][1]

    def scratch(self, max_bytes: int) -> Buffer:
        """Memory for bytes without meaning, at most `WARM_UP_BYTES` and at most a slot's."""
        return self.buffer(self.num_slots, min(max_bytes, self._scratch_bytes))

    def buffer(self, slot: int, nbytes: int) -> Buffer:
        """The first `nbytes` of a slot, as the transport wants them."""
        owner, address = self._memory[slot]
        return Buffer(address=address, nbytes=nbytes, device=self.device, owner=owner)


def _allocate(nbytes: int, device: str) -> tuple[object, int]:
    """Resident memory and its address; page aligned on the CPU. Raises TransportError: there is none."""
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
