"""Staging memory: one arena for each direction, cut into equal slots.

One allocation per direction matters on GPUs: CUDA IPC maps whole allocations, so the first message maps all slots.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.device_memory import Fences, addresses_of
from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.errors import TransportError
from kvconnector.transport import Buffer
from kvconnector_kernels.pump import records as r

logger = logging.getLogger(__name__)


MAX_SLOTS = 16
WARM_UP_BYTES = 1 << 20
"""Bytes of a warm-up message, and so of scratch memory, unless slots are smaller."""


def slots_within(budget_bytes: int, slot_bytes: int, directions: int) -> int:
    """Return the number of slots of each direction that fit the budget beside scratch memory: at least one, and at most
    `MAX_SLOTS`. More do not move bytes faster, and fewer stay in cache.
    """
    room_bytes = budget_bytes // directions - _scratch_bytes(slot_bytes)
    return max(1, min(MAX_SLOTS, room_bytes // slot_bytes))


def _scratch_bytes(slot_bytes: int) -> int:
    return min(slot_bytes, WARM_UP_BYTES)


class SlotPool:
    """Slots of `slot_bytes` each on `device`, and scratch memory for warm-up messages, whose content is meaningless.
    `rows` are the slots as the compiled loop sees them. Not thread safe.

    Memory that the network may still read or write is quarantined: the slot gets other memory, allocated if necessary,
    so that one lost peer does not starve the others.

    Raises:
        TransportError: the device has no such memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: str) -> None:
        self.slot_bytes = slot_bytes
        self.device = device
        self._scratch_bytes = _scratch_bytes(slot_bytes) if num_slots else 0
        arena, address = _allocate(num_slots * slot_bytes + self._scratch_bytes, device)
        self._memory = [(arena, address + slot * slot_bytes) for slot in range(num_slots + 1)]
        self._spare: list[tuple[object, int]] = []
        self._quarantined: list[tuple[Callable[[], bool], tuple[object, int]]] = []
        self.rows: npt.NDArray[np.void] = np.zeros(num_slots, r.SLOT)
        self._states = r.numbers_of(self.rows)[:: r.SLOT.itemsize // 8]
        self.rows["program"] = -1
        self.rows["address"] = [address for _, address in self._memory[:-1]]

    def __repr__(self) -> str:
        states = self._states.tolist()
        detached = f", {states.count(r.DETACHED)} without memory" if r.DETACHED in states else ""
        return f"<Slots {self.num_free} of {len(states)} free, {self.num_busy} busy{detached}>"

    def attach(self, state: r.State, direction: str, fences: Fences) -> None:
        """Let the loop's `state` use the slots as its "send_slots" or "recv_slots". Copies set the `fences`."""
        self._fences = fences
        self.rows["fence"] = addresses_of(fences)
        setattr(state, direction, self.rows.ctypes.data)
        setattr(state, f"num_{direction}", len(self.rows))

    @property
    def num_free(self) -> int:
        """Number of slots that no program and no operation holds."""
        return self._states.tolist().count(r.FREE)

    @property
    def num_busy(self) -> int:
        """Number of slots that a program or an operation holds."""
        states = self._states.tolist()
        return len(states) - states.count(r.FREE) - states.count(r.DETACHED)

    def quarantine(self, slot: int, is_over: Callable[[], bool]) -> None:
        """Free a slot whose memory the network may use until `is_over`. It gets other memory once some is free."""
        self._quarantined.append((is_over, self._memory[slot]))
        self.rows["state"][slot], self.rows["program"][slot] = r.DETACHED, -1
        if self._spare:
            self._refill(slot, self._spare.pop())
            return
        try:
            self._refill(slot, _allocate(self.slot_bytes, self.device))
        except TransportError as error:
            logger.warning(
                "one staging slot less until the slot of a lost peer leaves quarantine: %s", error
            )

    def _refill(self, slot: int, memory: tuple[object, int]) -> None:
        self._memory[slot] = memory
        self.rows["address"][slot], self.rows["state"][slot] = memory[1], r.FREE

    def end_quarantines(self) -> None:
        """Reuse memory whose quarantine is over, first of all for slots that have no memory."""
        quarantined, self._quarantined = self._quarantined, []
        for is_over, memory in quarantined:
            if is_over():
                self._spare.append(memory)
            else:
                self._quarantined.append((is_over, memory))
        for slot in np.flatnonzero(self.rows["state"] == r.DETACHED).tolist():
            if self._spare:
                self._refill(slot, self._spare.pop())

    def address(self, slot: int) -> int:
        """Return the address of a slot's first byte."""
        return self._memory[slot][1]

    def scratch(self, max_bytes: int) -> Buffer:
        """Return memory for bytes without meaning: `max_bytes`, but no more than `WARM_UP_BYTES` or a slot has."""
        return self.buffer(-1, min(max_bytes, self._scratch_bytes))

    def buffer(self, slot: int, nbytes: int | None = None) -> Buffer:
        """Return the first `nbytes` of a slot, by default all, as a buffer of the transport."""
        owner, address = self._memory[slot]
        nbytes = self.slot_bytes if nbytes is None else nbytes
        return Buffer(address=address, nbytes=nbytes, device=self.device, owner=owner)


def _allocate(nbytes: int, device: str) -> tuple[object, int]:
    """Allocate resident memory: its owner, and its address, page aligned on the CPU. Raises TransportError."""
    if not nbytes:
        return None, 0
    try:
        if device.startswith("cuda"):
            # PyTorch's expandable segments cannot be mapped by a peer: UCX would copy through host memory
            memory = CudaDriver().allocate(int(device.partition(":")[2] or 0), nbytes)
            return memory, memory.address
        # resident from the start, so that no request pays for page faults and the process does not grow under load
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        array = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=np.uint8)
    except (OSError, ValueError, OverflowError) as exc:
        raise TransportError(f"no memory for staging: {exc}", nbytes=nbytes, device=device) from exc
    return array, array.ctypes.data
