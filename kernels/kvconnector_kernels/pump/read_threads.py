"""Reading a peer process's pools as C functions for the pump, with the help of a few threads that hold no GIL.

A pull is cut into *pieces*. The pump's thread takes a piece after the other and reads one batch a call. It *offers* a
pull that is large enough to its team: threads that wait on a semaphore, and then take pieces until none is left.

Who helps counts itself among an offer's users before it looks what is offered, and the pump's thread withdraws an offer
before it looks whether somebody uses it. So a pull with no pieces left, no offer and no users is one that nobody reads
any more, and its memory may go.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, cfunc, njit, types

from kvconnector_kernels.pump.native import (
    add_ordered,
    call,
    load,
    load_ordered,
    pointer,
    store,
    store_flag,
    store_ordered,
)
from kvconnector_kernels.pump.read_cpu import (
    ALONE,
    BUILD,
    CURSOR,
    CURSOR_FIELDS,
    ERROR,
    FIRST_PIECE,
    JOB,
    JOB_FIELDS,
    NEXT_PIECE,
    NOT_OFFERED,
    NUM_JOBS,
    NUM_PARTS,
    NUM_PIECES,
    NUM_TOKENS,
    OFFER,
    OWN_CURSOR,
    PID,
    PIECE_UNITS,
    PULL_FIELDS,
    STOP,
    TEAM,
    UNIT,
    make_context,
    read_batch,
)
from kvconnector_kernels.pump.records import ALL, BUSY, MORE
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper

# A team's int64 fields: C functions and the semaphore, set at the start; then the offers, a cache line each.
SEM_WAIT, SEM_POST, YIELD, SEMAPHORE, NUM_HELPERS, IS_CLOSING = range(6)
_OFFERS = 8
_NUM_OFFERS = 16
_OFFER_FIELDS = 8
_TEAM_FIELDS = _OFFERS + _NUM_OFFERS * _OFFER_FIELDS
# An offer's fields: the pull's address or 0, how many threads have looked and are not through; and the pull that has it
# until it has been seen to have no users, for the pump's thread alone.
_PULL, _USERS, _OWNER = 0, 1, 2

_SEMAPHORE_FIELDS = 8  # more than any libc's sem_t has
_NO_PIECE = 1 << 62


@helper
def _jobs_of(pull_address):
    num_jobs = load(pull_address + NUM_JOBS * 8)
    return carray(pointer(pull_address + PULL_FIELDS * 8), (num_jobs, JOB_FIELDS))


@helper
def _has_pieces(pull_address):
    taken = load_ordered(pull_address + NEXT_PIECE * 8)
    return taken < load(pull_address + NUM_PIECES * 8)


@helper
def _take_piece(pull_address, cursor, jobs):
    """Move a cursor, whose piece is read, to one that nobody has taken. Whether there was one."""
    if not _has_pieces(pull_address):
        return False
    piece = add_ordered(pull_address + NEXT_PIECE * 8, 1)
    if piece >= load(pull_address + NUM_PIECES * 8):
        return False
    while cursor[JOB] + 1 < jobs.shape[0] and piece >= jobs[cursor[JOB] + 1, FIRST_PIECE]:
        cursor[JOB] += 1
    job = jobs[cursor[JOB]]
    cursor[UNIT] = (piece - job[FIRST_PIECE]) * job[PIECE_UNITS]
    cursor[STOP] = min(cursor[UNIT] + job[PIECE_UNITS], job[NUM_PARTS] * job[NUM_TOKENS])
    return True


@helper
def _read_on(context_address, pull_address, cursor, jobs):
    """One batch of a piece. An error ends the pull: nobody takes another piece."""
    error = read_batch(context_address, cursor, jobs[cursor[JOB]], load(pull_address + PID * 8))
    if error:
        cursor[UNIT] = cursor[STOP]
        store_ordered(pull_address + ERROR * 8, error)
        store_ordered(pull_address + NEXT_PIECE * 8, _NO_PIECE)


@helper
def _offer(team, pull_address):
    """Tell the team of a pull, and wake as many as it has pieces for. If all offers are in use, a later call does."""
    for index in range(_NUM_OFFERS):
        offer = team + (_OFFERS + index * _OFFER_FIELDS) * 8
        if load(offer + _OWNER * 8) == 0:
            store(offer + _OWNER * 8, pull_address)
            store(pull_address + OFFER * 8, offer)
            store_ordered(offer + _PULL * 8, pull_address)
            count = min(load(team + NUM_HELPERS * 8), load(pull_address + NUM_PIECES * 8) - 1)
            for _ in range(count):
                call(load(team + SEM_POST * 8), (load(team + SEMAPHORE * 8),))
            return


@helper
def _is_used(team, pull_address):
    """Withdraw the pull's offer; whether a thread is still at it."""
    offer = load(pull_address + OFFER * 8)
    if offer in (NOT_OFFERED, ALONE):
        return False
    store_ordered(offer + _PULL * 8, 0)
    if load_ordered(offer + _USERS * 8):
        # it may wait for this core
        call(load(team + YIELD * 8), ())
        return True
    store(offer + _OWNER * 8, 0)
    store(pull_address + OFFER * 8, ALONE)
    return False


@helper
def _read(context_address, pull_address):
    team = load(context_address + TEAM * 8)
    if team and load(pull_address + OFFER * 8) == NOT_OFFERED:
        _offer(team, pull_address)
    cursor = carray(pointer(pull_address + CURSOR * 8), (CURSOR_FIELDS,))
    jobs = _jobs_of(pull_address)
    if cursor[UNIT] < cursor[STOP] or _take_piece(pull_address, cursor, jobs):
        _read_on(context_address, pull_address, cursor, jobs)
        if cursor[UNIT] < cursor[STOP] or _has_pieces(pull_address):
            return MORE
    if _is_used(team, pull_address):
        return BUSY
    return load_ordered(pull_address + ERROR * 8) or ALL


