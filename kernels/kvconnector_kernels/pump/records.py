"""The rows that the pump works on: columns of int64 arrays, and the constants in them.

`send`, `receive` and `pull` rows are programs, one a transfer; `slot` rows are staging memory; one `head` row holds the
settings and counters of a pump, one `calls` row the C functions. Who writes a column is in brackets: C the caller
between two runs, P the pump.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Phases of a program [P]: a free row is `VACANT`, which the caller sets.
VACANT, RUNNING, QUIET, OVER = 0, 1, 2, 3

# Why a program failed [P]. The column `ERROR_VALUE` is a UCX status, the status of a copy or a pull, or the bytes of a
# message.
NO_ERROR, UCX_ERROR, COPY_ERROR, SIZE_ERROR, PULL_ERROR = 0, 1, 2, 3, 4

# States of a slot [P]. The caller takes a `FAILED` one, whose message may still be read.
FREE, COPYING, PACKED, POSTED, ARRIVED, FAILED = 0, 1, 2, 3, 4, 5

# Columns that all kinds of program have, but pulls no chunks and so no tags and windows.
PHASE = 0
FIRST_TAG = 1  # [C] tag of chunk 0
JOBS = 2  # [C] address of the chunks' jobs
NUM_CHUNKS = 3  # [C]
WINDOW = 4  # [C] chunks in slots at a time
STOPPED = 5  # [C, P] begin nothing new
ERROR_KIND = 6
ERROR_VALUE = 7
ERROR_CHUNK = 8
NEXT_CHUNK = 9  # [P] the next to be packed, or whose receive is to be posted
NUM_POSTED = 10  # [P] sends: posted so far; receives: posted now
NUM_COPYING = 11  # [P] slots being packed, or packed and not posted; being unpacked
# Sends only.
ENDPOINT = 12  # [C] 0 once it is gone
NUM_IN_FLIGHT = 13  # [P]
OWNER = 14  # [C] whatever the caller wants to find on the slots in flight
PLACES = 15  # [C] address of each chunk's address in the pools, 0 where it is packed; or 0: all are packed
# Receives only.
LIMIT = 12  # [C] chunks that the peer sends
NUM_UNPACKED = 13  # [P]
STARTED_NS = 14  # [P]
ENDED_NS = 15  # [P]
# Pulls only, which have `STARTED_NS` and `ENDED_NS` too.
PULL = 1  # [C] int64 pull(context, jobs, fence address, fence value); see `ALL`
PULL_CONTEXT = 4  # [C]
NUM_CALLS = 9  # [P] of `PULL`
ALL_BEGUN = 10  # [P] nothing is left to begin
PULL_FENCE = 11  # [C] address of a 32-bit flag that is set when all is through
PULL_FENCE_VALUE = 12
PROGRAM_COLUMNS = 16

# Slots.
STATE = 0
PROGRAM = 1  # row of the program; -1 if that is over and only the network still has the slot
CHUNK = 2
REQUEST = 3  # UCX's, while posted
ADDRESS = 4  # [C]
FENCE = 5  # [C] address of a 32-bit flag that the copy sets
FENCE_VALUE = 6
LENGTH = 7  # bytes of the message that arrived
SLOT_OWNER = 8  # that of the send, for as long as UCX has the slot
SOURCE = 9  # what is sent from: the slot's own memory, or the chunk's place
SLOT_COLUMNS = 10

# A stack of free slots: its height, then their rows.
HEIGHT = 0

# Head.
COPY = (
    0  # [C] int64 copy(context, job, slot address, fence address, fence value); 0 if it was begun
)
COPY_CONTEXT = 1  # [C]
JOB_BYTES = 2  # [C] a job begins with its chunk's bytes
SPIN_NS = 3  # [C] how long to look on after something moved, before sleeping
LOOK_NS = 4  # [C] between two looks at the descriptors
PAUSE_NS = 5  # [C] between two looks at what is under way, while nothing moves
WANTS_SLOTS = 6  # [C] return once a receive slot is free
TURN = 7  # [P] the send whose turn it is
NUM_RUNS = 8  # [P] entries of the loop: each is one acquisition of the GIL at its end
NUM_PASSES = 9  # [P]
NUM_SLEEPS = 10  # [P]
PULL_TURN = 11  # [P] the pull whose turn it is
MOVED_NS = 12  # [C, P] when there was something to do last
RETURN_BY_NS = (
    13  # [C] the driver's thread returns then at the latest; 0: when its own time is over
)
GRACE_NS = 14  # [C] the grace period: how long what is pending is left to others before the driver's thread returns
PENDING_NS = 15  # [P] since when something is pending; 0 if nothing is
LEFT_NS = 16  # [P] when the driver's thread returned, to wait for the GIL
NUM_INLINE = 17  # [C] how often progress was made inline
HEAD_COLUMNS = 18
AT_ONCE = 1  # a `RETURN_BY_NS`

# Calls: addresses of C functions, of the objects they take, and of memory for what they return.
WORKER = 0
WORKER_PROGRESS = 1
TAG_SEND = 2
TAG_RECV = 3
REQUEST_STATUS = 4
RECV_TEST = 5
REQUEST_FREE = 6
WORKER_ARM = 7
SEND_PARAM = 8
RECV_PARAM = 9
RECV_INFO = 10  # ucp_tag_recv_info_t: tag, length
CLOCK = 11  # clock_gettime
POLL = 12
POLL_FDS = 13  # pollfd array: UCX's descriptor, the eventfd of `WAKE_FDS`, then those of the caller
NUM_FDS = 14  # [C] of the whole array
BEGIN = 15  # called with BEGIN_ARGUMENT at the start of each run, if not 0
BEGIN_ARGUMENT = 16
REQUEST_CANCEL = 17
TAG_PROBE = 18
CONTROL_TAG = (
    19  # [C] the bits of a tag of messages that are for the caller, to whom the loop returns
)
LOCK = 20  # [C] the words of the lock, see `driver_lock`
WHO = 21  # [C] `DRIVER` or `INLINE`
READ = 22
WRITE = 23
ONE = 24  # [C] address of the int64 that adds one to an eventfd
WAKE_FDS = (
    25  # [C] pollfd of the eventfd that wakes the driver: the lock is free, or something is pending
)
BUILD = 26  # [P] number of the sources that the loop was compiled from
CALL_COLUMNS = 27

# Who owns the lock, and so may touch the rows.
NOBODY, DRIVER, INLINE = 0, 1, 2

# What a call of `PULL` returns: a part is done, call again; or all is begun, and the fence will be set. Else an error:
# nothing is left to begin, and the fence will be set all the same.
MORE, ALL = -1, 0

# Why a run ended.
NOTICE, READABLE, TIMEOUT = 1, 2, 3


class Rows(NamedTuple):
    """Everything of one worker that is under way: programs, slots and the stacks of free slots."""

    sends: Any
    send_slots: Any
    send_free: Any
    receives: Any
    recv_slots: Any
    recv_free: Any
    pulls: Any
