"""The seat of a pump: whoever sits in it, and nobody else, touches the rows and what belongs to them.

It is the driver's, who rises where it sleeps or pauses, or waits for the GIL. Then a visitor, the engine's thread, may
sit down and do the driver's work itself, which takes less time than waking another thread and handing it the GIL. A
visitor that rises wakes the driver by an eventfd: UCX's descriptor must be armed anew.
"""

from __future__ import annotations

from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call, exchange_flag, load_flag, store_flag, two_words
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper, now_ns

# The words, 32 bits each, in bytes from the first and on cache lines of their own.
HOLDER = 0
NEWS = 64  # not 0: there is something to do for a turn of the driver
LOOPING = 128  # not 0: the driver's thread is in the loop, or sleeps there
SEAT_BYTES = 192

_PARK_MS = 1000
"""A visitor wakes who waits for the seat; this only bounds what a lost wake-up would cost."""
_EVENTFD_BYTES = 8


@helper
def rise(calls):
    """Let a visitor sit down. No effect for a visitor, who rises in its own time."""
    if calls[r.WHO] == r.DRIVER:
        store_flag(calls[r.SEAT] + HOLDER, r.NOBODY)


@helper
def wake_driver(calls):
    """Let the driver look at everything anew, if it sleeps in the loop."""
    fd = load_flag(calls[r.RISEN_FDS])
    call(calls[r.WRITE], (fd, calls[r.ONE], _EVENTFD_BYTES))


@helper
def forget_risen(calls):
    """Take the visitors' wake-ups so far."""
    fd = load_flag(calls[r.RISEN_FDS])
    call(calls[r.READ], (fd, two_words(), _EVENTFD_BYTES))


@helper
def _await_riser(calls):
    call(calls[r.POLL], (calls[r.RISEN_FDS], 1, _PARK_MS))
    forget_risen(calls)


@helper
def sit(calls):
    """Take the seat after `rise`; while a visitor has it, sleep until it rises."""
    while calls[r.WHO] == r.DRIVER and not exchange_flag(
        calls[r.SEAT] + HOLDER, r.NOBODY, r.DRIVER
    ):
        _await_riser(calls)


@helper
def has_news(calls):
    """Whether there is something to do for a turn of the driver."""
    return load_flag(calls[r.SEAT] + NEWS) != 0


@helper
def must_return(calls, head, found, now):
    """Whether to return with what was found, or with what others say there is: now, or once no visitor took it."""
    if calls[r.WHO] == r.VISITOR:
        return found != 0 or has_news(calls)
    if found:
        store_flag(calls[r.SEAT] + NEWS, 1)
    elif not has_news(calls):
        head[r.TOLD_NS] = 0
        return False
    if head[r.TOLD_NS] == 0:
        head[r.TOLD_NS] = now
    return now - head[r.TOLD_NS] >= head[r.HEAD_START_NS]


def _compile(sources_hash):
    """The functions for Python. What it closes over is part of its key in numba's on-disk cache."""

    @njit(cache=True)
    def try_sit(calls, limit_ns):
        """Take the seat, if that is possible within a time so short that the GIL is kept. Whether it was."""
        calls[r.BUILD] = sources_hash
        until = now_ns(calls) + limit_ns
        while not exchange_flag(calls[r.SEAT] + HOLDER, r.NOBODY, calls[r.WHO]):
            if now_ns(calls) >= until:
                return False
        return True

    @njit(nogil=True, cache=True)
    def wait_for_seat(calls):
        """Wait until no visitor sits, however long it takes. Who then takes the seat has the GIL already: else it would
        keep visitors out while it waits for it.
        """
        calls[r.BUILD] = sources_hash
        while load_flag(calls[r.SEAT] + HOLDER) != r.NOBODY:
            _await_riser(calls)

    @njit(cache=True)
    def get_up(calls):
        """Rise, as a visitor."""
        calls[r.BUILD] = sources_hash
        store_flag(calls[r.SEAT] + HOLDER, r.NOBODY)
        wake_driver(calls)

    @njit(cache=True)
    def tell(calls):
        """There are news. Whether the driver, and no visitor, is there to see them."""
        calls[r.BUILD] = sources_hash
        store_flag(calls[r.SEAT] + NEWS, 1)
        wake_driver(calls)
        return load_flag(calls[r.SEAT] + HOLDER) != r.VISITOR

    return try_sit, wait_for_seat, get_up, tell


try_sit, wait_for_seat, get_up, tell = _compile(SOURCES_HASH)
