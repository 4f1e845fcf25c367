"""The CUDA context that is current in a thread, by the driver's own calls: torch's take tens of microseconds."""

from __future__ import annotations

import ctypes
from typing import Any

from kvconnector.datapath.direct.cuda_driver import load_libcuda
from kvconnector.errors import TransportError

_CAPTURE_MODE_RELAXED = 2


class CudaContext:
    """The context that torch has on `device` ("cpu" or "cuda:N"). On the CPU it is always current.

    Raises:
        TransportError: the CUDA driver is missing, or torch has no context on the device.
    """

    def __init__(self, device: str) -> None:
        self._cuda: Any = None
        self._handle: int | None = None
        if device == "cpu":
            return
        import torch

        self._cuda = load_libcuda(
            "cuCtxGetCurrent", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"
        )
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes a context where there is none
            self._handle = self._current()
        if self._handle is None:
            raise TransportError("no CUDA context is current", device=device)

    @property
    def is_current(self) -> bool:
        """Returns True if it is the calling thread's."""
        return self._cuda is None or self._current() == self._handle

    def allow_captures(self) -> None:
        """Let other threads capture CUDA graphs whatever the calling thread does, for the rest of its life: it captures
        none itself, and its queries and allocations would otherwise end theirs.
        """
        if self._cuda is not None:
            mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
            status = self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            if status:
                raise TransportError("cuThreadExchangeStreamCaptureMode failed", status=status)

    def enter(self) -> int | None:
        """Make it the calling thread's. Returns the one before, for `leave`."""
        if self._cuda is None:
            return None
        previous = self._current()
        self._set(previous, self._handle)
        return previous

    def leave(self, previous: int | None) -> None:
        """Make current what was so before. Where that was this one, nothing here has made it another."""
        if previous != self._handle:
            self._set(self._current(), previous)

    def _current(self) -> int | None:
        found = ctypes.c_void_p()
        status = self._cuda.cuCtxGetCurrent(ctypes.byref(found))
        if status:
            raise TransportError("cuCtxGetCurrent failed", status=status)
        return found.value

    def _set(self, present: int | None, wanted: int | None) -> None:
        if present != wanted:
            status = self._cuda.cuCtxSetCurrent(ctypes.c_void_p(wanted))
            if status:
                raise TransportError("cuCtxSetCurrent failed", status=status)
