"""The pump's loop: every chunk of every program from memory to memory, in one call that holds no GIL.

What each kind of program does is in `sends` and `receives`; `rows` are `records.Rows`. Nothing here waits for one thing
while another can move.
"""

from __future__ import annotations

from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.driver_lock import (
    LOOPING,
    acquire,
    forget_wakes,
    has_pending,
    must_return,
    release,
)
from kvconnector_kernels.pump.native import call, store_flag
from kvconnector_kernels.pump.pulls import begin_pulls, end_pulls, is_pulling
from kvconnector_kernels.pump.receives import begin_receives, end_receives, move_receives
from kvconnector_kernels.pump.sends import end_sends, pack_in_turn, post_packed, retire_sends
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import OK, helper, is_readable, now_ns, status_of

_NS_PER_MS = 1_000_000
_MAX_PROGRESS_STEPS = 64
_NUM_OWN_FDS = 2
"""UCX's descriptor, and the eventfd that wakes the driver."""


@helper
def _is_copying(programs):
    copying = 0
    for program in range(programs.shape[0]):
        if programs[program, r.PHASE] == r.RUNNING:
            copying += programs[program, r.NUM_COPYING]
    return copying > 0


@helper
def _progress(calls):
    for _ in range(_MAX_PROGRESS_STEPS):
        if (call(calls[r.WORKER_PROGRESS], (calls[r.WORKER],)) & 0xFFFFFFFF) == 0:
            return


@helper
def _sleep(calls, head, left_ns):
    """Sleep until UCX or a watched descriptor has something, or the time is over."""
    if status_of(call(calls[r.WORKER_ARM], (calls[r.WORKER],))) == OK:
        head[r.NUM_SLEEPS] += 1
        release(calls)
        is_readable(calls, 0, left_ns // _NS_PER_MS + 1)
        acquire(calls)
        if calls[r.WHO] == r.DRIVER:
            forget_wakes(calls)


@helper
def _pass(calls, head, rows):
    """Move what can move now."""
    head[r.NUM_PASSES] += 1
    _progress(calls)
    sends, slots, free = rows.sends, rows.send_slots, rows.send_free
    moved = retire_sends(calls, sends, slots, free)
    moved = pack_in_turn(head, sends, slots, free) or moved
    moved = post_packed(calls, head, sends, slots, free) or moved
    moved = move_receives(calls, head, rows.receives, rows.recv_slots, rows.recv_free) or moved
    return begin_pulls(calls, head, rows.pulls) or moved


@helper
def _has_control(calls):
    """Whether a message for the caller is there, which stays where it is."""
    tag = calls[r.CONTROL_TAG]
    return call(calls[r.TAG_PROBE], (calls[r.WORKER], tag, tag, 0, calls[r.RECV_INFO])) != 0


@helper
def _found(calls, head, rows):
    """What the caller is to know at once, as the reason to return; 0 if there is none."""
    ended = end_sends(rows.sends, rows.send_slots)
    ended = end_receives(calls, rows.receives) or ended
    ended = end_pulls(calls, rows.pulls) or ended
    if ended or (head[r.WANTS_SLOTS] and rows.recv_free[r.HEIGHT]):
        return r.NOTICE
    return r.READABLE if _has_control(calls) else 0


@helper
def _enter(calls, head):
    head[r.NUM_RUNS] += 1
    if calls[r.WHO] == r.DRIVER:
        head[r.RETURN_BY_NS] = head[r.PENDING_NS] = 0
        store_flag(calls[r.LOCK] + LOOPING, 1)
    if calls[r.BEGIN]:
        call(calls[r.BEGIN], (calls[r.BEGIN_ARGUMENT],))


@helper
def _is_busy(rows):
    """Whether a copy is under way, of which no descriptor tells."""
    return _is_copying(rows.sends) or _is_copying(rows.receives) or is_pulling(rows.pulls)


@helper
def _is_readable_by_caller(calls):
    """Whether one of the caller's descriptors is readable."""
    return is_readable(calls, _NUM_OWN_FDS, 0)


@helper
def _pause(calls, head, now):
    """Wait a moment, in which another thread may acquire the lock."""
    release(calls)
    while now_ns(calls) - now < head[r.PAUSE_NS]:
        pass
    acquire(calls)


@helper
def _grant_grace(calls, head, now):
    """Wait for a moment of the grace period, and of a long one asleep: nothing sleeps for less than a millisecond."""
    if head[r.GRACE_NS] < _NS_PER_MS:
        _pause(calls, head, now)
        return
    head[r.NUM_SLEEPS] += 1
    release(calls)
    call(calls[r.POLL], (calls[r.WAKE_FDS], 1, 1))
    acquire(calls)
    forget_wakes(calls)


@helper
def _rest(calls, head, is_busy, now, left_ns):
    """Pause while something may end any moment, else sleep. Whether it slept."""
    if now - head[r.MOVED_NS] < head[r.SPIN_NS] or is_busy:
        _pause(calls, head, now)
        return False
    if has_pending(calls):
        _grant_grace(calls, head, now)
        return False
    _sleep(calls, head, left_ns)
    return True


@helper
def _is_outdated(calls, head):
    """Whether the rows have moved since the run began."""
    return calls[r.WHO] == r.DRIVER and head[r.RETURN_BY_NS] == r.AT_ONCE


@helper
def _time_left(calls, head, end, now):
    """Nanoseconds until the run must end."""
    if calls[r.WHO] == r.DRIVER and head[r.RETURN_BY_NS]:
        return min(end, head[r.RETURN_BY_NS]) - now
    return end - now


@helper
def _leave(calls, head, reason):
    """End a run."""
    if calls[r.WHO] == r.DRIVER:
        head[r.LEFT_NS] = now_ns(calls)
        store_flag(calls[r.LOCK] + LOOPING, 0)
    release(calls)
    return reason


def _compile(sources_hash):
    """The loop. What it closes over is part of its key in numba's on-disk cache."""

    @njit(nogil=True, cache=True)
    def run(calls, head, rows, limit_ns):
        """Move chunks until a program ends (`NOTICE`), a descriptor is readable or a message for the caller is there
        (`READABLE`), or the time is over.

        With no time it returns once nothing moves, with less than none after one look at everything. Who calls it owns
        the lock; the driver has released it when it returns.
        """
        calls[r.BUILD] = sources_hash
        _enter(calls, head)
        start = looked_at = now_ns(calls)
        num_inline = -1
        while not _is_outdated(calls, head):
            if num_inline != head[r.NUM_INLINE]:
                # whatever the caller, or progress inline, has added
                num_inline = head[r.NUM_INLINE]
                begin_receives(calls, head, rows.receives, rows.recv_slots, rows.recv_free)
            moved = _pass(calls, head, rows)
            reason = _found(calls, head, rows)
            now = now_ns(calls)
            must_look = now - looked_at >= head[r.LOOK_NS]
            if must_look:
                looked_at = now
                if not reason and _is_readable_by_caller(calls):
                    reason = r.READABLE
            if must_return(calls, head, reason, now):
                return _leave(calls, head, reason or r.READABLE)
            left_ns = _time_left(calls, head, start + limit_ns, now)
            if moved:
                head[r.MOVED_NS] = now
            if left_ns <= 0 and (limit_ns < 0 or must_look or not moved):
                return _leave(calls, head, r.TIMEOUT)
            is_busy = moved or _is_busy(rows)
            if not moved and _rest(calls, head, is_busy, now, left_ns):
                looked_at = 0
        return _leave(calls, head, r.TIMEOUT)

    return run


run = _compile(SOURCES_HASH)
