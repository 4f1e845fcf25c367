"""The pump's loop: every chunk of every program from memory to memory, in one call that holds no GIL.

What each kind of program does is in `sends`, `receives` and `reads`. Nothing waits while anything else can move.
"""

from __future__ import annotations

from numba import njit

from kvconnector_kernels.pump import driver_lock, reads, receives, sends, steps
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import array_at, call, record_at
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper

_MAX_PROGRESS_STEPS = 64
_NUM_OWN_FDS = 2
"""UCX's descriptor, and the eventfd that wakes the driver."""


@helper
def _progress(state):
    for _ in range(_MAX_PROGRESS_STEPS):
        if (call(state.worker_progress, (state.worker,)) & 0xFFFFFFFF) == 0:
            return


@helper
def _pass(state):
    """Make one pass: move everything that can move now."""
    _progress(state)
    moved = sends.retire_sends(state)
    moved = sends.pack_next(state) or moved
    moved = sends.post_packed(state) or moved
    moved = receives.move_receives(state) or moved
    return reads.begin_reads(state) or moved


@helper
def _has_control(state):
    """Returns True if a message for the caller is there, which stays where it is."""
    tag = state.control_tag
    return call(state.tag_probe, (state.worker, tag, tag, 0, state.recv_info)) != 0


@helper
def _found(state):
    """Return the reason to return at once, or 0 if there is none."""
    ended = sends.end_sends(state)
    ended = receives.end_receives(state) or ended
    ended = reads.end_reads(state) or ended
    if state.complete_ns:
        ended = steps.now_ns(state) - state.complete_ns >= state.patience_ns or ended
    slots = steps.recv_slots_of(state)
    if ended or (state.wants_slots and steps.find_free(slots) != steps.NO_SLOT):
        return r.NOTICE
    return r.READABLE if _has_control(state) else 0


@helper
def _is_busy(state):
    """Returns True if a copy is under way, whose end no descriptor shows."""
    return (
        steps.is_copying(steps.sends_of(state))
        or steps.is_copying(steps.receives_of(state))
        or reads.is_reading(state)
    )


@helper
def _pause(state, run, now):
    """Wait a moment, in which another thread may acquire the lock."""
    driver_lock.release(state, run)
    while steps.now_ns(state) - now < state.pause_ns:
        pass
    driver_lock.acquire(state, run)


@helper
def _grant_grace(state, run, now):
    """Wait for a moment of the grace period; if it is long, asleep, since no sleep is shorter than a millisecond."""
    if state.grace_ns < driver_lock.NS_PER_MS:
        _pause(state, run, now)
        return
    driver_lock.release(state, run)
    call(state.poll, (state.wake_fds, 1, 1))
    driver_lock.acquire(state, run)
    driver_lock.forget_wakes(state)


@helper
def _sleep(state, run, left_ns):
    """Sleep until UCX or a watched descriptor is readable, or the time is over."""
    if steps.status_of(call(state.worker_arm, (state.worker,))) == steps.OK:
        driver_lock.release(state, run)
        steps.is_readable(state, run, 0, left_ns // driver_lock.NS_PER_MS + 1)
        driver_lock.acquire(state, run)
        if run.owner == r.DRIVER:
            driver_lock.forget_wakes(state)


@helper
def _rest(state, run, is_busy, now, left_ns):
    """Pause while something may end any moment, else sleep. Returns True if it slept."""
    if now - state.moved_ns < state.spin_ns or is_busy:
        _pause(state, run, now)
        return False
    if driver_lock.has_pending(state):
        _grant_grace(state, run, now)
        return False
    if state.complete_ns:
        left_ns = min(left_ns, state.complete_ns + state.patience_ns - now)
    _sleep(state, run, left_ns)
    return True


@helper
def _enter(state, run):
    if run.owner == r.DRIVER:
        state.return_by_ns = state.pending_ns = 0
        driver_lock.set_looping(state, 1)
    if state.begin:
        call(state.begin, (state.begin_argument,))


@helper
def _time_left(state, run, start, now):
    """Nanoseconds until the run must end."""
    end = start + run.limit_ns
    if run.owner == r.DRIVER and state.return_by_ns:
        end = min(end, state.return_by_ns)
    return end - now


@helper
def _move(state, run):
    start = looked_at = steps.now_ns(state)
    num_inline = -1
    while True:
        if num_inline != state.num_inline:
            # work that the caller, or inline progress, has added
            num_inline = state.num_inline
            receives.begin_receives(state)
        moved = _pass(state)
        reason = _found(state)
        now = steps.now_ns(state)
        must_look = now - looked_at >= state.look_ns
        if must_look:
            looked_at = now
            if not reason and steps.is_readable(state, run, _NUM_OWN_FDS, 0):
                reason = r.READABLE
        if driver_lock.must_return(state, run, reason, now):
            return reason or r.READABLE
        left_ns = _time_left(state, run, start, now)
        if moved:
            state.moved_ns = now
        if left_ns <= 0 and (run.limit_ns < 0 or must_look or not moved):
            return r.TIMEOUT
        if not moved and _rest(state, run, _is_busy(state), now, left_ns):
            looked_at = 0


@helper
def _leave(state, run, entered_ns):
    if run.owner == r.DRIVER:
        state.left_ns = steps.now_ns(state)
        driver_lock.set_looping(state, 0)
    driver_lock.release(state, run)
    # during a longer run others could have the GIL
    if run.owner == r.DRIVER and state.left_ns - entered_ns < state.leave_us * 1000:
        call(state.usleep, (state.leave_us,))
        state.left_ns = steps.now_ns(state)


@helper
def _run(address):
    state = record_at(address, r.STATE)
    this_run = array_at(state.runs, 3, r.RUN)[state.entering]
    entered_ns = steps.now_ns(state)
    _enter(state, this_run)
    reason = _move(state, this_run)
    _leave(state, this_run, entered_ns)
    return reason


def _compile(sources_hash):
    # neither refers to the other: a compiled function in a closure has a different name in every process, so no other
    # process would find its callers in the cache
    @njit(nogil=True, cache=True)
    def run(address):
        """Move chunks until a program ends (`NOTICE`), a descriptor is readable or a message for the caller is there
        (`READABLE`), or the time is over. `address` is that of a `STATE`, which says who runs it and for how long.

        With a time of 0 it returns once nothing moves, with a negative one after a single pass. The caller owns the
        lock; the driver has released it on return.
        """
        _ = sources_hash
        return _run(address)

    @njit(cache=True)
    def look(address):
        """`run` for inline progress. It keeps the GIL: otherwise a driver's thread that waits for the GIL would get it
        while it cannot have the lock, again and again.
        """
        _ = sources_hash
        return _run(address)

    return run, look


run, look = _compile(SOURCES_HASH)
