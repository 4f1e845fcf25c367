"""The pump's loop: every chunk of every program from memory to memory, in one call that holds no GIL.

A send goes round the slots: packed into one, posted, and the slot is free when UCX is through with it. A receive
keeps its slots: posted, unpacked, posted again for its next chunk. Nothing here waits for one thing while another can
move.
"""

from __future__ import annotations

from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call, load, load_flag

_OK, _IN_PROGRESS = 0, 1
_TRUNCATED, _CANCELED = -9, -16
_FIRST_ERROR = -100
_ALL_TAG_BITS = -1
_CLOCK_MONOTONIC = 1
_NS_PER_S, _NS_PER_MS = 1_000_000_000, 1_000_000
_POLL_FD_BYTES = 8
_MAX_PROGRESS_STEPS = 64

# Called by compiled code only: without the wrappers for Python they compile in two thirds of the time.
_helper = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_helper
def _status(register):
    """`ucs_status_t` is one byte."""
    return ((register & 0xFF) ^ 0x80) - 0x80


@_helper
def _now(calls):
    call(calls[r.CLOCK], (_CLOCK_MONOTONIC, calls[r.TIMESPEC]))
    return load(calls[r.TIMESPEC]) * _NS_PER_S + load(calls[r.TIMESPEC] + 8)


@_helper
def _is_readable(calls, first, timeout_ms):
    """Whether a descriptor from `first` on is readable within the time."""
    count = calls[r.NUM_FDS] - first
    if count <= 0 and timeout_ms == 0:
        return False
    fds = calls[r.POLL_FDS] + first * _POLL_FD_BYTES
    return (call(calls[r.POLL], (fds, count, timeout_ms)) & 0x7FFFFFFF) > 0


@_helper
def _give_back(free, slots, slot):
    slots[slot, r.STATE] = r.FREE
    slots[slot, r.PROGRAM] = -1
    free[r.HEIGHT] += 1
    free[free[r.HEIGHT]] = slot


@_helper
def _fail(programs, program, kind, value, chunk):
    """Keep the first error; begin nothing new."""
    programs[program, r.STOPPED] = 1
    if programs[program, r.ERROR_KIND] == r.NO_ERROR:
        programs[program, r.ERROR_KIND] = kind
        programs[program, r.ERROR_VALUE] = value
        programs[program, r.ERROR_CHUNK] = chunk


@_helper
def _begin_copy(head, programs, program, slots, slot):
    """Start to pack or unpack the slot's chunk; its fence will tell. 0, or the copy's error."""
    fence_value = (slots[slot, r.FENCE_VALUE] + 1) & 0xFFFFFFFF
    slots[slot, r.FENCE_VALUE] = fence_value
    job = programs[program, r.JOBS] + slots[slot, r.CHUNK] * head[r.JOB_BYTES]
    return call(
        head[r.COPY],
        (head[r.COPY_CONTEXT], job, slots[slot, r.ADDRESS], slots[slot, r.FENCE], fence_value),
    )


@_helper
def _is_copied(slots, slot):
    return load_flag(slots[slot, r.FENCE]) == slots[slot, r.FENCE_VALUE]


@_helper
def _chunk_bytes(head, programs, program, chunk):
    return load(programs[program, r.JOBS] + chunk * head[r.JOB_BYTES])


@_helper
def _retire_sends(calls, sends, slots, free):
    """Free the slots that UCX is through with; see which packs are."""
    moved = False
    for slot in range(slots.shape[0]):
        if slots[slot, r.STATE] == r.COPYING:
            if _is_copied(slots, slot):
                slots[slot, r.STATE] = r.PACKED
                moved = True
        elif slots[slot, r.STATE] == r.POSTED:
            status = _status(call(calls[r.REQUEST_STATUS], (slots[slot, r.REQUEST],)))
            if status == _IN_PROGRESS:
                continue
            moved = True
            call(calls[r.REQUEST_FREE], (slots[slot, r.REQUEST],))
            send = slots[slot, r.PROGRAM]
            if send >= 0:
                sends[send, r.NUM_IN_FLIGHT] -= 1
                if status != _OK:
                    _fail(sends, send, r.UCX_ERROR, status, slots[slot, r.CHUNK])
            _give_back(free, slots, slot)
    return moved


