"""Another process's GPU memory, mapped where kernels here read it (CUDA IPC)."""

from __future__ import annotations

import os
from typing import Any

from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.errors import TransportError
from kvconnector.wire.export import PoolExport


class Mappings:
    """The allocations of an export in the address space of `device`. Those of this very process are there already.
    Raises TransportError: the GPUs cannot reach each other's memory, or the driver refuses.
    """

    def __init__(self, export: PoolExport, device: str) -> None:
        import torch

        self._device = device
        self._driver = CudaDriver()
        self._opened: list[int] = []
        self.places: list[tuple[int, int, int]] = []
        """Address there, bytes, what to add for the address here."""
        with torch.cuda.device(device):
            self._driver.enter(torch.device(device).index)
            if export.pid == os.getpid():
                self._reach_own(export, torch)
                self.places = [(a.address, a.nbytes, 0) for a in export.allocations]
                return
            try:
                for allocation in export.allocations:
                    here, nbytes = self._driver.open_ipc(allocation.handle)
                    self._opened.append(here)
                    if allocation.nbytes > nbytes:
                        raise TransportError(
                            "an exported allocation is smaller than it says",
                            nbytes=nbytes,
                            stated=allocation.nbytes,
                        )
                    there = allocation.address
                    self.places.append((there, allocation.nbytes, here - there))
            except TransportError:
                self.close()
                raise

    def close(self) -> None:
        """Unmap. Idempotent. Raises TransportError: the driver refuses."""
        if not self._opened:
            return
        import torch

        opened, self._opened = self._opened, []
        with torch.cuda.device(self._device):
            self._driver.enter(torch.device(self._device).index)
            for address in opened:
                self._driver.close_ipc(address)

    def _reach_own(self, export: PoolExport, torch: Any) -> None:
        """Memory of another GPU in this process needs no mapping, but peer access."""
        ours = str(torch.cuda.get_device_properties(self._device).uuid)
        if export.gpu_uuid == ours:
            return
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == export.gpu_uuid:
                self._driver.enable_peer_access(index)
                return
        raise TransportError("the producer's GPU is not visible here", gpu_uuid=export.gpu_uuid)
