"""Memory that a GPU works on: waiting until the GPU is done, and keeping what it may still touch."""

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
"""How long a closing data path waits for a GPU each time, in seconds. All these waits together are shorter than a
closing worker's own.
"""
POLL_S = 1e-3

_kept: list[object] = []

Fences: TypeAlias = npt.NDArray[np.int32]
"""Flags that copies set, each on a separate cache line."""
FENCE_WORDS = 16
"""32-bit words from one fence to the next."""


def addresses_of(fences: Fences) -> npt.NDArray[np.int64]:
    """Return the address of each fence."""
    step = fences.strides[0]
    return fences.ctypes.data + np.arange(len(fences), dtype=np.int64) * step


def await_device(is_idle: Callable[[], bool], what: str) -> None:
    """Wait until `is_idle`, which does not wait itself, returns True; call it every `POLL_S`. Raises
    TransportError: a GPU is not idle within `RELEASE_S`; `what` is the text.
    """
    deadline_s = time.monotonic() + RELEASE_S
    while not is_idle():
        if time.monotonic() >= deadline_s:
            raise TransportError(what, timeout_s=RELEASE_S)
        time.sleep(POLL_S)


@contextmanager
def kept_unless_idle(owner: object, what: str) -> Iterator[None]:
    """Keep the memory of `owner` for as long as the process lives if the wait in the block fails: if it were freed, a
    GPU could read or overwrite whatever is allocated there next.
    """
    try:
        yield
    except BaseException:
        _kept.append(owner)
        logger.error("the GPU may yet touch %s, so it is never freed", what)
        raise
