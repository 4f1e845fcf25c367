"""The lock on a pump: only its owner touches the rows and what belongs to them.

The driver's thread owns it, but for while it sleeps or pauses in the loop, or waits for the GIL. Then the engine's
thread may acquire it and make progress inline, which takes less time than waking another thread and handing it the GIL.
Releasing it wakes the driver by an eventfd: UCX's descriptor must be armed anew.
"""

from __future__ import annotations

from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call, exchange_flag, load_flag, store_flag, two_words
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper, now_ns

# The words, 32 bits each, in bytes from the first and on cache lines of their own.
LOCK_OWNER = 0
PENDING = 64  # not 0: there is something to do for a turn of the driver
LOOPING = 128  # not 0: the driver's thread is in the loop, or sleeps there
LOCK_BYTES = 192

_PARK_MS = 1000
"""A release wakes who waits for the lock; this only bounds what a lost wake-up would cost."""
_EVENTFD_BYTES = 8


@helper
def release(calls):
    """Let another thread make progress inline. No effect there: `release_inline` ends that."""
    if calls[r.WHO] == r.DRIVER:
        store_flag(calls[r.LOCK] + LOCK_OWNER, r.NOBODY)


@helper
def wake_driver(calls):
    """Let the driver look at everything anew, if it sleeps in the loop."""
    fd = load_flag(calls[r.WAKE_FDS])
    call(calls[r.WRITE], (fd, calls[r.ONE], _EVENTFD_BYTES))


@helper
def forget_wakes(calls):
    """Take the wake-ups so far."""
    fd = load_flag(calls[r.WAKE_FDS])
    call(calls[r.READ], (fd, two_words(), _EVENTFD_BYTES))


@helper
def _await_release(calls):
    call(calls[r.POLL], (calls[r.WAKE_FDS], 1, _PARK_MS))
    forget_wakes(calls)


@helper
def acquire(calls):
    """Acquire the lock after `release`; while another thread owns it, sleep until it is free."""
    while calls[r.WHO] == r.DRIVER and not exchange_flag(
        calls[r.LOCK] + LOCK_OWNER, r.NOBODY, r.DRIVER
    ):
        _await_release(calls)


@helper
def has_pending(calls):
    """Whether there is something to do for a turn of the driver."""
    return load_flag(calls[r.LOCK] + PENDING) != 0


@helper
def must_return(calls, head, found, now):
    """Whether to return with what was found, or with what others say is pending: inline at once, else after the grace
    period, in which another thread may take it.
    """
    if calls[r.WHO] == r.INLINE:
        return found != 0 or has_pending(calls)
    if found:
        store_flag(calls[r.LOCK] + PENDING, 1)
    elif not has_pending(calls):
        head[r.PENDING_NS] = 0
        return False
    if head[r.PENDING_NS] == 0:
        head[r.PENDING_NS] = now
    return now - head[r.PENDING_NS] >= head[r.GRACE_NS]


def _compile(sources_hash):
    """The functions for Python. What it closes over is part of its key in numba's on-disk cache."""

    @njit(cache=True)
    def try_acquire(calls, limit_ns):
        """Acquire the lock, if that is possible within a time so short that the GIL is kept. Whether it was."""
        calls[r.BUILD] = sources_hash
        until = now_ns(calls) + limit_ns
        while not exchange_flag(calls[r.LOCK] + LOCK_OWNER, r.NOBODY, calls[r.WHO]):
            if now_ns(calls) >= until:
                return False
        return True

    @njit(nogil=True, cache=True)
    def wait_until_free(calls):
        """Wait until nobody owns the lock, however long it takes. Who then acquires it has the GIL already: else it
        would keep others out while it waits for that.
        """
        calls[r.BUILD] = sources_hash
        while load_flag(calls[r.LOCK] + LOCK_OWNER) != r.NOBODY:
            _await_release(calls)

    @njit(cache=True)
    def release_inline(calls):
        """End inline progress."""
        calls[r.BUILD] = sources_hash
        store_flag(calls[r.LOCK] + LOCK_OWNER, r.NOBODY)
        wake_driver(calls)

    @njit(cache=True)
    def notify(calls):
        """Something is pending. Whether the driver's thread sees it, and no other makes progress inline."""
        calls[r.BUILD] = sources_hash
        store_flag(calls[r.LOCK] + PENDING, 1)
        wake_driver(calls)
        return load_flag(calls[r.LOCK] + LOCK_OWNER) != r.INLINE

    return try_acquire, wait_until_free, release_inline, notify


try_acquire, wait_until_free, release_inline, notify = _compile(SOURCES_HASH)
