"""The driver lock as Python sees it, and how long its threads wait for the GIL."""

from __future__ import annotations

import threading
import time

from kvconnector.datapath.pump.state import NS_PER_S, LoopState
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.driver_lock import (
    LOCK,
    notify,
    release_inline,
    try_acquire,
    wait_until_free,
)

_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
_GRACE_NS = 30_000
"""An engine that gives an order and then waits for it comes within this time, and needs no other thread."""
_TENURE_NS = _NS_PER_MS
"""A driver's thread that has worked in Python for this long leaves the GIL to others for `_LEAVE_US`. A thread that
wakes because the GIL was free for a moment, and finds it taken again, waits another 5 ms, each time."""
_LEAVE_US = 100
_LONG_GIL_WAIT_NS = _NS_PER_MS // 2
"""Above this wait an engine that polls comes sooner than the driver's thread gets the GIL."""
_LONG_STEP_NS = 5 * _NS_PER_MS
"""The interpreter takes the GIL from a thread that computes for this time without a poll."""
_GIL_WAITS, _INLINE_TURNS = 4, 64
"""The average wait covers about this many waits, and is forgotten after this many inline turns without one."""

_PENDING, _LOOPING, _INLINE_THREAD = (
    r.offset_of(LOCK, name) // 4 for name in ("pending", "looping", "inline_thread")
)
_NUM_INLINE, _LEAVE, _LEFT, _TAKEN, _GRACE, _RETURN_BY = (
    r.index_of(r.STATE, name)
    for name in ("num_inline", "leave_us", "left_ns", "taken_ns", "grace_ns", "return_by_ns")
)


class DriverLock:
    """The lock on a worker's data path; see `kvconnector_kernels.pump.driver_lock`. Any thread may call the methods,
    but those from `clear_pending` on are for the owner.
    """

    def __init__(self, state: LoopState) -> None:
        self.is_handshaking = False
        """True while a peer is greeted, which may compile kernels and map memory, and so is not done inline. The owner
        sets it.
        """
        self._state = state
        self._words = state.lock
        self._numbers = state.numbers
        self._gil_wait_ns = self._polled_ns = self._poll_interval_ns = self._entered_ns = 0
        self._numbers[_GRACE] = _GRACE_NS
        # compile the functions that an engine's thread would have to wait for in its first request
        self.notify()
        self.clear_pending()
        release_inline(state.address)
        wait_until_free(state.address)
        try_acquire(state.address, r.DRIVER, 0, 0)

    @property
    def is_starved(self) -> bool:
        """Returns True if the driver's thread has waited long for the GIL: each time that another thread has released
        it for a moment, it waits anew.
        """
        left_ns = time.monotonic_ns() - self._numbers[_LEFT]
        return not self._words[_LOOPING] and left_ns > _LONG_GIL_WAIT_NS

    @property
    def is_looping(self) -> bool:
        """Returns True if the driver's thread is in the loop, or sleeps there."""
        return bool(self._words[_LOOPING])

    @property
    def is_ours(self) -> bool:
        """Returns True if the calling thread owns the lock, for inline progress."""
        return bool(self._words[_INLINE_THREAD] == threading.get_native_id())

    def has_pending(self) -> bool:
        """Returns True if inline progress may find something to do. Each call counts as a poll of the engine's
        thread.
        """
        now_ns = time.monotonic_ns()
        self._poll_interval_ns, self._polled_ns = now_ns - self._polled_ns, now_ns
        if self.is_handshaking:
            return False
        # outside the loop the driver's thread works, or it waits for the GIL and no thread looks for work
        return bool(self._words[_PENDING]) or not self._words[_LOOPING]

    def notify(self) -> bool:
        """Report that there is work. Returns True if the driver's thread sees it by itself."""
        return bool(notify(self._state.address))

    def try_acquire(self, limit_s: float) -> bool:
        """Make the calling thread the owner, if the driver releases the lock within microseconds: it keeps the GIL."""
        thread = threading.get_native_id()
        limit_ns = round(limit_s * NS_PER_S)
        return bool(try_acquire(self._state.address, r.INLINE, limit_ns, thread))

    def clear_pending(self) -> None:
        """Clear `pending`: the owner is about to do all the work."""
        self._words[_PENDING] = 0

    def release(self, limit_s: float) -> None:
        """End inline progress. The driver's thread stays in the loop for `limit_s` at most."""
        self._gil_wait_ns -= self._gil_wait_ns // _INLINE_TURNS
        self._numbers[_NUM_INLINE] += 1
        self._numbers[_RETURN_BY] = self._state.now_ns() + round(limit_s * NS_PER_S)
        release_inline(self._state.address)

    def enter(self) -> int:
        """Prepare a run of the loop. Returns which owner the caller is: `DRIVER` or `INLINE`."""
        if self._words[_INLINE_THREAD]:
            return r.INLINE
        self._entered_ns = self._state.now_ns()
        has_worked_long = self._entered_ns - self._numbers[_TAKEN] >= _TENURE_NS
        self._numbers[_LEAVE] = _LEAVE_US * has_worked_long
        return r.DRIVER

    def acquire_again(self) -> None:
        """Acquire the lock again in the driver's thread, which has left the loop and has the GIL. While it waited for
        that, others could take pending work.

        A thread that waits for the GIL slows down the one that has it: a busy engine that polls often is waited for in
        the loop.
        """
        now_ns = self._state.now_ns()
        if self._numbers[_LEAVE] or now_ns - self._entered_ns >= _LEAVE_US * _NS_PER_US:
            self._numbers[_TAKEN] = now_ns
        waited_ns = now_ns - self._numbers[_LEFT]
        self._gil_wait_ns += (waited_ns - self._gil_wait_ns) // _GIL_WAITS
        grace_ns = _GRACE_NS
        if self._gil_wait_ns > _LONG_GIL_WAIT_NS:
            interval_ns = max(self._poll_interval_ns, time.monotonic_ns() - self._polled_ns)
            is_polling = interval_ns < _LONG_STEP_NS
            grace_ns = max(2 * interval_ns if is_polling else self._gil_wait_ns, _NS_PER_MS)
        self._numbers[_GRACE] = grace_ns
        while not try_acquire(self._state.address, r.DRIVER, 0, 0):
            wait_until_free(self._state.address)
