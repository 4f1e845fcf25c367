"""A host array with a copy on a device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


class MirroredArray:
    """A numpy array of zeros, `host`, and a tensor of the same shape on a device, `device`.

    For a CUDA GPU the host's side is pinned, and copies do not block. On the device `cpu` both
    sides are the same memory. Write `host` only after `wait_until_copied`: a GPU reads it when the
    stream gets to the copy, not when it is asked for.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        target = torch.device(device)
        is_gpu = target.type == "cuda"
        self._host_tensor = torch.zeros(shape, dtype=dtype, pin_memory=is_gpu)
        self._copied = torch.cuda.Event() if is_gpu else None
        self._in_flight = False
        self.host: npt.NDArray[Any] = self._host_tensor.numpy()
        self.device = (
            self._host_tensor
            if target.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=target)
        )

    def copy_to_device(self, count: int) -> None:
        """Copy the first `count` entries of axis 0, on the current stream of a GPU."""
        if self.device is self._host_tensor or not count:
            return
        is_gpu = self._copied is not None
        self.device[:count].copy_(self._host_tensor[:count], non_blocking=is_gpu)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))
            self._in_flight = True

    def wait_until_copied(self) -> None:
        """Return once the last copy has read the host's side."""
        if self._in_flight and self._copied is not None:
            self._copied.synchronize()
            self._in_flight = False
