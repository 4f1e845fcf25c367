"""The pump's records of int64, by name in numpy and in compiled code, and the constants in them.

`SEND`, `RECEIVE` and `READ` are programs, one per transfer; a `SLOT` is a piece of staging memory; one `STATE` is all
of a pump: its settings and counters, C functions, and where the others are. The writer of a field is in brackets: C is
the caller between two runs, P the pump. Without brackets both write it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

# Phases of a program [P]: a free record is `VACANT`, which the caller sets.
VACANT, RUNNING, QUIET, OVER = 0, 1, 2, 3

# Why a program failed [P]. `error_value` is a UCX status, the status of a copy or of a read, or the bytes of a message.
NO_ERROR, UCX_ERROR, COPY_ERROR, SIZE_ERROR, READ_ERROR = 0, 1, 2, 3, 4

# States of a slot [P]. The caller takes a `FAILED` one, whose message may still be read; a `DETACHED` one lacks memory.
FREE, COPYING, PACKED, POSTED, ARRIVED, FAILED, DETACHED = 0, 1, 2, 3, 4, 5, 6

# Who owns the lock, and so may touch the records.
NOBODY, DRIVER, INLINE = 0, 1, 2

# What a call of a `READ`'s function returns: a part is done, call again; or all is begun, and the fence will be set.
# Else an error: nothing is left to begin, and the fence will be set all the same.
MORE, ALL = -1, 0

# Why a run ended.
NOTICE, READABLE, TIMEOUT = 1, 2, 3


def record_of(*names: str) -> np.dtype[np.void]:
    """Make a record of int64 fields."""
    return np.dtype([(name, np.int64) for name in names])


@lru_cache
def offset_of(record: np.dtype[np.void], name: str) -> int:
    """Bytes before a field."""
    return int(record.fields[name][1])  # type: ignore[index]  # a record has fields


def numbers_of(records: Any) -> memoryview[int]:
    """Return the numbers in an array of such records. numpy takes four times as long for a few when caches are cold."""
    found: memoryview[int] = records.reshape(-1).view(np.int64).data
    return found


def index_of(record: np.dtype[np.void], name: str) -> int:
    """Return a field's index among the numbers of a record."""
    return offset_of(record, name) // 8


PAGED_SIDE = (
    "rows",  # of a part table in host memory, from the copy's first part on; then its window
    "block_ids",
    "block_size",
    "head_start",
    "token_start",
    "run_tokens",
    "step_tokens",
    "skip_tokens",
)
_PROGRAM = (
    "phase",
    "stopped",  # begin nothing new
    "jobs",  # [C] address of what is to be copied
    "error_kind",
    "error_value",
    "error_chunk",
)
_CHUNKS = (
    "first_tag",  # [C] tag of chunk 0
    "num_chunks",  # [C]
    "window",  # [C] most chunks in slots at a time
    "next_chunk",  # [P] the next to be packed, or whose receive is to be posted
    "num_posted",  # [P] sends: posted so far; receives: posted now
    "num_copying",  # [P] slots being packed, or packed and not posted; being unpacked
)
_TIMES = ("started_ns", "ended_ns")  # [P]

SEND = record_of(
    *_PROGRAM,
    *_CHUNKS,
    "endpoint",  # [C] 0 once it is gone
    "num_in_flight",
    "owner",  # [C] whatever the caller wants to find on the slots in flight
    "packing_ns",  # [P] when the first chunk began to be packed; 0: none did. Then when the last one was
    "packed_ns",
    "sending_ns",  # [P] when the first chunk was posted; when UCX had finished with the last one
    "sent_ns",
)
RECEIVE = record_of(
    *_PROGRAM,
    *_CHUNKS,
    *_TIMES,
    "limit",  # chunks that the peer sends
    "num_unpacked",  # [P]
    "arriving_ns",  # [P] when the first chunk arrived, and began to be unpacked; when the last one did
    "arrived_ns",
)
READ = record_of(
    *_PROGRAM,
    *_TIMES,
    "function",  # [C] int64 function(context, jobs, fence address, fence value); see `ALL`
    "context",  # [C]
    "num_calls",  # [P]
    "all_begun",  # [P] nothing is left to begin
    "fence",  # [C] address of a 32-bit flag that is set when everything is done
    "fence_value",
)
SLOT = record_of(
    "state",
    "program",  # [P] index of the program; -1 if that is over and only the network still has the slot
    "chunk",  # [P]
    "request",  # [P] UCX's, while posted
    "address",  # [C]
    "fence",  # [C] address of a 32-bit flag that the copy sets
    "fence_value",  # [P]
    "length",  # [P] bytes of the message that arrived
    "owner",  # [P] that of the send, for as long as UCX has the slot
)

