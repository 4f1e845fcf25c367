"""Marks in an engine's CUDA streams, behind which blocks may be copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StreamMarks:
    """Marks for caches on `device` ("cpu" or "cuda:N"). The engine's thread makes them, any thread gives them back:
    making an event takes longer than using one again.
    """

    def __init__(self, device: str) -> None:
        self._kind, _, index = device.partition(":")
        self._index = int(index or 0)
        self._unused: list[torch.cuda.Event] = []

    def make(self) -> torch.cuda.Event | None:
        """An event behind all that the current stream holds; None on the CPU, where nothing is awaited."""
        if self._kind == "cpu":
            return None
        import torch

        event = self._unused.pop() if self._unused else torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._index))
        return event

    def give_back(self, mark: torch.cuda.Event | None) -> None:
        """Nothing will be told to wait for the mark any more."""
        if mark is not None:
            self._unused.append(mark)
