"""Keeps our threads off the cores on which vLLM's model computes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

_TASKS = "/proc/self/task"


@contextmanager
def parents_cores() -> Iterator[None]:
    """At the end of this context, let the threads started in it run on all cores of the parent process.

    vLLM binds a CPU worker's main thread to the first core of its model's threads. The driver's, UCX's and ZMQ's
    threads would inherit that core, take time from every step, and wait for it. The main thread stays there, so that
    the memory that it touches first is near it.
    """
    before = _threads()
    try:
        yield
    finally:
        try:
            cores = os.sched_getaffinity(os.getppid())
        except OSError:
            logger.debug("threads keep the cores of the main thread", exc_info=True)
        else:
            for thread in _threads() - before:
                with suppress(ProcessLookupError):  # it has ended already
                    os.sched_setaffinity(thread, cores)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir(_TASKS)}
