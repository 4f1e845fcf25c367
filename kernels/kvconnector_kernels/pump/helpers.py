"""Threads that help the owner of the driver lock with a direct read in host memory: one read at a time.

Theory of operation
-------------------
The word. A read's fence is a 32-bit word in memory that outlives all reads. Its low half gets the read's value when the
read is over. `_OPEN` says that threads may join, and `_HELPER` is added for each that has joined. So the word reaches
the value when the last helper leaves, and a read that is over has none.

Writers. The owner of the driver lock names a read in the crew's record, opens its fence, and closes it when no piece is
left or the read is stopped. It names another only when the last one's word has no helper and is not open. A helper
touches a read's jobs and blocks only after it has joined, which fails once the word is closed, and leaves when no piece
is left or the word is closed. Its writes are visible to a thread that then sees the word.

Blocking. Helpers sleep on an eventfd that counts the wanted ones. No thread waits for them: the loop looks at the fence
again, as at a GPU's. A helper that the system does not run delays its own read only.
"""

from __future__ import annotations

from kvconnector_kernels.pump.native import (
    add_flag,
    call,
    exchange_flag,
    load_flag,
    record_at,
    store_flag,
    two_words,
)
from kvconnector_kernels.pump.records import offset_of, record_of
from kvconnector_kernels.pump.steps import helper

CREW = record_of(
    "read",  # address of the current or last read, and of its fence; 0 before the first one
    "fence",
    "is_closed",  # helpers return
    "num_wanted",  # written to the eventfd, from which each helper takes one
    "eventfd",
    "read_function",  # libc's
    "write_function",
)
_VALUE, _HELPERS, _OPEN = 0xFFFF, 0x3FFF0000, 0x40000000
_ONE_HELPER = _VALUE + 1
_COUNT_BYTES = 8
_NUM_WANTED, _IS_CLOSED = offset_of(CREW, "num_wanted"), offset_of(CREW, "is_closed")


@helper
def share(address, read, fence, num_wanted):
    """Wake helpers for a read whose fence is 0. Returns False if they have another one."""
    crew = record_at(address, CREW)
    if crew.fence and load_flag(crew.fence) > _VALUE:
        return False
    crew.read, crew.fence, crew.num_wanted = read, fence, num_wanted
    store_flag(fence, _OPEN)
    call(crew.write_function, (crew.eventfd, address + _NUM_WANTED, _COUNT_BYTES))
    return True


@helper
def close(fence, value):
    """Let no further helper join. The fence gets its value once those that have joined leave. Idempotent."""
    word = load_flag(fence)
    while word & ~_HELPERS != value and not exchange_flag(fence, word, (word & _HELPERS) + value):
        word = load_flag(fence)


@helper
def join_next(address):
    """Sleep until there may be a read to help with. Returns the address of the read that was joined, or 0."""
    crew = record_at(address, CREW)
    call(crew.read_function, (crew.eventfd, two_words(), _COUNT_BYTES))
    fence = crew.fence
    word = load_flag(fence) if fence else 0
    while word & _OPEN:
        if exchange_flag(fence, word, word + _ONE_HELPER):
            return crew.read
        word = load_flag(fence)
    return 0


@helper
def is_closed(address):
    """Returns True if helpers are to return."""
    return load_flag(address + _IS_CLOSED) != 0


@helper
def is_open(address):
    """Returns True if the read that a helper has joined has not been closed, nor has the crew."""
    fence = record_at(address, CREW).fence
    return load_flag(fence) & _OPEN != 0 and not is_closed(address)


@helper
def leave(address):
    """Leave a read, once the pieces that the helper took are written."""
    add_flag(record_at(address, CREW).fence, -_ONE_HELPER)