@_helper
def _post_send(calls, head, sends, slots, free, slot):
    send, chunk = slots[slot, r.PROGRAM], slots[slot, r.CHUNK]
    raw = call(
        calls[r.TAG_SEND],
        (
            sends[send, r.ENDPOINT],
            slots[slot, r.ADDRESS],
            _chunk_bytes(head, sends, send, chunk),
            sends[send, r.FIRST_TAG] + chunk,
            calls[r.SEND_PARAM],
        ),
    )
    if _FIRST_ERROR <= raw < 0:
        _fail(sends, send, r.UCX_ERROR, raw, chunk)
        _give_back(free, slots, slot)
        return
    sends[send, r.NUM_POSTED] += 1
    if raw == 0:
        _give_back(free, slots, slot)
        return
    slots[slot, r.STATE] = r.POSTED
    slots[slot, r.REQUEST] = raw
    slots[slot, r.SLOT_OWNER] = sends[send, r.OWNER]
    sends[send, r.NUM_IN_FLIGHT] += 1


@_helper
def _post_packed(calls, head, sends, slots, free):
    """Post what is packed, each program's chunks in order; drop what a stopped program has packed."""
    moved = False
    again = True
    while again:
        again = False
        for slot in range(slots.shape[0]):
            if slots[slot, r.STATE] != r.PACKED:
                continue
            send = slots[slot, r.PROGRAM]
            if sends[send, r.STOPPED]:
                sends[send, r.NUM_COPYING] -= 1
                _give_back(free, slots, slot)
                again = True
            elif slots[slot, r.CHUNK] == sends[send, r.NUM_POSTED]:
                sends[send, r.NUM_COPYING] -= 1
                _post_send(calls, head, sends, slots, free, slot)
                again = True
        moved = moved or again
    return moved


@_helper
def _pack(head, sends, send, slots, free):
    slot = free[free[r.HEIGHT]]
    chunk = sends[send, r.NEXT_CHUNK]
    slots[slot, r.PROGRAM] = send
    slots[slot, r.CHUNK] = chunk
    error = _begin_copy(head, sends, send, slots, slot)
    if error:
        slots[slot, r.PROGRAM] = -1
        _fail(sends, send, r.COPY_ERROR, error, chunk)
        return
    free[r.HEIGHT] -= 1
    slots[slot, r.STATE] = r.PACKED if _is_copied(slots, slot) else r.COPYING
    sends[send, r.NEXT_CHUNK] += 1
    sends[send, r.NUM_COPYING] += 1


@_helper
def _pack_in_turn(head, sends, slots, free):
    """One chunk of each send that may go on, round and round while there are slots."""
    num_sends = sends.shape[0]
    moved = False
    idle = 0
    while idle < num_sends and free[r.HEIGHT] > 0:
        send = head[r.TURN] % num_sends
        head[r.TURN] = send + 1
        if (
            sends[send, r.PHASE] != r.RUNNING
            or sends[send, r.STOPPED]
            or sends[send, r.NEXT_CHUNK] >= sends[send, r.NUM_CHUNKS]
            or sends[send, r.NUM_COPYING] + sends[send, r.NUM_IN_FLIGHT] >= sends[send, r.WINDOW]
        ):
            idle += 1
            continue
        idle = 0
        moved = True
        _pack(head, sends, send, slots, free)
    return moved


@_helper
def _end_sends(sends, slots):
    """Whether a send came to its end: nothing reads its blocks any more. A stopped one may have slots in flight."""
    ended = False
    for send in range(sends.shape[0]):
        if sends[send, r.PHASE] != r.RUNNING or sends[send, r.NUM_COPYING]:
            continue
        is_complete = (
            sends[send, r.NUM_POSTED] == sends[send, r.NUM_CHUNKS]
            and sends[send, r.NUM_IN_FLIGHT] == 0
        )
        if is_complete or sends[send, r.STOPPED]:
            sends[send, r.PHASE] = r.OVER
            ended = True
            for slot in range(slots.shape[0]):
                if slots[slot, r.STATE] == r.POSTED and slots[slot, r.PROGRAM] == send:
                    slots[slot, r.PROGRAM] = -1
    return ended


