"""Steps that all programs of the loop share: time, slots, copies, failures.

`state`, a program and a slot are records.
"""

from __future__ import annotations

from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import array_at, call, load, load_flag, two_words

OK, IN_PROGRESS = 0, 1
FIRST_ERROR = -100
NO_SLOT = -1
_CLOCK_MONOTONIC = 1
NS_PER_S = 1_000_000_000
_POLL_FD_BYTES = 8

# Called by compiled code only: without the wrappers for Python they compile in two thirds of the time.
helper = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


# The arrays of a state. They move when they grow: no thread keeps one after it has released the lock.
sends_of = helper(lambda state: array_at(state.sends, state.num_sends, r.SEND))
receives_of = helper(lambda state: array_at(state.receives, state.num_receives, r.RECEIVE))
reads_of = helper(lambda state: array_at(state.reads, state.num_reads, r.READ))
# The slots that chunks are packed into, and those that they are received into.
send_slots_of = helper(lambda state: array_at(state.send_slots, state.num_send_slots, r.SLOT))
recv_slots_of = helper(lambda state: array_at(state.recv_slots, state.num_recv_slots, r.SLOT))


@helper
def status_of(register):
    """Return the `ucs_status_t` in a register, of which it is one byte."""
    return ((register & 0xFF) ^ 0x80) - 0x80


@helper
def now_ns(state):
    """Return the time of the monotonic clock. Several threads may read it at once."""
    timespec = two_words()
    call(state.clock_gettime, (_CLOCK_MONOTONIC, timespec))
    return load(timespec) * NS_PER_S + load(timespec + 8)


@helper
def is_readable(state, run, first, timeout_ms):
    """Returns True if a descriptor from `first` on is readable within the time."""
    count = run.num_fds - first
    if count <= 0 and timeout_ms == 0:
        return False
    fds = run.poll_fds + first * _POLL_FD_BYTES
    return (call(state.poll, (fds, count, timeout_ms)) & 0x7FFFFFFF) > 0


@helper
def find_free(slots):
    """Return the first free slot, which was used recently, or `NO_SLOT`."""
    for index in range(slots.shape[0]):
        if slots[index].state == r.FREE:
            return index
    return NO_SLOT


@helper
def free_slot(slot):
    """Mark the slot as free."""
    slot.state = r.FREE
    slot.program = -1


@helper
def fail(program, kind, value, chunk):
    """Keep the first error; begin nothing new."""
    program.stopped = 1
    if program.error_kind == r.NO_ERROR:
        program.error_kind = kind
        program.error_value = value
        program.error_chunk = chunk


@helper
def begin_copy(state, program, slot):
    """Begin to pack or unpack the slot's chunk; the copy sets the slot's fence. Returns 0 or the copy's error."""
    slot.fence_value = (slot.fence_value + 1) & 0xFFFFFFFF
    job = program.jobs + slot.chunk * state.job_bytes
    return call(state.copy, (state.copy_context, job, slot.address, slot.fence, slot.fence_value))


@helper
def is_copied(slot):
    """Returns True if the slot's last copy has ended."""
    return load_flag(slot.fence) == slot.fence_value


@helper
def chunk_bytes(state, program, chunk):
    """Return the bytes of a chunk, with which its job begins."""
    return load(program.jobs + chunk * state.job_bytes)


@helper
def is_copying(programs):
    """Returns True if a chunk is being packed or unpacked, which no descriptor shows."""
    num_copying = 0
    for index in range(programs.shape[0]):
        if programs[index].phase == r.RUNNING:
            num_copying += programs[index].num_copying
    return num_copying > 0
