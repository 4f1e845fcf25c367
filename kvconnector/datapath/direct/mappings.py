"""Another process's GPU memory, mapped where kernels here read it (CUDA IPC)."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.datapath.direct.peer_memory import Place
from kvconnector.datapath.direct.shared_memory import is_of_this_process
from kvconnector.errors import TransportError
from kvconnector.wire.export import PoolExport


def map_allocations(export: PoolExport, device: str, opened: ExitStack) -> list[Place]:
    """Map the allocations of an export for kernels on `device`, until `opened` is closed. Those of this very process
    are there already.

    Args:
        export: Of CUDA pools, checked.
        device: Whose kernels read them, "cuda:0".
        opened: Gets what unmaps them.

    Returns:
        Where each allocation is here.

    Raises:
        TransportError: the GPUs cannot reach each other's memory, the driver refuses, or two containers' processes
            have one process id.
    """
    import torch

    is_own = export.pid == os.getpid()
    if is_own and not is_of_this_process(export.nonce):
        # the driver compares process ids, each of its own namespace, and would use the addresses as they are
        raise TransportError(
            "the producer's process id in its container is this one's here, by which CUDA takes its memory for this"
            " process's own: give both containers one pid namespace (hostPID), or start one engine in a process more",
            pid=export.pid,
        )
    driver, places = CudaDriver(), []
    with torch.cuda.device(device):
        driver.enter(torch.device(device).index)
        if is_own:
            _reach_own(driver, export, device, torch)
            return [(each.address, each.nbytes, 0) for each in export.allocations]
        for each in export.allocations:
            here, nbytes = driver.open_ipc(each.handle)
            opened.callback(_unmap, driver, device, here)
            if each.nbytes > nbytes:
                raise TransportError(
                    "an exported allocation is smaller than it says",
                    nbytes=nbytes,
                    stated=each.nbytes,
                )
            places.append((each.address, each.nbytes, here - each.address))
    return places


def _unmap(driver: CudaDriver, device: str, address: int) -> None:
    import torch

    with torch.cuda.device(device):
        driver.enter(torch.device(device).index)
        driver.close_ipc(address)


def _reach_own(driver: CudaDriver, export: PoolExport, device: str, torch: Any) -> None:
    """Memory of another GPU in this process needs no mapping, but peer access."""
    ours = str(torch.cuda.get_device_properties(device).uuid)
    if export.gpu_uuid == ours:
        return
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == export.gpu_uuid:
            driver.enable_peer_access(index)
            return
    raise TransportError("the producer's GPU is not visible here", gpu_uuid=export.gpu_uuid)
