"""The cores on which our threads may run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

_TASKS = "/proc/self/task"


@contextmanager
def parents_cores() -> Iterator[None]:
    """Threads that are started in this context may run on all cores of the parent process from its end on.

    vLLM binds a CPU worker's main thread to the first core of its model's threads, where the driver, UCX's thread and
    ZMQ's, children of that thread, would take time from every step, and wait for it. The main thread stays where it is,
    so that the memory it touches first stays near it.
    """
    before = _threads()
    try:
        yield
    finally:
        try:
            cores = os.sched_getaffinity(os.getppid())
        except OSError:
            logger.debug("threads stay on the cores of the main thread", exc_info=True)
        else:
            for thread in _threads() - before:
                with suppress(ProcessLookupError):  # it has ended already
                    os.sched_setaffinity(thread, cores)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir(_TASKS)}
