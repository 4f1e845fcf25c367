"""The lock on a pump as Python sees it: what it is for is in `kvconnector_kernels.pump.driver_lock`."""

from __future__ import annotations

import os
import weakref

import numpy as np

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.driver_lock import LOCK


class DriverLock:
    """The lock's words, and the eventfd that wakes the driver, who owns the lock from the start."""

    def __init__(self) -> None:
        self._words = np.zeros((), LOCK)
        self._words["owner"] = r.DRIVER
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.wake_fd)

    @property
    def address(self) -> int:
        """Of the words."""
        return self._words.ctypes.data

    @property
    def has_pending(self) -> bool:
        """Whether there is something to do for a turn of the driver."""
        return bool(self._words["pending"])

    @property
    def is_looping(self) -> bool:
        """Whether the driver's thread is in the loop, or sleeps there."""
        return bool(self._words["looping"])

    def clear_pending(self) -> None:
        """The owner is about to do all that there is to do."""
        self._words["pending"] = 0

    def close(self) -> None:
        """Release the eventfd: nobody acquires the lock any more. Idempotent."""
        self._close()