@_helper
def _post_or_free(calls, head, receives, receive, slots, free, slot):
    """Await the next chunk in the slot, if the peer sends one."""
    chunk = receives[receive, r.NEXT_CHUNK]
    if chunk >= receives[receive, r.LIMIT]:
        _give_back(free, slots, slot)
        return
    raw = call(
        calls[r.TAG_RECV],
        (
            calls[r.WORKER],
            slots[slot, r.ADDRESS],
            _chunk_bytes(head, receives, receive, chunk),
            receives[receive, r.FIRST_TAG] + chunk,
            _ALL_TAG_BITS,
            calls[r.RECV_PARAM],
        ),
    )
    receives[receive, r.NEXT_CHUNK] += 1
    slots[slot, r.CHUNK] = chunk
    if _FIRST_ERROR <= raw < 0:
        _fail(receives, receive, r.UCX_ERROR, raw, chunk)
        _give_back(free, slots, slot)
        return
    receives[receive, r.NUM_POSTED] += 1
    if raw == 0:
        slots[slot, r.STATE] = r.ARRIVED
        slots[slot, r.LENGTH] = load(calls[r.RECV_INFO] + 8)
        return
    slots[slot, r.STATE] = r.POSTED
    slots[slot, r.REQUEST] = raw


@_helper
def _abandon(calls, receives, receive, slots):
    """Await nothing more of a peer whose endpoint has failed: libucp may crash on what it sent before."""
    receives[receive, r.LIMIT] = min(receives[receive, r.LIMIT], receives[receive, r.NEXT_CHUNK])
    for slot in range(slots.shape[0]):
        if slots[slot, r.STATE] == r.POSTED and slots[slot, r.PROGRAM] == receive:
            call(calls[r.REQUEST_CANCEL], (calls[r.WORKER], slots[slot, r.REQUEST]))


@_helper
def _take_chunk(calls, head, receives, receive, slots, free, slot, status):
    """A receive ended: unpack its chunk, or go on with the next where the program is stopped."""
    receives[receive, r.NUM_POSTED] -= 1
    chunk = slots[slot, r.CHUNK]
    expected = _chunk_bytes(head, receives, receive, chunk)
    if status == _OK and slots[slot, r.LENGTH] == expected:
        if not receives[receive, r.STOPPED]:
            error = _begin_copy(head, receives, receive, slots, slot)
            if error == 0:
                slots[slot, r.STATE] = r.COPYING
                receives[receive, r.NUM_COPYING] += 1
                return
            _fail(receives, receive, r.COPY_ERROR, error, chunk)
    elif chunk < receives[receive, r.LIMIT]:
        if status == _OK:
            _fail(receives, receive, r.SIZE_ERROR, slots[slot, r.LENGTH], chunk)
        else:
            _fail(receives, receive, r.UCX_ERROR, status, chunk)
            if status not in (_TRUNCATED, _CANCELED):
                _abandon(calls, receives, receive, slots)
    _post_or_free(calls, head, receives, receive, slots, free, slot)


@_helper
def _move_receives(calls, head, receives, slots, free):
    moved = False
    for slot in range(slots.shape[0]):
        state, receive = slots[slot, r.STATE], slots[slot, r.PROGRAM]
        if state == r.POSTED:
            status = _status(call(calls[r.RECV_TEST], (slots[slot, r.REQUEST], calls[r.RECV_INFO])))
            if status != _IN_PROGRESS:
                moved = True
                slots[slot, r.LENGTH] = load(calls[r.RECV_INFO] + 8)
                call(calls[r.REQUEST_FREE], (slots[slot, r.REQUEST],))
                slots[slot, r.STATE] = r.ARRIVED
                _take_chunk(calls, head, receives, receive, slots, free, slot, status)
        elif state == r.ARRIVED:
            moved = True
            _take_chunk(calls, head, receives, receive, slots, free, slot, _OK)
        elif state == r.COPYING and _is_copied(slots, slot):
            moved = True
            receives[receive, r.NUM_COPYING] -= 1
            receives[receive, r.NUM_UNPACKED] += 1
            _post_or_free(calls, head, receives, receive, slots, free, slot)
    return moved


@_helper
def _begin_receives(calls, head, receives, slots, free):
    """Give a vacant program's slots to it: the caller has seen that there are enough."""
    for receive in range(receives.shape[0]):
        if receives[receive, r.PHASE] != r.RUNNING or receives[receive, r.STARTED_NS]:
            continue
        receives[receive, r.STARTED_NS] = _now(calls)
        for _ in range(receives[receive, r.WINDOW]):
            slot = free[free[r.HEIGHT]]
            free[r.HEIGHT] -= 1
            slots[slot, r.PROGRAM] = receive
            _post_or_free(calls, head, receives, receive, slots, free, slot)


