"""The loop's steps of a send, which goes round the slots: packed into one, posted, and UCX frees the slot.

A chunk that lies in the pools as it travels is posted from there: its slot lends it a row, and no memory.
"""

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
    status_of,
)


@helper
def retire_sends(calls, sends, slots, free):
    """Free the slots that UCX is through with; see which packs are."""
    moved = False
    for slot in range(slots.shape[0]):
        if slots[slot, r.STATE] == r.COPYING:
            if is_copied(slots, slot):
                slots[slot, r.STATE] = r.PACKED
                moved = True
        elif slots[slot, r.STATE] == r.POSTED:
            status = status_of(call(calls[r.REQUEST_STATUS], (slots[slot, r.REQUEST],)))
            if status == IN_PROGRESS:
                continue
            moved = True
            call(calls[r.REQUEST_FREE], (slots[slot, r.REQUEST],))
            send = slots[slot, r.PROGRAM]
            if send >= 0:
                sends[send, r.NUM_IN_FLIGHT] -= 1
                if status != OK:
                    fail(sends, send, r.UCX_ERROR, status, slots[slot, r.CHUNK])
            if status == OK:
                give_back(free, slots, slot)
            else:
                slots[slot, r.STATE] = r.FAILED
                slots[slot, r.PROGRAM] = -1
    return moved


@helper
def _post_send(calls, head, sends, slots, free, slot):
    send, chunk = slots[slot, r.PROGRAM], slots[slot, r.CHUNK]
    raw = call(
        calls[r.TAG_SEND],
        (
            sends[send, r.ENDPOINT],
            slots[slot, r.SOURCE],
            chunk_bytes(head, sends, send, chunk),
            sends[send, r.FIRST_TAG] + chunk,
            calls[r.SEND_PARAM],
        ),
    )
    if FIRST_ERROR <= raw < 0:
        fail(sends, send, r.UCX_ERROR, raw, chunk)
        give_back(free, slots, slot)
        return
    sends[send, r.NUM_POSTED] += 1
    if raw == 0:
        give_back(free, slots, slot)
        return
    slots[slot, r.STATE] = r.POSTED
    slots[slot, r.REQUEST] = raw
    slots[slot, r.SLOT_OWNER] = sends[send, r.OWNER]
    sends[send, r.NUM_IN_FLIGHT] += 1


@helper
def post_packed(calls, head, sends, slots, free):
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
                give_back(free, slots, slot)
                again = True
            elif slots[slot, r.CHUNK] == sends[send, r.NUM_POSTED]:
                sends[send, r.NUM_COPYING] -= 1
                _post_send(calls, head, sends, slots, free, slot)
                again = True
        moved = moved or again
    return moved


@helper
def _place_of(sends, send, chunk):
    places = sends[send, r.PLACES]
    return load(places + chunk * 8) if places else 0


@helper
def _pack(head, sends, send, slots, free):
    slot = free[free[r.HEIGHT]]
    chunk = sends[send, r.NEXT_CHUNK]
    slots[slot, r.PROGRAM] = send
    slots[slot, r.CHUNK] = chunk
    place = _place_of(sends, send, chunk)
    if place:
        slots[slot, r.SOURCE] = place
        slots[slot, r.STATE] = r.PACKED
    else:
        slots[slot, r.SOURCE] = slots[slot, r.ADDRESS]
        error = begin_copy(head, sends, send, slots, slot)
        if error:
            slots[slot, r.PROGRAM] = -1
            fail(sends, send, r.COPY_ERROR, error, chunk)
            return
        slots[slot, r.STATE] = r.PACKED if is_copied(slots, slot) else r.COPYING
    free[r.HEIGHT] -= 1
    sends[send, r.NEXT_CHUNK] += 1
    sends[send, r.NUM_COPYING] += 1


@helper
def pack_in_turn(head, sends, slots, free):
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


@helper
def end_sends(sends, slots):
    """Whether a send came to its end: nothing reads its blocks any more. A stopped one may have slots in flight, unless
    it sends from the pools.
    """
    ended = False
    for send in range(sends.shape[0]):
        if sends[send, r.PHASE] != r.RUNNING or sends[send, r.NUM_COPYING]:
            continue
        is_complete = (
            sends[send, r.NUM_POSTED] == sends[send, r.NUM_CHUNKS]
            and sends[send, r.NUM_IN_FLIGHT] == 0
        )
        is_over = sends[send, r.STOPPED] and (
            sends[send, r.PLACES] == 0 or sends[send, r.NUM_IN_FLIGHT] == 0
        )
        if is_complete or is_over:
            sends[send, r.PHASE] = r.OVER
            ended = True
            for slot in range(slots.shape[0]):
                if slots[slot, r.STATE] == r.POSTED and slots[slot, r.PROGRAM] == send:
                    slots[slot, r.PROGRAM] = -1
    return ended
