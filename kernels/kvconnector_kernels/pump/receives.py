"""The loop's steps of a receive: it keeps its slots. Posted, unpacked, posted again for its next chunk."""

from __future__ import annotations

from kvconnector_kernels.pump import digests, steps
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call, load
from kvconnector_kernels.pump.steps import helper

_TRUNCATED, _CANCELED = -9, -16
_ALL_TAG_BITS = -1


@helper
def _post_or_free(state, receive, slot):
    """Post a receive for the next chunk in the slot, if the peer sends one."""
    chunk = receive.next_chunk
    if chunk >= receive.limit:
        steps.free_slot(slot)
        return
    raw = call(
        state.tag_recv,
        (
            state.worker,
            slot.address,
            steps.chunk_bytes(state, receive, chunk),
            receive.first_tag + chunk,
            _ALL_TAG_BITS,
            state.recv_param,
        ),
    )
    receive.next_chunk += 1
    slot.chunk = chunk
    if steps.FIRST_ERROR <= raw < 0:
        steps.fail(receive, r.UCX_ERROR, raw, chunk)
        steps.free_slot(slot)
        return
    receive.num_posted += 1
    if raw == 0:
        slot.state = r.ARRIVED
        slot.length = load(state.recv_info + 8)
        return
    slot.state = r.POSTED
    slot.request = raw


@helper
def _abandon(state, slots, receive, program):
    """Receive nothing more from a peer whose endpoint has failed: libucp may crash on what it sent before."""
    receive.limit = min(receive.limit, receive.next_chunk)
    for index in range(slots.shape[0]):
        if slots[index].state == r.POSTED and slots[index].program == program:
            call(state.request_cancel, (state.worker, slots[index].request))


@helper
def _take_chunk(state, slots, receive, slot, status):
    """Unpack the chunk of a receive that ended, or go on with the next chunk if the program is stopped."""
    receive.num_posted -= 1
    if status == steps.OK and slot.length == steps.chunk_bytes(state, receive, slot.chunk):
        if not receive.stopped:
            receive.arrived_ns = steps.now_ns(state)
            receive.arriving_ns = receive.arriving_ns or receive.arrived_ns
            error = digests.check(state, slot.address, slot.length)
            if error == 0:
                error = steps.begin_copy(state, receive, slot)
            if error == 0:
                slot.state = r.COPYING
                receive.num_copying += 1
                return
            steps.fail(receive, r.COPY_ERROR, error, slot.chunk)
    elif slot.chunk < receive.limit:
        if status == steps.OK:
            steps.fail(receive, r.SIZE_ERROR, slot.length, slot.chunk)
        else:
            steps.fail(receive, r.UCX_ERROR, status, slot.chunk)
            if status not in (_TRUNCATED, _CANCELED):
                _abandon(state, slots, receive, slot.program)
    _post_or_free(state, receive, slot)


@helper
def move_receives(state):
    """Take the chunks that arrived, and the slots whose chunks are unpacked."""
    receives, slots = steps.receives_of(state), steps.recv_slots_of(state)
    moved = False
    for index in range(slots.shape[0]):
        slot = slots[index]
        if slot.state == r.POSTED:
            status = steps.status_of(call(state.recv_test, (slot.request, state.recv_info)))
            if status != steps.IN_PROGRESS:
                moved = True
                slot.length = load(state.recv_info + 8)
                call(state.request_free, (slot.request,))
                slot.state = r.ARRIVED
                _take_chunk(state, slots, receives[slot.program], slot, status)
        elif slot.state == r.ARRIVED:
            moved = True
            _take_chunk(state, slots, receives[slot.program], slot, steps.OK)
        elif slot.state == r.COPYING and steps.is_copied(slot):
            moved = True
            receive = receives[slot.program]
            receive.num_copying -= 1
            receive.num_unpacked += 1
            _post_or_free(state, receive, slot)
    return moved


@helper
def begin_receives(state):
    """Give each new program its slots: the caller has checked that there are enough."""
    receives, slots = steps.receives_of(state), steps.recv_slots_of(state)
    for program in range(receives.shape[0]):
        receive = receives[program]
        if receive.phase != r.RUNNING or receive.started_ns:
            continue
        receive.started_ns = steps.now_ns(state) + 1
        for _ in range(receive.window):
            slot = slots[steps.find_free(slots)]
            slot.program = program
            _post_or_free(state, receive, slot)


@helper
def end_receives(state):
    """End receives that write nothing more, or hold no slots. Returns True if there are any."""
    receives = steps.receives_of(state)
    changed = False
    for index in range(receives.shape[0]):
        receive = receives[index]
        phase = receive.phase
        is_ending = receive.stopped or receive.num_unpacked == receive.num_chunks
        if phase == r.RUNNING and is_ending and receive.num_copying == 0:
            phase = r.QUIET
            receive.ended_ns = steps.now_ns(state)
        if phase == r.QUIET and receive.num_posted == 0:
            phase = r.OVER
        if phase != receive.phase:
            receive.phase = phase
            changed = True
    return changed