@_helper
def _end_receives(calls, receives):
    """Whether a receive writes its blocks no more, or holds no slots any more."""
    changed = False
    for receive in range(receives.shape[0]):
        phase = receives[receive, r.PHASE]
        if phase == r.RUNNING and receives[receive, r.NUM_COPYING] == 0:
            is_complete = receives[receive, r.NUM_UNPACKED] == receives[receive, r.NUM_CHUNKS]
            if is_complete or receives[receive, r.STOPPED]:
                phase = r.QUIET
                receives[receive, r.ENDED_NS] = _now(calls)
        if phase == r.QUIET and receives[receive, r.NUM_POSTED] == 0:
            phase = r.OVER
        if phase != receives[receive, r.PHASE]:
            receives[receive, r.PHASE] = phase
            changed = True
    return changed


@_helper
def _is_copying(programs):
    copying = 0
    for program in range(programs.shape[0]):
        if programs[program, r.PHASE] == r.RUNNING:
            copying += programs[program, r.NUM_COPYING]
    return copying > 0


@_helper
def _progress(calls):
    for _ in range(_MAX_PROGRESS_STEPS):
        if (call(calls[r.WORKER_PROGRESS], (calls[r.WORKER],)) & 0xFFFFFFFF) == 0:
            return


@_helper
def _sleep(calls, head, left_ns):
    """Sleep until UCX or a watched descriptor has something, or the time is over."""
    if _status(call(calls[r.WORKER_ARM], (calls[r.WORKER],))) == _OK:
        head[r.NUM_SLEEPS] += 1
        _is_readable(calls, 0, left_ns // _NS_PER_MS + 1)


@_helper
def _pass(calls, head, sends, send_slots, send_free, receives, recv_slots, recv_free):
    """Move what can move now."""
    head[r.NUM_PASSES] += 1
    _progress(calls)
    moved = _retire_sends(calls, sends, send_slots, send_free)
    moved = _pack_in_turn(head, sends, send_slots, send_free) or moved
    moved = _post_packed(calls, head, sends, send_slots, send_free) or moved
    return _move_receives(calls, head, receives, recv_slots, recv_free) or moved


@_helper
def _enter(calls, head):
    head[r.NUM_RUNS] += 1
    if calls[r.BEGIN]:
        call(calls[r.BEGIN], (calls[r.BEGIN_ARGUMENT],))


@_helper
def _rest(calls, head, sends, receives, moved_at, now, left_ns):
    """Pause while something may end any moment, else sleep. Whether it slept."""
    if now - moved_at < head[r.SPIN_NS] or _is_copying(sends) or _is_copying(receives):
        while _now(calls) - now < head[r.PAUSE_NS]:
            pass
        return False
    _sleep(calls, head, left_ns)
    return True


@njit(nogil=True, cache=True)
def run(calls, head, sends, send_slots, send_free, receives, recv_slots, recv_free, limit_ns):
    """Move chunks until a program ends (`NOTICE`), a descriptor is readable (`READABLE`), or the time is over.

    With no time it returns once nothing moves.
    """
    _enter(calls, head)
    start = moved_at = looked_at = _now(calls)
    _begin_receives(calls, head, receives, recv_slots, recv_free)
    while True:
        moved = _pass(calls, head, sends, send_slots, send_free, receives, recv_slots, recv_free)
        ended = _end_sends(sends, send_slots)
        ended = _end_receives(calls, receives) or ended
        if ended or (head[r.WANTS_SLOTS] and recv_free[r.HEIGHT]):
            return r.NOTICE
        now = _now(calls)
        if moved:
            moved_at = now
        elif now - start >= limit_ns:
            return r.TIMEOUT
        if now - looked_at >= head[r.LOOK_NS]:
            looked_at = now
            if now - start >= limit_ns:
                return r.TIMEOUT
            if _is_readable(calls, 1, 0):
                return r.READABLE
        if moved:
            continue
        if _rest(calls, head, sends, receives, moved_at, now, limit_ns - (now - start)):
            looked_at = 0
