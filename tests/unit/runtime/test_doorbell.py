"""A doorbell that spins tells the same as one that sleeps."""

import threading

import pytest

from kvconnector.runtime.outbox import Doorbell

LONG_S = 30.0


@pytest.mark.parametrize("spin_s", [0.0, 0.05], ids=["sleeps", "spins"])
@pytest.mark.parametrize("delay_s", [0.0, 0.2], ids=["while it looks", "while it sleeps"])
def test_a_ring_is_heard_until_it_is_cleared(spin_s, delay_s):
    bell = Doorbell(spin_s)
    assert not bell.wait(0.0)
    assert not bell.wait(0.1)
    timer = threading.Timer(delay_s, bell.ring)
    timer.start()
    assert bell.wait(LONG_S)
    assert bell.wait(0.0)
    bell.clear()
    assert not bell.wait(0.0)
    timer.join()
