"""Staging memory when there is no more of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvconnector.datapath import staging
from kvconnector.datapath.pump.copies_cpu import CpuCopies
from kvconnector.datapath.pump.machine import Slots
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import TransportError
from kvconnector_kernels.pump import records as r
from tests.unit.datapath.caches import Caches, Shape

SLOT_BYTES = 4096


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> SlotPool:
    """Three slots, after which the device is full."""
    pool = SlotPool(3, SLOT_BYTES, "cpu")

    def refuse(nbytes: int, device: str) -> tuple[object, int]:
        raise TransportError("no memory for staging", nbytes=nbytes, device=device)

    monkeypatch.setattr(staging, "_allocate", refuse)
    return pool


def test_rows_of_slots_wait_for_memory(pool: SlotPool) -> None:
    over: list[None] = []
    shape = Shape()
    copies = CpuCopies(Caches(shape, seed=1).pools, SLOT_BYTES)
    slots = Slots(np.zeros((), r.STATE), "recv_slots", pool, copies)
    addresses = set(slots.rows["address"].tolist())
    slots.rows["state"][:2] = r.POSTED
    for slot in range(2):
        slots.quarantine(slot, lambda: bool(over))
    assert slots.num_free == 1
    slots.end_quarantines()
    assert slots.num_free == 1
    over.append(None)
    slots.end_quarantines()
    assert slots.num_free == 3
    assert set(slots.rows["address"].tolist()) == addresses
