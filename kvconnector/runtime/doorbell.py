"""Notifies a waiting thread without the time that waking it takes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvconnector_kernels.pump.flag import FlagWait

MIN_SPIN_S = 1e-3
"""A shorter look is not worth compiling it."""


class Doorbell:
    """Rung by any thread, awaited by one, which looks on for `spin_s` without the GIL and then sleeps."""

    def __init__(self, spin_s: float) -> None:
        self.is_rung = False
        """`wait` would return at once."""
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._flag = np.zeros(1, np.int32)
        self._spin_s = spin_s
        self._spin: FlagWait | None = None
        if spin_s >= MIN_SPIN_S:
            from kvconnector_kernels.pump.flag import FlagWait

            self._spin = FlagWait()

    def ring(self) -> None:
        """Let `wait` return, now or when it is called, until `clear`."""
        self.is_rung = True
        self._flag[0] = 1
        if self._num_waiting:
            self._event.set()

    def clear(self) -> None:
        """Forget the rings so far."""
        self.is_rung = False
        self._flag[0] = 0

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is rung. Returns False if `timeout_s` passed before."""
        if self.is_rung:
            return True
        until_s = time.monotonic() + timeout_s
        if self._spin is not None:
            if self._spin.is_set(self._flag.ctypes.data, min(self._spin_s, timeout_s)):
                return True
            timeout_s = max(0.0, until_s - time.monotonic())
        with self._lock:
            if not self._num_waiting:
                self._event.clear()
            self._num_waiting += 1
        try:
            # a thread that rings sees that somebody waits, or rang before this look
            return self.is_rung or self._event.wait(timeout_s)
        finally:
            with self._lock:
                self._num_waiting -= 1
