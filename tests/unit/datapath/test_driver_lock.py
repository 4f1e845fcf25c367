"""The driver lock's waits, in a clock that passes with each look at it. Ownership and wake-ups: test_pump.py."""

import ctypes
import os
import select
import threading
import time
from itertools import groupby

import pytest

from kvconnector.datapath.pump import pacing
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.loop_calls import wait_until_free
from tests.support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.ucx


def _stepping_clock(path, at_look=lambda look: None):
    """Let a microsecond pass with each look at the clock, and call `at_look` with its number. Returns who owned the
    lock at each look.
    """
    owners = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2))
    def clock(_, now):
        owners.append(path.lock._words.owner)
        at_look(len(owners))
        now.contents[:] = [len(owners) // 1_000_000, len(owners) % 1_000_000 * 1000]
        return 0

    path.state.record.clock_gettime = ctypes.cast(clock, ctypes.c_void_p).value
    return owners, clock


def _longest_run(owners, owner):
    return max([len([*same]) for each, same in groupby(owners) if each == owner], default=0)


def test_a_loop_waits_a_moment_for_the_thread_that_wants_the_lock(make_pair):
    """The thread may have lost its core."""
    path = make_pair().d.path
    path.state.record.spin_after_work_ns = 1 << 60
    words = path.lock._words

    def end_the_wait(look):
        if look > 5000:  # otherwise a loop that waits for ever would
            words.wanted = 0

    owners, _clock = _stepping_clock(path, end_the_wait)
    words.wanted = 1
    path.pump(1e-3)
    words.wanted = 0
    assert 40 <= _longest_run(owners, r.NOBODY) <= 60


def test_a_loop_that_handed_the_lock_over_takes_it_back_without_a_sleep(make_pair):
    """To wake it would take as long as what the other thread does."""
    path = make_pair().d.path
    path.state.record.spin_after_work_ns = 1 << 60
    words, began = path.lock._words, []

    def own_for_a_while(look):
        if words.wanted and words.owner == r.NOBODY:
            words.owner, words.wanted = r.INLINE, 0
            began.append(look)
        elif began and words.owner == r.INLINE and look >= began[0] + 100:
            words.owner = r.NOBODY

    owners, _clock = _stepping_clock(path, own_for_a_while)
    words.wanted = 1
    loop = threading.Thread(target=path.pump, args=(1e-3,))
    loop.start()
    until(lambda: began)
    loop.join(1.0)
    words.owner = r.DRIVER if words.owner == r.DRIVER else r.NOBODY  # a loop that sleeps goes on
    path.lock.notify()
    loop.join(DEADLINE_S)
    assert _longest_run(owners, r.INLINE) >= 99


@pytest.mark.parametrize("what", ["wanted", "pending"])
def test_inline_progress_hands_nothing_over_and_leaves_for_what_was_reported(make_pair, what):
    path = make_pair().d.path
    path.release(0.0)
    assert path.lock.try_acquire()
    words = path.lock._words
    path.state.record.spin_after_work_ns = 1 << 60

    def end_the_wait(look):
        if look > 50_000:
            words.owner = r.NOBODY

    owners, _clock = _stepping_clock(path, end_the_wait)
    if what == "wanted":
        words.wanted = 1
    else:
        path.lock.notify()
    path.pump(1e-3)
    words.wanted = 0
    assert {*owners} == {r.INLINE}
    assert len(owners) < (1200 if what == "wanted" else 100)


def test_work_that_was_taken_is_not_offered_any_more(make_pair):
    """What comes later is offered for as long as the first was."""
    path = make_pair().d.path
    record, words = path.state.record, path.lock._words
    record.spin_after_work_ns, record.offer_work_ns = 1 << 60, 300_000
    changes = {200: 0, 1000: 1}

    def change(look):
        if look in changes:
            words.pending = changes[look]

    owners, _clock = _stepping_clock(path, change)
    path.lock.notify()
    path.pump(1.0)
    assert 1300 <= len(owners) < 2000


def test_a_loop_that_offers_work_sleeps_meanwhile(make_pair):
    """A notice that came before must not keep it awake."""
    path = make_pair().d.path
    record, looks = path.state.record, []
    record.spin_after_work_ns, record.offer_work_ns = 0, 100_000_000

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2))
    def clock(_, now):
        looks.append(None)
        now.contents[:] = divmod(time.monotonic_ns(), pacing.NS_PER_S)
        return 0

    record.clock_gettime = ctypes.cast(clock, ctypes.c_void_p).value
    path.lock.notify()
    path.pump(10.0)
    assert path.lock.has_pending()
    # 100 sleeps of a millisecond; without them thousands of looks
    assert len(looks) < 1500


def test_the_end_of_inline_progress_wakes_the_drivers_thread(make_pair):
    """Until then nobody sees by itself what is reported."""
    path = make_pair().d.path
    path.release(0.0)
    assert path.lock.try_acquire()
    assert not path.lock.notify()
    os.eventfd_read(path.state.wake_fd)
    path.release(0.0)
    assert select.select([path.state.wake_fd], [], [], 0.0)[0]
    assert path.lock.notify()


def test_who_waits_for_the_lock_waits_until_it_is_free(make_pair):
    path = make_pair().d.path
    path.release(0.0)
    assert path.lock.try_acquire()
    order, began = [], threading.Event()

    def wait():
        began.set()
        wait_until_free(path.state.address)
        order.append("free")

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert began.wait(DEADLINE_S)
    time.sleep(0.02)  # a wait that ends at once would end now
    order.append("released")
    path.release(0.0)
    waiter.join(DEADLINE_S)
    assert order == ["released", "free"]
