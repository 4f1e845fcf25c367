"""What pulls need, whatever the device: a compiled function that copies from a peer's pools to ours."""

from __future__ import annotations

from typing import Protocol


class PoolReads(Protocol):
    """The copies of one worker from the pools of its peers."""

    function: int
    context: int
