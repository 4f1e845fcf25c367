"""A host array with a copy on a device. torch is imported only where a device is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvconnector.errors import ConfigError

if TYPE_CHECKING:
    import torch


class MirroredArray:
    """A numpy array of zeros and, where a device is named, a tensor of the same shape there.

    For a CUDA GPU the host's side is pinned, and copies do not block. On the device `cpu` both
    sides are the same memory. Write `host` only after `wait_until_copied`: a GPU reads it when the
    stream gets to the copy, not when it is asked for.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str | None) -> None:
        self.host: npt.NDArray[Any]
        self._host_tensor: torch.Tensor | None = None
        self._device_tensor: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._in_flight = False
        if device is None:
            self.host = np.zeros(shape, dtype=dtype)
            return
        import torch

        target = torch.device(device)
        kind = getattr(torch, dtype)
        if target.type == "cuda":
            self._host_tensor = torch.zeros(shape, dtype=kind, pin_memory=True)
            self._copied = torch.cuda.Event()
        else:
            self._host_tensor = torch.zeros(shape, dtype=kind)
        self._device_tensor = (
            self._host_tensor
            if target.type == "cpu"
            else torch.zeros(shape, dtype=kind, device=target)
        )
        self.host = self._host_tensor.numpy()

    def copy_to_device(self, count: int) -> None:
        """Copy the first `count` entries of axis 0, on the current stream of a GPU."""
        source, target = self._host_tensor, self._device_tensor
        if source is None or target is None or source is target or not count:
            return
        target[:count].copy_(source[:count], non_blocking=self._copied is not None)
        if self._copied is not None:
            import torch

            self._copied.record(torch.cuda.current_stream(target.device))
            self._in_flight = True

    def wait_until_copied(self) -> None:
        """Return once the last copy has read the host's side."""
        if self._in_flight and self._copied is not None:
            self._copied.synchronize()
            self._in_flight = False

    def host_tensor(self) -> torch.Tensor:
        """The host's side as a CPU tensor of the same memory."""
        import torch

        return torch.from_numpy(self.host) if self._host_tensor is None else self._host_tensor

    def device_tensor(self) -> torch.Tensor:
        """The device's side.

        Raises:
            ConfigError: no device was named.
        """
        if self._device_tensor is None:
            raise ConfigError("there is no device copy: none was named when the table was built")
        return self._device_tensor
