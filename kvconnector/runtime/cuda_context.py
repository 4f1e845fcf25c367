"""The CUDA context that torch has on a device, and marks in an engine's streams after which blocks may be copied.

Both use the CUDA driver directly: torch's calls take tens of microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvconnector.datapath.direct.cuda_driver import load_libcuda
from kvconnector.errors import TransportError

if TYPE_CHECKING:
    import torch

_CAPTURE_MODE_RELAXED = 2


class CudaContext:
    """The context that torch has on `device` ("cuda:N").

    The engine's thread makes marks. Any thread gives them back, since making an event takes longer than reusing one.

    Raises:
        TransportError: the CUDA driver is missing, or torch has no context on the device.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._unused: list[torch.cuda.Event] = []
        self._index = int(device.partition(":")[2] or 0)
        # not public, but what Triton's launcher asks
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._cuda: Any = load_libcuda(
            "cuCtxGetCurrent",
            "cuCtxSetCurrent",
            "cuThreadExchangeStreamCaptureMode",
            "cuEventRecord",
            "cuStreamQuery",
        )
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes a context where there is none
            handle = self._current()
        if handle is None:
            raise TransportError("no CUDA context is current", device=device)
        self._handle = handle

    @property
    def is_current(self) -> bool:
        """Returns True if it is the calling thread's."""
        return self._current() == self._handle

    def allow_captures(self) -> None:
        """Let other threads capture CUDA graphs no matter what the calling thread does, for the rest of its life. It
        captures none itself, and without this its queries and allocations would end their captures.
        """
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        status = self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        _check("cuThreadExchangeStreamCaptureMode", status)

    def make_current(self) -> None:
        """Make it the calling thread's."""
        self._set(self._current(), self._handle)

    def run(self, function: Callable[[], object]) -> None:
        """Call `function` in this context, then make the previous one current again."""
        previous = self._current()
        self._set(previous, self._handle)
        try:
            function()
        finally:
            if previous != self._handle:
                self._set(self._current(), previous)

    def make_mark(self) -> torch.cuda.Event | None:
        """Return an event after the work queued on the current stream; None if there is none.

        Raises:
            TransportError: the GPU has failed.
        """
        if self.is_current:
            stream = ctypes.c_void_p(self._stream(self._index))
            if self._cuda.cuStreamQuery(stream) == 0:
                return None  # a query takes less time than a mark and the waits for it
            if self._unused:
                event = self._unused.pop()
                status = self._cuda.cuEventRecord(ctypes.c_void_p(event.cuda_event), stream)
                _check("cuEventRecord", status)
                return event
        import torch

        # torch goes to the other device and comes back
        event = self._unused.pop() if self._unused else torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._index))
        return event

    def give_back(self, mark: torch.cuda.Event) -> None:
        """Take back a mark for which nothing will wait."""
        self._unused.append(mark)

    def _current(self) -> int | None:
        found = ctypes.c_void_p()
        status = self._cuda.cuCtxGetCurrent(ctypes.byref(found))
        _check("cuCtxGetCurrent", status)
        return found.value

    def _set(self, present: int | None, wanted: int | None) -> None:
        if present != wanted:
            _check("cuCtxSetCurrent", self._cuda.cuCtxSetCurrent(ctypes.c_void_p(wanted)))


def _check(name: str, status: int) -> None:
    if status:
        raise TransportError(f"{name} failed", status=status)
