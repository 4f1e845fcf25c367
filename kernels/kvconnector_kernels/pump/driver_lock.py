"""The lock on a pump: only its owner touches the records and what belongs to them.

The driver's thread owns it, but for while it sleeps or pauses in the loop, or waits for the GIL. Then the engine's
thread may acquire it and make progress inline, which takes less time than waking another thread and handing it the GIL.
Releasing it wakes the driver by an eventfd: UCX's descriptor must be armed anew.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import (
    call,
    exchange_flag,
    load_flag,
    record_at,
    store_flag,
    two_words,
)
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper, now_ns

_OWNER, _PENDING, _LOOPING = 0, 64, 128
LOCK = np.dtype(
    {
        # `pending`: there is something to do for a turn of the driver; `looping`: its thread is in the loop, or sleeps
        # there. On cache lines of their own.
        "names": ["owner", "pending", "looping"],
        "formats": [np.int32] * 3,
        "offsets": [_OWNER, _PENDING, _LOOPING],
        "itemsize": 192,
    }
)

_PARK_MS = 1000
"""A release wakes who waits for the lock; this only bounds what a lost wake-up would cost."""
_EVENTFD_BYTES = 8
NS_PER_MS = 1_000_000


@helper
def release(state, run):
    """Let another thread make progress inline. No effect there: `release_inline` ends that."""
    if run.owner == r.DRIVER:
        store_flag(state.lock + _OWNER, r.NOBODY)


@helper
def acquire(state, run):
    """Acquire the lock after `release`; while another thread owns it, sleep until it is free."""
    while run.owner == r.DRIVER and not exchange_flag(state.lock + _OWNER, r.NOBODY, r.DRIVER):
        _await_release(state)


@helper
def set_looping(state, value):
    """Say whether the driver's thread is in the loop."""
    store_flag(state.lock + _LOOPING, value)


@helper
def _wake_driver(state):
    """Let the driver look at everything anew, if it sleeps in the loop."""
    call(state.write, (load_flag(state.wake_fds), state.one, _EVENTFD_BYTES))


@helper
def forget_wakes(state):
    """Take the wake-ups so far."""
    call(state.read, (load_flag(state.wake_fds), two_words(), _EVENTFD_BYTES))


@helper
def _await_release(state):
    call(state.poll, (state.wake_fds, 1, _PARK_MS))
    forget_wakes(state)


@helper
def has_pending(state):
    """Whether there is something to do for a turn of the driver."""
    return load_flag(state.lock + _PENDING) != 0


@helper
def must_return(state, run, found, now):
    """Whether to return with what was found, or with what others say is pending: inline at once, else after the grace
    period, in which another thread may take it. A short one is for an engine that has asked for something: nobody else
    is on the way to what was found.
    """
    if run.owner == r.INLINE:
        return found != 0 or has_pending(state)
    if found:
        store_flag(state.lock + _PENDING, 1)
        if state.grace_ns < NS_PER_MS:
            return True
    elif not has_pending(state):
        state.pending_ns = 0
        return False
    if state.pending_ns == 0:
        state.pending_ns = now
    return now - state.pending_ns >= state.grace_ns


def _compile(sources_hash):
    """The functions for Python, which take a state's address."""

    @njit(cache=True)
    def try_acquire(address, owner, limit_ns):
        """Acquire the lock, if that is possible within a time so short that the GIL is kept. Whether it was."""
        _ = sources_hash
        state = record_at(address, r.STATE)
        until = now_ns(state) + limit_ns
        while not exchange_flag(state.lock + _OWNER, r.NOBODY, owner):
            if now_ns(state) >= until:
                return False
        return True

    @njit(nogil=True, cache=True)
    def wait_until_free(address):
        """Wait until nobody owns the lock, however long it takes. Who then acquires it has the GIL already: else it
        would keep others out while it waits for that.
        """
        _ = sources_hash
        state = record_at(address, r.STATE)
        while load_flag(state.lock + _OWNER) != r.NOBODY:
            _await_release(state)

    @njit(cache=True)
    def release_inline(address):
        """End inline progress."""
        _ = sources_hash
        state = record_at(address, r.STATE)
        store_flag(state.lock + _OWNER, r.NOBODY)
        _wake_driver(state)

    @njit(cache=True)
    def notify(address):
        """Something is pending. Whether the driver's thread sees it, and no other makes progress inline."""
        _ = sources_hash
        state = record_at(address, r.STATE)
        store_flag(state.lock + _PENDING, 1)
        _wake_driver(state)
        return load_flag(state.lock + _OWNER) != r.INLINE

    return try_acquire, wait_until_free, release_inline, notify


try_acquire, wait_until_free, release_inline, notify = _compile(SOURCES_HASH)
