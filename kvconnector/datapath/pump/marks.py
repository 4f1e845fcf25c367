"""Choosing a copy's stream: the copy waits for the engine's kernels that use its own blocks, and for no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnector.planning import GroupBlocks

RequestBlocks: TypeAlias = Sequence[Sequence[GroupBlocks]]
"""For each of some requests, its blocks by cache group."""

FREE_STREAM = 0
"""The stream that waits for no mark."""


class _Mark(NamedTuple):
    stream: int
    number: int
    requests: RequestBlocks


class Marks:
    """The marks in the engine's stream that have not passed yet, and the streams that wait for them.

    Streams from 1 on take the marks in turn. `passed` has an int32 for each stream, which the device sets: the number
    of the last mark that the stream has passed. All marks are made in one stream of the engine's, so if one has passed,
    those before it have passed, too.
    """

    def __init__(self, passed: npt.NDArray[np.int32]) -> None:
        self._passed = passed
        self._issued = np.zeros(len(passed), np.int32)
        self._turn = FREE_STREAM
        self._pending: list[_Mark] = []

    def __repr__(self) -> str:
        self._forget_passed()
        pending = ", ".join(f"{mark.number} on stream {mark.stream}" for mark in self._pending)
        return f"<Marks pending: {pending or 'none'}>"

    def add(self, requests: RequestBlocks) -> tuple[int, int]:
        """Add a mark. Returns the stream that must wait for it, and the number that this stream must then set.
        Kernels before the mark use the blocks of `requests`.
        """
        self._forget_passed()
        self._turn = stream = self._turn % (len(self._passed) - 1) + 1
        number = self._issued[stream] = (int(self._issued[stream]) + 1) & 0x7FFFFFFF
        self._pending.append(_Mark(stream, int(number), requests))
        return stream, int(number)

    def stream_of(self, blocks: Sequence[GroupBlocks]) -> int:
        """Return the stream for copies of a request's blocks, which waits for the last mark of that request, if any."""
        self._forget_passed()
        for mark in reversed(self._pending):
            if any(_holds(held, blocks) for held in mark.requests):
                return mark.stream
        return FREE_STREAM

    def _forget_passed(self) -> None:
        self._pending = [mark for mark in self._pending if not self._has_passed(mark)]

    def _has_passed(self, mark: _Mark) -> bool:
        distance = (int(self._passed[mark.stream]) - mark.number) & 0x7FFFFFFF
        return distance < 0x40000000


def _holds(held: Sequence[GroupBlocks], blocks: Sequence[GroupBlocks]) -> bool:
    """Returns True if a request holds all of these blocks."""
    # a load has the same list of blocks as its order, and comparing their ids takes longer than a launch
    return held is blocks or all(
        _are_in(some.block_ids, whole.block_ids) for some, whole in zip(blocks, held, strict=True)
    )


def _are_in(some: npt.NDArray[np.int32], whole: npt.NDArray[np.int32]) -> bool:
    # for another request's blocks it is enough to look at the first one, which takes a fiftieth of the time
    return not len(some) or (bool((whole == some[0]).any()) and bool(np.isin(some, whole).all()))
