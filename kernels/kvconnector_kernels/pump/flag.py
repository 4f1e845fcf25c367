"""Waiting for a flag in memory, on a core of its own and without the GIL."""

from __future__ import annotations

from kvconnector_kernels.library import releasing

_NS_PER_S = 1_000_000_000


def wait_flag(address: int, timeout_s: float) -> bool:
    """Return True if the 32-bit flag at `address` is or becomes nonzero within the time."""
    return bool(releasing.kvc_wait_flag(address, round(timeout_s * _NS_PER_S)))