RUN = record_of(  # [C]
    "owner",  # `DRIVER` or `INLINE`
    "limit_ns",  # how long it may take; below 0: a single pass
    "poll_fds",  # pollfd array: UCX's descriptor, the eventfd of `wake_fds` or -1, then those of the caller
    "num_fds",  # of the whole array
)

ARRAYS = {"sends": SEND, "receives": RECEIVE, "reads": READ, "send_slots": SLOT, "recv_slots": SLOT}
"""The arrays that a state has the addresses and the lengths of. [C]"""

STATE = record_of(
    *ARRAYS,
    *(f"num_{name}" for name in ARRAYS),
    "runs",  # [C] address of one `RUN` for each owner: the driver's rests while another takes place inline
    "entering",  # [C] the owner who begins a run
    "wants_slots",  # [C] return once a receive slot is free
    "return_by_ns",  # [C] the driver's thread returns then at the latest; 0: when its own time is over
    # settings [C]
    "copy",  # int64 copy(context, job, slot address, fence address, fence value); 0 if it was begun
    "copy_context",
    "job_bytes",  # a job begins with its chunk's bytes
    "digest",  # uint64 digest(address, bytes) of a chunk; 0: chunks have none, see `digests`
    "digest_room",  # pinned host memory that a GPU's chunk is copied to for that; 0 where chunks are in host memory
    "copy_to_host",  # CUresult copy(to, from, bytes), which waits
    "copy_to_device",
    "spin_ns",  # how long to spin after something moved, before sleeping
    "look_ns",  # between two looks at the descriptors
    "pause_ns",  # between two looks at what is under way, while nothing moves
    "patience_ns",  # how long a complete send waits to be reported together with something else: nobody waits for it
    "grace_ns",  # how long pending work is left to others before the driver's thread returns
    "begin",  # called with `begin_argument` at the start of each run, if not 0
    "begin_argument",
    # C functions [C], the objects they take, and memory for what they return
    "worker",
    "worker_progress",
    "worker_arm",
    "tag_send",
    "tag_recv",
    "tag_probe",
    "request_status",
    "request_free",
    "request_cancel",
    "recv_test",
    "send_param",
    "recv_param",
    "recv_info",  # ucp_tag_recv_info_t: tag, length
    "control_tag",  # the bits of a tag of messages that are for the caller, to whom the loop returns
    "clock_gettime",
    "poll",
    "usleep",
    "read",
    "write",
    "wake_fds",  # pollfd of the eventfd that wakes the driver: the lock is free, or something is pending
    "one",  # address of the int64 that adds one to an eventfd
    "lock",  # address of a `driver_lock.LOCK`
    # counters
    "send_turn",  # [P] the send whose turn it is
    "read_turn",  # [P] the read whose turn it is
    "num_inline",  # [C] how often progress was made inline
    "moved_ns",  # when there was work last
    "complete_ns",  # [P] since when a send is complete that the caller has not seen; 0 if none is
    "pending_ns",  # [P] since when something is pending; 0 if nothing is
    "leave_us",  # [C] how long the driver's thread leaves GIL and lock to others after a run that was shorter
    "left_ns",  # [P] when the driver's thread returned, to wait for the GIL
    "taken_ns",  # [C] when it had the GIL after others could have it
)
