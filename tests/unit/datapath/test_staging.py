"""Staging memory within its budget and when it runs out, and caches that do not fit their geometry."""

import numpy as np
import pytest

from kvconnector.datapath import CacheGroup, Pools, staging
from kvconnector.datapath.staging import SlotPool, slots_within
from kvconnector.errors import GeometryError, TransportError
from kvconnector_kernels.pump import records as r
from tests.support.fakes import FakeCaches, FakeEngine, attention_model

SLOT_BYTES = 4096


@pytest.fixture
def pool(monkeypatch):
    """Three slots, which fill the device."""
    pool = SlotPool(3, SLOT_BYTES, "cpu")

    def refuse(nbytes, device):
        raise TransportError("no memory for staging", nbytes=nbytes, device=device)

    monkeypatch.setattr(staging, "_allocate", refuse)
    return pool


def test_quarantined_slots_are_reused_if_no_memory_is_left(pool):
    over = []
    addresses = set(pool.rows["address"].tolist())
    pool.rows["state"][:2] = r.POSTED
    for slot in range(2):
        pool.quarantine(slot, lambda: bool(over))
    assert pool.num_free == 1
    pool.end_quarantines()
    assert pool.num_free == 1
    over.append(None)
    pool.end_quarantines()
    assert pool.num_free == 3
    assert set(pool.rows["address"].tolist()) == addresses


def test_staging_stays_within_its_budget():
    assert slots_within(1000, 100, 1) == 9
    assert slots_within(1000, 100, 2) == 4
    assert slots_within(1, 100, 2) == 1
    assert slots_within(1 << 40, 1, 1) == 16
    with pytest.raises(TransportError, match="no memory for staging"):
        SlotPool(1, 1 << 60, "cpu")


def test_caches_that_do_not_fit_their_geometry_are_refused():
    engine = FakeEngine("e", attention_model(num_layers=3))
    caches = FakeCaches(engine, engine.geometry().ranks[0], np.random.default_rng(0))
    (group,) = caches.groups()
    with pytest.raises(GeometryError, match="exactly the layers"):
        Pools([CacheGroup(group.geometry, {0: group.views[0]})], "cpu")
    with pytest.raises(GeometryError, match="one view per part"):
        Pools([CacheGroup(group.geometry, {**group.views, 1: group.views[1][:1]})], "cpu")
    other = FakeEngine("e", attention_model(3, head_dim=8)).geometry().ranks[0]
    with pytest.raises(GeometryError, match="must have its part's"):
        Pools([CacheGroup(other.groups[0], group.views)], "cpu")
