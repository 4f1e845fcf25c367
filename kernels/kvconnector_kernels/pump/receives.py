"""The loop's steps of a receive: it keeps its slots. Posted, unpacked, posted again for its next chunk."""

from __future__ import annotations

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call, load
from kvconnector_kernels.pump.steps import (
    FIRST_ERROR,
    IN_PROGRESS,
    OK,
    begin_copy,
    chunk_bytes,
    fail,
    give_back,
    helper,
    is_copied,
    now_ns,
    status_of,
)

_TRUNCATED, _CANCELED = -9, -16
_ALL_TAG_BITS = -1


@helper
def _post_or_free(calls, head, receives, receive, slots, free, slot):
    """Await the next chunk in the slot, if the peer sends one."""
    chunk = receives[receive, r.NEXT_CHUNK]
    if chunk >= receives[receive, r.LIMIT]:
        give_back(free, slots, slot)
        return
    raw = call(
        calls[r.TAG_RECV],
        (
            calls[r.WORKER],
            slots[slot, r.ADDRESS],
            chunk_bytes(head, receives, receive, chunk),
            receives[receive, r.FIRST_TAG] + chunk,
            _ALL_TAG_BITS,
            calls[r.RECV_PARAM],
        ),
    )
    receives[receive, r.NEXT_CHUNK] += 1
    slots[slot, r.CHUNK] = chunk
    if FIRST_ERROR <= raw < 0:
        fail(receives, receive, r.UCX_ERROR, raw, chunk)
        give_back(free, slots, slot)
        return
    receives[receive, r.NUM_POSTED] += 1
    if raw == 0:
        slots[slot, r.STATE] = r.ARRIVED
        slots[slot, r.LENGTH] = load(calls[r.RECV_INFO] + 8)
        return
    slots[slot, r.STATE] = r.POSTED
    slots[slot, r.REQUEST] = raw


@helper
def _abandon(calls, receives, receive, slots):
    """Await nothing more of a peer whose endpoint has failed: libucp may crash on what it sent before."""
    receives[receive, r.LIMIT] = min(receives[receive, r.LIMIT], receives[receive, r.NEXT_CHUNK])
    for slot in range(slots.shape[0]):
        if slots[slot, r.STATE] == r.POSTED and slots[slot, r.PROGRAM] == receive:
            call(calls[r.REQUEST_CANCEL], (calls[r.WORKER], slots[slot, r.REQUEST]))


@helper
def _take_chunk(calls, head, receives, receive, slots, free, slot, status):
    """A receive ended: unpack its chunk, or go on with the next where the program is stopped."""
    receives[receive, r.NUM_POSTED] -= 1
    chunk = slots[slot, r.CHUNK]
    expected = chunk_bytes(head, receives, receive, chunk)
    if status == OK and slots[slot, r.LENGTH] == expected:
        if not receives[receive, r.STOPPED]:
            error = begin_copy(head, receives, receive, slots, slot)
            if error == 0:
                slots[slot, r.STATE] = r.COPYING
                receives[receive, r.NUM_COPYING] += 1
                return
            fail(receives, receive, r.COPY_ERROR, error, chunk)
    elif chunk < receives[receive, r.LIMIT]:
        if status == OK:
            fail(receives, receive, r.SIZE_ERROR, slots[slot, r.LENGTH], chunk)
        else:
            fail(receives, receive, r.UCX_ERROR, status, chunk)
            if status not in (_TRUNCATED, _CANCELED):
                _abandon(calls, receives, receive, slots)
    _post_or_free(calls, head, receives, receive, slots, free, slot)


@helper
def move_receives(calls, head, receives, slots, free):
    """Take the chunks that arrived, and the slots whose chunks are unpacked."""
    moved = False
    for slot in range(slots.shape[0]):
        state, receive = slots[slot, r.STATE], slots[slot, r.PROGRAM]
        if state == r.POSTED:
            status = status_of(
                call(calls[r.RECV_TEST], (slots[slot, r.REQUEST], calls[r.RECV_INFO]))
            )
            if status != IN_PROGRESS:
                moved = True
                slots[slot, r.LENGTH] = load(calls[r.RECV_INFO] + 8)
                call(calls[r.REQUEST_FREE], (slots[slot, r.REQUEST],))
                slots[slot, r.STATE] = r.ARRIVED
                _take_chunk(calls, head, receives, receive, slots, free, slot, status)
        elif state == r.ARRIVED:
            moved = True
            _take_chunk(calls, head, receives, receive, slots, free, slot, OK)
        elif state == r.COPYING and is_copied(slots, slot):
            moved = True
            receives[receive, r.NUM_COPYING] -= 1
            receives[receive, r.NUM_UNPACKED] += 1
            _post_or_free(calls, head, receives, receive, slots, free, slot)
    return moved


@helper
def begin_receives(calls, head, receives, slots, free):
    """Give each new program its slots: the caller has seen that there are enough."""
    for receive in range(receives.shape[0]):
        if receives[receive, r.PHASE] != r.RUNNING or receives[receive, r.STARTED_NS]:
            continue
        receives[receive, r.STARTED_NS] = now_ns(calls) + 1
        for _ in range(receives[receive, r.WINDOW]):
            slot = free[free[r.HEIGHT]]
            free[r.HEIGHT] -= 1
            slots[slot, r.PROGRAM] = receive
            _post_or_free(calls, head, receives, receive, slots, free, slot)


@helper
def end_receives(calls, receives):
    """Whether a receive writes its blocks no more, or holds no slots any more."""
    changed = False
    for receive in range(receives.shape[0]):
        phase = receives[receive, r.PHASE]
        if phase == r.RUNNING and receives[receive, r.NUM_COPYING] == 0:
            is_complete = receives[receive, r.NUM_UNPACKED] == receives[receive, r.NUM_CHUNKS]
            if is_complete or receives[receive, r.STOPPED]:
                phase = r.QUIET
                receives[receive, r.ENDED_NS] = now_ns(calls)
        if phase == r.QUIET and receives[receive, r.NUM_POSTED] == 0:
            phase = r.OVER
        if phase != receives[receive, r.PHASE]:
            receives[receive, r.PHASE] = phase
            changed = True
    return changed
