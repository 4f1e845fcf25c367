"""Memory that a GPU works on: waiting until it is done with it, and keeping what it may yet touch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnector.errors import TransportError

logger = logging.getLogger(__name__)

RELEASE_S = 2.0
"""How long a data path that closes waits for a GPU, each time: less in all than a worker that closes waits for it."""
POLL_S = 1e-3

_kept: list[object] = []

Fences: TypeAlias = npt.NDArray[np.int32]
"""Flags that copies set."""
FENCE_WORDS = 16
"""From one to the next: no two share a cache line."""


def addresses_of(fences: Fences) -> npt.NDArray[np.int64]:
    """Where each flag is."""
    step = fences.strides[0]
    return fences.ctypes.data + np.arange(len(fences), dtype=np.int64) * step


def await_device(is_idle: Callable[[], bool], what: str, *, poll_s: float = POLL_S) -> None:
    """Wait until a GPU is done with something: `is_idle`, which does not wait, is called each `poll_s`. Raises
    TransportError: it is not within `RELEASE_S`; `what` is its text.
    """
    deadline_s = time.monotonic() + RELEASE_S
    while not is_idle():
        if time.monotonic() >= deadline_s:
            raise TransportError(what, timeout_s=RELEASE_S)
        time.sleep(poll_s)


@contextmanager
def kept_unless_idle(owner: object, what: str) -> Iterator[None]:
    """Keep the memory of `owner` for as long as the process lives if the wait for it fails: were it given to somebody
    else, a GPU could yet overwrite it, or read it as its own.
    """
    try:
        yield
    except BaseException:
        _kept.append(owner)
        logger.error("the GPU may yet touch %s, so it is never freed", what)
        raise
