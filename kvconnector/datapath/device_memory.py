"""Memory that a GPU works on: waiting until the GPU is done, and keeping what it may still touch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnector.agenda import NEVER
from kvconnector.errors import TransportError

logger = logging.getLogger(__name__)

RELEASE_S = 2.0
"""How long, in seconds, a closing data path waits for copies, and the longest that it waits for a GPU at a time."""
CLOSE_S = 2.25
"""How long, in seconds, a closing data path waits in all for GPUs and for the thread that gives out its memory. A
closing worker has this much time left after it has waited for consumers, and before it waits for the network.
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


def await_device(is_idle: Callable[[], bool], what: str, until_s: float = NEVER) -> None:
    """Wait until `is_idle`, which does not wait itself, returns True; call it every `POLL_S`. Raises
    TransportError: a GPU is not idle within `RELEASE_S`, or at `until_s`; `what` is the text.
    """
    began_s = time.monotonic()
    until_s = min(until_s, began_s + RELEASE_S)
    while not is_idle():
        if time.monotonic() >= until_s:
            raise TransportError(what, timeout_s=round(max(0.0, until_s - began_s), 3))
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
