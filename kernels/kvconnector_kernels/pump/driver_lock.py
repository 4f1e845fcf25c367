"""The lock on a pump: only its owner touches the records, the transport, the control channel and the sessions.

Theory of operation
-------------------
Owner. One 32-bit word says who owns it: `DRIVER` (the driver's thread), `INLINE` (an engine's thread, which makes
progress in the driver's place) or `NOBODY`. It changes by compare-and-exchange alone. Nobody queues: each side tries.

When it is free. The driver's thread owns it while it works. It gives it up in three places, all inside the compiled
loop: while it sleeps on descriptors, while it pauses between two looks, and from its last look until it has the GIL
back. The last is the point of the lock: a thread that waits for the GIL after a busy engine would otherwise keep the
engine from its own transfers, and waking one thread to hand it the GIL costs 0.2 ms where inline progress costs a few.
If it has worked in Python for long, it sleeps there first, for `leave_us`, unless the run itself took as long: without
that it would take the GIL again before a thread that waits for it is awake.

GIL. `try_acquire`, `release_inline` and `notify` keep the GIL: they take microseconds, and no other Python thread runs
in between. `wait_until_free` and the loop release it. The driver's thread takes the lock again only when it has the
GIL (`wait_until_free`, then `try_acquire`): a thread that owned the lock while it waited for the GIL could not be
overtaken by the thread that has it, and both would stand still.

Which thread. `inline_thread` is the native id of the thread that owns it inline, else 0. It is written by the compiled
code, so that no Python instruction lies between becoming the owner and being known as such: an interrupt
(KeyboardInterrupt) may come between any two instructions, and the thread that it hits must find out whether it has
something to give back.

Wake-ups. `release_inline` and `notify` write to an eventfd on which the driver's thread sleeps, in the loop and in
`_await_release`: UCX's own descriptor must be armed anew after each progress, by whoever sleeps on it. A wake-up that
is lost costs at most `_PARK_MS`.

Pending. `pending` says that a turn of the driver has something to do. Who owns the lock clears it before it looks at
everything, so what comes during the look sets it again. The loop returns for it at once, or after a grace period in
which an engine's thread may come for it.

What breaks if this changes: a second owner corrupts UCX's worker and the sessions, without an error; a lock that is
not given back stops every transfer of the worker for good; a `try_acquire` that releases the GIL lets an interrupt, or
another thread, in between.
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

_OWNER, _PENDING, _LOOPING, _INLINE_THREAD = 0, 64, 128, 192
LOCK = np.dtype(
    {
        # `pending`: there is something to do for a turn of the driver; `looping`: its thread is in the loop, or sleeps
        # there; `inline_thread`: the native id of the thread that owns it inline. On cache lines of their own.
        "names": ["owner", "pending", "looping", "inline_thread"],
        "formats": [np.int32] * 4,
        "offsets": [_OWNER, _PENDING, _LOOPING, _INLINE_THREAD],
        "itemsize": 256,
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
    """Note that the driver's thread is in the loop, or has left it."""
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
    """Returns True if there is something to do for a turn of the driver."""
    return load_flag(state.lock + _PENDING) != 0


@helper
def must_return(state, run, found, now):
    """Returns True if the loop is to return with what it found or others report: inline at once, else after the grace
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
    def try_acquire(address, owner, limit_ns, thread):
        """Acquire the lock, if that is possible within a time so short that the GIL is kept. Returns True if it was.
        `thread`: the native id of a thread that makes progress inline, else 0.
        """
        _ = sources_hash
        state = record_at(address, r.STATE)
        until = now_ns(state) + limit_ns
        while not exchange_flag(state.lock + _OWNER, r.NOBODY, owner):
            if now_ns(state) >= until:
                return False
        store_flag(state.lock + _INLINE_THREAD, thread)
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
        store_flag(state.lock + _INLINE_THREAD, 0)
        store_flag(state.lock + _OWNER, r.NOBODY)
        _wake_driver(state)

    @njit(cache=True)
    def notify(address):
        """Something is pending. Returns True if the driver's thread sees it, and no other makes progress inline."""
        _ = sources_hash
        state = record_at(address, r.STATE)
        store_flag(state.lock + _PENDING, 1)
        _wake_driver(state)
        return load_flag(state.lock + _OWNER) != r.INLINE

    return try_acquire, wait_until_free, release_inline, notify


try_acquire, wait_until_free, release_inline, notify = _compile(SOURCES_HASH)