@helper
def _help_with(team, context_address, pull_address):
    """Read pieces until none is left."""
    cursor = carray(pointer(context_address + OWN_CURSOR * 8), (CURSOR_FIELDS,))
    cursor[:] = 0
    jobs = _jobs_of(pull_address)
    while _take_piece(pull_address, cursor, jobs):
        while cursor[UNIT] < cursor[STOP]:
            if load_ordered(team + IS_CLOSING * 8):
                return
            _read_on(context_address, pull_address, cursor, jobs)


@helper
def _look_round(team, context_address):
    """Help with whatever is offered."""
    for index in range(_NUM_OFFERS):
        offer = team + (_OFFERS + index * _OFFER_FIELDS) * 8
        add_ordered(offer + _USERS * 8, 1)
        pull_address = load_ordered(offer + _PULL * 8)
        if pull_address:
            _help_with(team, context_address, pull_address)
        add_ordered(offer + _USERS * 8, -1)


def _make_read(sources_hash):
    def read(context, pull, fence, fence_value):
        store(context + BUILD * 8, sources_hash)
        status = _read(context, pull)
        if status not in (MORE, BUSY):
            store_flag(fence, fence_value)
        return status

    return read


def _make_stop(sources_hash):
    def stop(context, pull):
        store(context + BUILD * 8, sources_hash)
        store_ordered(pull + NEXT_PIECE * 8, _NO_PIECE)
        return 1 if _is_used(load(context + TEAM * 8), pull) else 0

    return stop


def _make_help(sources_hash):
    def help_out(team, context):
        store(context + BUILD * 8, sources_hash)
        while True:
            call(load(team + SEM_WAIT * 8), (load(team + SEMAPHORE * 8),))
            if load_ordered(team + IS_CLOSING * 8):
                return
            _look_round(team, context)

    return help_out


@cache
def compile_read() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives. See `records.PULL`.

    An error is an `errno`: ENOBUFS if one token of one part fits no slot.
    """
    signature = types.int64(*[types.int64] * 4)
    return cfunc(signature, nopython=True, cache=True)(_make_read(SOURCES_HASH))


@cache
def compile_stop() -> Any:
    """The same for `records.PULL_STOP`."""
    return cfunc(types.int64(types.int64, types.int64), nopython=True, cache=True)(
        _make_stop(SOURCES_HASH)
    )


@cache
def _compile_help() -> Any:
    signature = types.void(types.int64, types.int64)
    return njit(signature, nogil=True, cache=True)(_make_help(SOURCES_HASH))


class ReadThreads:
    """What reads pulls with `num_threads` threads, the caller of `function` included; a slot of `slot_bytes` for each.

    `function` and `stop_function` with `context` are what a pump calls, one call at a time. The other threads start
    with `start`. They are daemons that only ever run compiled code: an idle one keeps no process alive.

    Raises:
        OSError: this platform has no process_vm_readv, or gives no semaphore.
    """

    def __init__(self, num_threads: int, slot_bytes: int) -> None:
        self._slots = [mmap.mmap(-1, slot_bytes) for _ in range(num_threads)]
        addresses = [np.frombuffer(slot, np.uint8).ctypes.data for slot in self._slots]
        self._contexts = [make_context(address, slot_bytes) for address in addresses]
        self._libc = ctypes.CDLL(None)
        self._threads: list[threading.Thread] = []
        self._team = np.zeros(_TEAM_FIELDS, np.int64)
        self._semaphore = np.zeros(_SEMAPHORE_FIELDS, np.int64)
        self._compiled = compile_read(), compile_stop()
        self.function, self.stop_function = (int(one.address) for one in self._compiled)
        self.context = self._contexts[0].ctypes.data
        if num_threads > 1:
            self._open_team(num_threads - 1)
            _compile_help()

    @property
    def num_threads(self) -> int:
        """Threads that read, the caller of `function` included."""
        return len(self._contexts)

    def _open_team(self, num_helpers: int) -> None:
        team, semaphore = self._team, self._semaphore.ctypes.data
        if self._libc.sem_init(ctypes.c_void_p(semaphore), 0, 0) != 0:
            raise OSError("this platform gives no semaphore")
        for field, name in ((SEM_WAIT, "sem_wait"), (SEM_POST, "sem_post"), (YIELD, "sched_yield")):
            team[field] = ctypes.cast(getattr(self._libc, name), ctypes.c_void_p).value or 0
        team[SEMAPHORE], team[NUM_HELPERS] = semaphore, num_helpers
        self._contexts[0][TEAM] = team.ctypes.data

    def start(self) -> None:
        """Let the other threads be there, as a pull is large enough to be shared. Idempotent."""
        if self._threads or self._team[IS_CLOSING]:
            return
        for context in self._contexts[1:]:
            arguments = (self._team, self._semaphore, context, self._slots)
            thread = threading.Thread(target=_help, args=arguments, name="kv-read", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self, timeout_s: float) -> bool:
        """Let every copy that is under way end, and then the threads; no `function` is called any more. Whether they
        did within the time. Idempotent.
        """
        self._team[IS_CLOSING] = 1
        for _ in self._threads:
            self._libc.sem_post(ctypes.c_void_p(self._semaphore.ctypes.data))
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)


def _help(
    team: npt.NDArray[np.int64],
    semaphore: npt.NDArray[np.int64],
    context: npt.NDArray[np.int64],
    slots: list[mmap.mmap],
) -> None:
    """A thread of the team. It keeps the memory that it uses."""
    _compile_help()(team.ctypes.data, context.ctypes.data)
