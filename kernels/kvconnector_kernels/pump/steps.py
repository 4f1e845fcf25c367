"""What every program's steps of the loop have in common: time, slots, copies, failures."""

from __future__ import annotations

from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call, load, load_flag, two_words

OK, IN_PROGRESS = 0, 1
FIRST_ERROR = -100
_CLOCK_MONOTONIC = 1
_NS_PER_S = 1_000_000_000
_POLL_FD_BYTES = 8

# Called by compiled code only: without the wrappers for Python they compile in two thirds of the time.
helper = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@helper
def status_of(register):
    """What a register that returned a `ucs_status_t`, which is one byte, says."""
    return ((register & 0xFF) ^ 0x80) - 0x80


@helper
def now_ns(calls):
    """The monotonic clock. Several threads may read it at once."""
    timespec = two_words()
    call(calls[r.CLOCK], (_CLOCK_MONOTONIC, timespec))
    return load(timespec) * _NS_PER_S + load(timespec + 8)


@helper
def is_readable(calls, first, timeout_ms):
    """Whether a descriptor from `first` on is readable within the time."""
    count = calls[r.NUM_FDS] - first
    if count <= 0 and timeout_ms == 0:
        return False
    fds = calls[r.POLL_FDS] + first * _POLL_FD_BYTES
    return (call(calls[r.POLL], (fds, count, timeout_ms)) & 0x7FFFFFFF) > 0


@helper
def give_back(free, slots, slot):
    """The slot is free."""
    slots[slot, r.STATE] = r.FREE
    slots[slot, r.PROGRAM] = -1
    free[r.HEIGHT] += 1
    free[free[r.HEIGHT]] = slot


@helper
def fail(programs, program, kind, value, chunk):
    """Keep the first error; begin nothing new."""
    programs[program, r.STOPPED] = 1
    if programs[program, r.ERROR_KIND] == r.NO_ERROR:
        programs[program, r.ERROR_KIND] = kind
        programs[program, r.ERROR_VALUE] = value
        programs[program, r.ERROR_CHUNK] = chunk


@helper
def begin_copy(head, programs, program, slots, slot):
    """Start to pack or unpack the slot's chunk; its fence will tell. 0, or the copy's error."""
    fence_value = (slots[slot, r.FENCE_VALUE] + 1) & 0xFFFFFFFF
    slots[slot, r.FENCE_VALUE] = fence_value
    job = programs[program, r.JOBS] + slots[slot, r.CHUNK] * head[r.JOB_BYTES]
    return call(
        head[r.COPY],
        (head[r.COPY_CONTEXT], job, slots[slot, r.ADDRESS], slots[slot, r.FENCE], fence_value),
    )


@helper
def is_copied(slots, slot):
    """Whether the copy that the slot was last in is through."""
    return load_flag(slots[slot, r.FENCE]) == slots[slot, r.FENCE_VALUE]


@helper
def chunk_bytes(head, programs, program, chunk):
    """Bytes of a chunk, which its job begins with."""
    return load(programs[program, r.JOBS] + chunk * head[r.JOB_BYTES])
