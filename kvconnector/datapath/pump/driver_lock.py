"""The driver lock as Python sees it. See kernels/native/driver_lock.c."""

from __future__ import annotations

import threading
import time

from kvconnector.datapath.pump import pacing
from kvconnector.datapath.pump.state import LoopState
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.loop_calls import notify, release_inline, try_acquire, wait_until_free

_NS_PER_US = 1_000


class DriverLock:
    """The lock on a worker's data path. Any thread may call the methods, but those from `clear_pending` on are for the
    owner.
    """

    def __init__(self, state: LoopState) -> None:
        self.is_greeting = False
        """True while a peer is greeted, which may compile kernels and map memory, and so is not done inline. The owner
        sets it.
        """
        self._state = state
        self._words = state.lock
        self._loop = state.record
        self._entered_ns = 0
        self._gil_wait_ns = self._polled_ns = self._poll_interval_ns = 0
        try_acquire(state.address, r.DRIVER, 0, 0)

    @property
    def is_looping(self) -> bool:
        """Returns True if the driver's thread is in the loop, or sleeps there."""
        return bool(self._words.looping)

    @property
    def is_starved(self) -> bool:
        """Returns True if the driver's thread has waited long for the GIL: each time that another thread has released
        it for a moment, it waits anew.
        """
        left_ns = self._state.now_ns() - self._loop.left_loop_ns
        return not self._words.looping and left_ns > pacing.LONG_GIL_WAIT_NS

    @property
    def is_ours(self) -> bool:
        """Returns True if the calling thread owns the lock, for inline progress."""
        return bool(self._words.inline_thread == threading.get_native_id())

    @property
    def inline_thread(self) -> int:
        """The native id of the thread that owns the lock for inline progress, else 0."""
        return int(self._words.inline_thread)

    def has_pending(self) -> bool:
        """Returns True if inline progress may find something to do. Each call counts as a poll of the engine's
        thread.
        """
        now_ns = time.monotonic_ns()
        self._poll_interval_ns, self._polled_ns = now_ns - self._polled_ns, now_ns
        if self.is_greeting:
            return False
        # outside the loop the driver's thread works, or it waits for the GIL and no thread looks for work
        return bool(self._words.pending) or not self._words.looping

    def notify(self) -> bool:
        """Report that there is work. Returns True if the driver's thread sees it by itself."""
        return bool(notify(self._state.address))

    def try_acquire(self) -> bool:
        """Make the calling thread the owner, if nobody is or the driver's thread hands the lock over."""
        thread = threading.get_native_id()
        return bool(try_acquire(self._state.address, r.INLINE, pacing.ASK_FOR_LOCK_NS, thread))

    def clear_pending(self) -> None:
        """Clear `pending`: the owner is about to do all the work."""
        self._words.pending = 0

    def release(self, limit_s: float) -> None:
        """End inline progress. The driver's thread stays in the loop for `limit_s` at most."""
        self._loop.num_inline += 1
        self._loop.return_by_ns = self._state.now_ns() + round(limit_s * pacing.NS_PER_S)
        release_inline(self._state.address)

    def enter(self) -> int:
        """Prepare a run of the loop. Returns which owner the caller is: `DRIVER` or `INLINE`."""
        if self._words.inline_thread:
            return r.INLINE
        self._entered_ns = self._state.now_ns()
        worked_ns = self._entered_ns - self._loop.shared_gil_ns
        is_long = worked_ns >= pacing.WORK_S * pacing.NS_PER_S
        self._loop.yield_gil_us = pacing.YIELD_GIL_US if is_long else 0
        return r.DRIVER

    def acquire_again(self) -> None:
        """Acquire the lock again in the driver's thread, which has left the loop and has the GIL. While it waited for
        that, others could take pending work.

        If that took long, an engine that polls comes sooner, and nobody moves chunks meanwhile: then the loop offers
        work to the engine before it returns with it, and goes on.
        """
        now_ns = self._state.now_ns()
        if self._loop.yield_gil_us or now_ns - self._entered_ns >= pacing.YIELD_GIL_US * _NS_PER_US:
            self._loop.shared_gil_ns = now_ns
        # the longest of the last waits, each counting half as much as the next one
        self._gil_wait_ns = max(now_ns - self._loop.left_loop_ns, self._gil_wait_ns // 2)
        offer_ns = 0
        if self._gil_wait_ns > pacing.LONG_GIL_WAIT_NS:
            interval_ns = max(self._poll_interval_ns, time.monotonic_ns() - self._polled_ns)
            offer_ns = 2 * interval_ns if interval_ns < pacing.LONG_STEP_NS else 0
        self._loop.offer_work_ns = offer_ns
        while not try_acquire(self._state.address, r.DRIVER, 0, 0):
            wait_until_free(self._state.address)
