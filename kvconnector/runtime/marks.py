"""Marks in an engine's CUDA streams, after which blocks may be copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvconnector.datapath.direct.cuda_driver import load_libcuda
from kvconnector.errors import TransportError
from kvconnector.runtime.cuda_context import CudaContext

if TYPE_CHECKING:
    import torch


class StreamMarks:
    """Marks for caches on `device` ("cpu" or "cuda:N"), whose context is `context`. The engine's thread makes them, any
    thread gives them back: making an event takes longer than using one again.

    Raises:
        TransportError: the CUDA driver is missing.
    """

    def __init__(self, device: str, context: CudaContext) -> None:
        self._context = context
        self._kind, _, index = device.partition(":")
        self._index = int(index or 0)
        self._unused: list[torch.cuda.Event] = []
        self.are_needed = self._kind != "cpu"
        """`make` may return a mark."""
        if self.are_needed:
            import torch

            self._cuda: Any = load_libcuda("cuEventRecord", "cuStreamQuery")
            # not public, but what Triton's launcher asks
            self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def make(self) -> torch.cuda.Event | None:
        """Return an event after the work queued on the current stream; None if there is none, and on the CPU.

        Raises:
            TransportError: the GPU has failed.
        """
        if not self.are_needed:
            return None
        if not self._context.is_current:
            # torch goes to the other device and comes back
            return self._make_slowly()
        stream = ctypes.c_void_p(self._stream(self._index))
        if self._cuda.cuStreamQuery(stream) == 0:
            return None  # asking takes less time than a mark and those who wait for it
        if not self._unused:
            return self._make_slowly()
        event = self._unused.pop()
        status = self._cuda.cuEventRecord(ctypes.c_void_p(event.cuda_event), stream)
        if status:
            raise TransportError("cuEventRecord failed", status=status)
        return event

    def give_back(self, mark: torch.cuda.Event | None) -> None:
        """Nothing will wait for the mark any more."""
        if mark is not None:
            self._unused.append(mark)

    def _make_slowly(self) -> torch.cuda.Event:
        import torch

        event = self._unused.pop() if self._unused else torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._index))
        return event
