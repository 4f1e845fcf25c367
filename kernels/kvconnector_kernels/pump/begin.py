"""What whoever sits in the seat begins at once, before it calls the loop: on a device that takes microseconds."""

from __future__ import annotations

from numba import njit

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call
from kvconnector_kernels.pump.pulls import begin_early
from kvconnector_kernels.pump.sends import pack_in_turn
from kvconnector_kernels.pump.sources import SOURCES_HASH


def _compile(sources_hash):
    """The function for Python. What it closes over is part of its key in numba's on-disk cache."""

    @njit(cache=True)
    def begin(calls, head, sends, send_slots, send_free, pulls):
        """Call for the next pull, and pack while there are slots. It keeps the GIL."""
        calls[r.BUILD] = sources_hash
        if calls[r.BEGIN]:
            call(calls[r.BEGIN], (calls[r.BEGIN_ARGUMENT],))
        begin_early(calls, head, pulls)
        pack_in_turn(head, sends, send_slots, send_free)

    return begin


begin = _compile(SOURCES_HASH)
