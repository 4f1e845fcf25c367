"""Host memory that a GPU reads and writes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch


class _DeviceAddress:
    """Pinned memory, described the way torch adopts foreign device arrays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": tensor.numpy().dtype.str,
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


class UvaBackedTensor:
    """One array under three names: `numpy` and `host` on the host, `device` for kernels. No copies.

    For a CUDA GPU the memory is pinned and read over the bus when a kernel reads it: write it
    before the launch, and leave it alone until that has run. On the CPU `device` is `host`. It starts as zeros, of a
    type that numpy has too.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.host = torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)
                # No target device is named: torch would then copy what it takes for another one's.
                self.device = torch.as_tensor(_DeviceAddress(self.host))
        else:
            self.host = torch.zeros(tuple(shape), dtype=dtype)
            self.device = self.host
        self.numpy: npt.NDArray[Any] = self.host.numpy()
