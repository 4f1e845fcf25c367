"""A doorbell that spins tells the same as one that sleeps."""

from __future__ import annotations

import threading

import pytest

from kvconnector.runtime.doorbell import Doorbell

LONG_S = 30.0


@pytest.fixture(params=[0.0, 0.05], ids=["sleeps", "spins"])
def bell(request):
    return Doorbell(request.param)


def test_a_ring_is_heard_until_it_is_cleared(bell):
    assert not bell.wait(0.0)
    bell.ring()
    assert bell.wait(0.0)
    assert bell.wait(LONG_S)
    bell.clear()
    assert not bell.wait(0.0)


@pytest.mark.parametrize("delay_s", [0.0, 0.2], ids=["while it looks", "while it sleeps"])
def test_another_threads_ring_ends_the_wait(bell, delay_s):
    timer = threading.Timer(delay_s, bell.ring)
    timer.start()
    assert bell.wait(LONG_S)
    timer.join()


def test_one_that_waits_no_more_leaves_the_other_waiting(bell):
    heard = []
    patient = threading.Thread(target=lambda: heard.append(bell.wait(LONG_S)))
    patient.start()
    assert not bell.wait(0.1)
    bell.ring()
    patient.join(LONG_S)
    assert heard == [True]
