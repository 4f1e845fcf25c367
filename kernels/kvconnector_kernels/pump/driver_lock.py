"""The lock on a pump: only its owner touches the records, the transport, the control channel and the sessions.

Theory of operation
-------------------
Owner. One 32-bit word says who owns it: `DRIVER` (the driver's thread), `INLINE` (an engine's thread, which makes
progress in the driver's place) or `NOBODY`. It changes by compare-and-exchange alone. Nobody queues: each side tries.

When it is free. The driver's thread owns it while it works. It releases it in three places, all inside the compiled
loop: while it sleeps on descriptors, while it pauses between two passes, and from its last pass until it has the GIL
back. The last is the point of the lock: a thread that waits for the GIL after a busy engine would otherwise keep the
engine from its own transfers, and waking one thread to hand it the GIL costs 0.2 ms where inline progress costs a few.
If it has worked in Python for long, it sleeps there first, for `leave_us`, unless the run itself took as long:
otherwise it would take the GIL again before a waiting thread is awake.

GIL. `try_acquire`, `release_inline` and `notify` keep the GIL: they take microseconds, and no other Python thread runs
in between. `wait_until_free` and the loop release it. The driver's thread takes the lock again only when it has the
GIL (`wait_until_free`, then `try_acquire`): a thread that owned the lock while it waited for the GIL could not be
overtaken by the thread that has it, and both would stand still.

Which thread. `inline_thread` is the native id of the thread that owns it inline, else 0. It is written by the compiled
code, so that no Python instruction lies between becoming the owner and being known as such: an interrupt
(KeyboardInterrupt) may come between any two instructions, and the thread that it hits must know if it owns the lock.

Wake-ups. `release_inline` and `notify` write to an eventfd on which the driver's thread sleeps, in the loop and in
`_await_release`: UCX's own descriptor must be armed anew after each progress, by whoever sleeps on it. A lost wake-up
costs at most `_PARK_MS`.

Pending. `pending` says that there is work for a turn of the driver. The lock's owner clears it before it looks for
work, so work that arrives meanwhile sets it again. The loop returns for it at once, or after a grace period in which an
engine's thread may take it.

What breaks if this changes: a second owner corrupts UCX's worker and the sessions, without an error; a lock that is
never released stops every transfer of the worker for good; a `try_acquire` that releases the GIL lets an interrupt, or
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
        # `pending`: there is work for a turn of the driver; `looping`: its thread is in the loop, or sleeps there;
        # `inline_thread`: the native id of the thread that owns it inline. On cache lines of their own.
        "names": ["owner", "pending", "looping", "inline_thread"],
        "formats": [np.int32] * 4,
        "offsets": [_OWNER, _PENDING, _LOOPING, _INLINE_THREAD],
        "itemsize": 256,
    }
)

_PARK_MS = 1000
"""A release wakes the thread that waits for the lock; this only bounds the cost of a lost wake-up."""
_EVENTFD_BYTES = 8
NS_PER_MS = 1_000_000


@helper
def release(state, run):
    """Let another thread make progress inline. No effect in such a thread, which ends with `release_inline`."""
    if run.owner == r.DRIVER:
        store_flag(state.lock + _OWNER, r.NOBODY)


@helper
def acquire(state, run):
    """Acquire the lock after `release`; while another thread owns it, sleep until it is free."""
    while run.owner == r.DRIVER and not exchange_flag(state.lock + _OWNER, r.NOBODY, r.DRIVER):
        _await_release(state)


@helper
def set_looping(state, value):
    """Record that the driver's thread is in the loop, or has left it."""
    store_flag(state.lock + _LOOPING, value)


@helper
def _wake_driver(state):
    """Make the driver look for work again, if it sleeps in the loop."""
    call(state.write, (load_flag(state.wake_fds), state.one, _EVENTFD_BYTES))


@helper
def forget_wakes(state):
    """Consume the wake-ups so far."""
    call(state.read, (load_flag(state.wake_fds), two_words(), _EVENTFD_BYTES))


@helper
def _await_release(state):
    call(state.poll, (state.wake_fds, 1, _PARK_MS))
    forget_wakes(state)


@helper
def has_pending(state):
    """Returns True if there is work for a turn of the driver."""
    return load_flag(state.lock + _PENDING) != 0


@helper
def must_return(state, run, found, now):
    """Returns True if the loop must return with work that it found or that was reported: at once if inline, else after
    the grace period, in which another thread may take the work. The period is short after an engine's order, since no
    other thread will take what was found.
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
    """Compile the functions for Python, which take a state's address."""

    @njit(cache=True)
    def try_acquire(address, owner, limit_ns, thread):
        """Acquire the lock if it is free at once or very soon; the GIL is kept. Returns True if it was acquired.
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
        """Wait without a limit until nobody owns the lock. The caller then acquires it with the GIL: otherwise it would
        keep others out while it waits for the GIL.
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
        """Set `pending`. Returns True if the driver's thread will see it, and no thread makes progress inline."""
        _ = sources_hash
        state = record_at(address, r.STATE)
        store_flag(state.lock + _PENDING, 1)
        _wake_driver(state)
        return load_flag(state.lock + _OWNER) != r.INLINE

    return try_acquire, wait_until_free, release_inline, notify


try_acquire, wait_until_free, release_inline, notify = _compile(SOURCES_HASH)
