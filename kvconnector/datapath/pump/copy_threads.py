"""Threads that help with direct reads between CPU pools if cores are idle."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time

from kvconnector.datapath.device_memory import RELEASE_S
from kvconnector.errors import TransportError
from kvconnector_kernels.pump.copy_cpu import help_reads
from kvconnector_kernels.pump.records import Crew

logger = logging.getLogger(__name__)

MAX_DEFAULT_THREADS = 4
"""On 16 idle cores 256 MiB take 29 ms with one thread, 10 with four and 7.5 with eight; more threads take cores from
the model.
"""
_LOAD = "/proc/loadavg"


def default_threads() -> int:
    """Return the number of threads of a copy by default: half of the cores that this process may use, 4 at most."""
    return max(1, min(MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)) // 2))


class CopyThreads:
    """Threads that sleep until a read wakes some of them, to help the owner of the driver lock copy it. See
    kernels/native/copy_cpu.c.
    """

    def __init__(self, num_helpers: int) -> None:
        """Start `num_helpers` threads, or as many as the system allows. Raises OSError: no descriptors are left."""
        self._crew = Crew()
        self.address = ctypes.addressof(self._crew)
        self._load = os.open(_LOAD, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        except OSError:
            os.close(self._load)
            raise
        self._crew.eventfd = self._eventfd
        self._threads: list[threading.Thread] = []
        for _ in range(num_helpers):
            thread = threading.Thread(
                target=help_reads, args=(self.address,), name="kvc-copy", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                started = f"{len(self._threads)} of {num_helpers}"
                logger.warning("the system starts only %s threads that help with reads", started)
                break
            self._threads.append(thread)

    def num_idle(self) -> int:
        """Return the number of threads that may help now, which is at most the number of idle cores."""
        running = os.pread(self._load, 64, 0).split()[3].partition(b"/")[0]
        return max(0, min(len(self._threads), (os.cpu_count() or 1) - int(running)))

    def close(self) -> None:
        """End the threads, each after its current piece. Idempotent. Raises TransportError: one does not end."""
        if self._eventfd < 0:
            return
        self._crew.is_closed = 1
        os.eventfd_write(self._eventfd, len(self._threads))
        until_s = time.monotonic() + RELEASE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise TransportError("a thread that copies a read does not stop", timeout_s=RELEASE_S)
        self._threads.clear()
        os.close(self._eventfd)
        os.close(self._load)
        self._eventfd = self._load = -1
