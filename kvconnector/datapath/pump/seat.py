"""The seat of a pump as Python sees it: what it is for is in `kvconnector_kernels.pump.seat`."""

from __future__ import annotations

import os
import weakref

import numpy as np

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump import seat as words

_WORD_BYTES = 4


class Seat:
    """The seat's words, and the eventfd that wakes the driver. The driver sits in it from the start."""

    def __init__(self) -> None:
        self._words = np.zeros(words.SEAT_BYTES // _WORD_BYTES, np.int32)
        self._words[words.HOLDER // _WORD_BYTES] = r.DRIVER
        self.risen_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.risen_fd)

    @property
    def address(self) -> int:
        """Of the first word."""
        return self._words.ctypes.data

    @property
    def has_news(self) -> bool:
        """Whether there is something to do for a turn of the driver."""
        return bool(self._words[words.NEWS // _WORD_BYTES])

    @property
    def is_looping(self) -> bool:
        """Whether the driver's thread is in the loop, or sleeps there."""
        return bool(self._words[words.LOOPING // _WORD_BYTES])

    def take_news(self) -> None:
        """Whoever sits will do what there is to do, from now on."""
        self._words[words.NEWS // _WORD_BYTES] = 0

    def close(self) -> None:
        """Release the eventfd: nobody visits any more. Idempotent."""
        self._close()
