"""What a re-layout refuses. All are `ValueError`s whose text names the values that disagree."""

from __future__ import annotations


class RelayoutError(ValueError):
    """A re-layout was asked for that does not describe memory: a bad count, range, buffer or device."""


class BlockIdsError(RelayoutError):
    """Block ids lie outside the pool, are too few for the tokens, or have the wrong type."""


class GeometryMismatchError(RelayoutError):
    """The two sides disagree in item size, head dim or device."""
