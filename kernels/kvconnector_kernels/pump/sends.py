"""The loop's steps of a send: each chunk is packed into a slot and posted; once UCX has sent it, the slot is free."""

from __future__ import annotations

from kvconnector_kernels.pump import digests, steps
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call
from kvconnector_kernels.pump.steps import helper


@helper
def _end_pack(state, send, slot):
    """Finish the packing of a chunk. Without its digest the send stops, and drops it with all further ones."""
    error = digests.append(state, slot.address, steps.chunk_bytes(state, send, slot.chunk))
    if error:
        steps.fail(send, r.COPY_ERROR, error, slot.chunk)
    slot.state = r.PACKED
    send.packed_ns = steps.now_ns(state)


@helper
def retire_sends(state):
    """Free the slots that UCX has sent, and finish chunks that are packed."""
    sends, slots = steps.sends_of(state), steps.send_slots_of(state)
    moved = False
    for index in range(slots.shape[0]):
        slot = slots[index]
        if slot.state == r.COPYING:
            if steps.is_copied(slot):
                _end_pack(state, sends[slot.program], slot)
                moved = True
        elif slot.state == r.POSTED:
            status = steps.status_of(call(state.request_status, (slot.request,)))
            if status == steps.IN_PROGRESS:
                continue
            moved = True
            call(state.request_free, (slot.request,))
            if slot.program >= 0:
                send = sends[slot.program]
                send.num_in_flight -= 1
                send.sent_ns = steps.now_ns(state)
                if status != steps.OK:
                    steps.fail(send, r.UCX_ERROR, status, slot.chunk)
            steps.free_slot(slot)
            if status != steps.OK:
                slot.state = r.FAILED
    return moved


@helper
def _post_send(state, send, slot):
    if send.sending_ns == 0:
        send.sending_ns = steps.now_ns(state)
    raw = call(
        state.tag_send,
        (
            send.endpoint,
            slot.address,
            steps.chunk_bytes(state, send, slot.chunk),
            send.first_tag + slot.chunk,
            state.send_param,
        ),
    )
    if steps.FIRST_ERROR <= raw < 0:
        steps.fail(send, r.UCX_ERROR, raw, slot.chunk)
        steps.free_slot(slot)
        return
    send.num_posted += 1
    if raw == 0:
        send.sent_ns = steps.now_ns(state)
        steps.free_slot(slot)
        return
    slot.state = r.POSTED
    slot.request = raw
    slot.owner = send.owner
    send.num_in_flight += 1


@helper
def post_packed(state):
    """Post packed chunks, those of each program in order; drop those of stopped programs."""
    sends, slots = steps.sends_of(state), steps.send_slots_of(state)
    moved = False
    again = True
    while again:
        again = False
        for index in range(slots.shape[0]):
            slot = slots[index]
            if slot.state != r.PACKED:
                continue
            send = sends[slot.program]
            if send.stopped:
                send.num_copying -= 1
                steps.free_slot(slot)
                again = True
            elif slot.chunk == send.num_posted:
                send.num_copying -= 1
                _post_send(state, send, slot)
                again = True
        moved = moved or again
    return moved


@helper
def _pack(state, send, slot):
    """Begin to pack the next chunk into the slot. Returns False if that failed."""
    slot.chunk = send.next_chunk
    if send.packing_ns == 0:
        send.packing_ns = steps.now_ns(state)
    error = steps.begin_copy(state, send, slot)
    if error:
        steps.fail(send, r.COPY_ERROR, error, slot.chunk)
        return False
    slot.state = r.COPYING
    if steps.is_copied(slot):
        _end_pack(state, send, slot)
    send.next_chunk += 1
    send.num_copying += 1
    return True


@helper
def _may_pack(send):
    return (
        send.phase == r.RUNNING
        and not send.stopped
        and send.next_chunk < send.num_chunks
        and send.num_copying + send.num_in_flight < send.window
    )


@helper
def pack_next(state):
    """Pack one chunk, of the sends in turn, so that it is posted before the next. Returns True if there was one."""
    sends, slots = steps.sends_of(state), steps.send_slots_of(state)
    index = steps.find_free(slots)
    if index == steps.NO_SLOT:
        return False
    for _ in range(sends.shape[0]):
        turn = state.send_turn % sends.shape[0]
        state.send_turn = turn + 1
        if _may_pack(sends[turn]):
            if _pack(state, sends[turn], slots[index]):
                slots[index].program = turn
            return True
    return False


@helper
def end_sends(state):
    """End sends whose blocks are read no more, though slots may be in flight. Returns True if a stopped one ended.
    Complete ones do not count, since their end is reported with the consumer's confirmation.
    """
    sends, slots = steps.sends_of(state), steps.send_slots_of(state)
    ended = False
    state.complete_ns = 0
    for index in range(sends.shape[0]):
        send = sends[index]
        is_complete = send.num_posted == send.num_chunks and send.num_in_flight == 0
        if send.phase == r.RUNNING and send.num_copying == 0 and (is_complete or send.stopped):
            send.phase = r.OVER
            ended = ended or not is_complete or send.stopped != 0
            for slot in range(slots.shape[0]):
                if slots[slot].state == r.POSTED and slots[slot].program == index:
                    slots[slot].program = -1
        if send.phase == r.OVER and (state.complete_ns == 0 or send.sent_ns < state.complete_ns):
            state.complete_ns = send.sent_ns
    return ended
