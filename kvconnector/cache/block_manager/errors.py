"""The block manager's own mistakes-of-the-caller, under the package's root."""

from __future__ import annotations

from kvconnector.errors import LocalError, LocalProtocolError


class OutOfBlocksError(LocalError):
    """More blocks were asked for than the device has free; nothing was allocated."""


class DoubleAllocationError(LocalProtocolError):
    """The sequence or the request already holds a block table; nothing changed."""


class SequenceError(LocalError):
    """A sequence or a group contradicts itself, or the block table that was made for it."""
