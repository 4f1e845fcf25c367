"""The RDMA ports of this host, as sysfs shows them, and how far they are from GPUs and CPUs."""

from __future__ import annotations

import ctypes
import os
import resource
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from kvconnector.errors import ConfigError

SYSFS = Path("/sys")
_CAP_IPC_LOCK = 14


class Place(NamedTuple):
    """The place of a device or a process: the folders from the PCI root down to the device, none for a process, and its
    NUMA nodes, -1 if the firmware names none.
    """

    path: tuple[str, ...]
    nodes: frozenset[int]


def rdma_ports() -> dict[str, tuple[str, Place]]:
    """Return the RDMA ports by UCX's names ("mlx5_0:1"): the state of the link ("ACTIVE", "DOWN"), and the place."""
    return {
        f"{state.parts[-4]}:{state.parts[-2]}": (
            state.read_text().partition(":")[2].strip(),
            _place(state.parents[2] / "device"),
        )
        for state in sorted(SYSFS.glob("class/infiniband/*/ports/*/state"))
    }


def active_rdma_ports() -> dict[str, Place]:
    """Return the places of the RDMA ports whose link is up."""
    return {name: place for name, (state, place) in rdma_ports().items() if state == "ACTIVE"}


def active_drivers() -> set[str]:
    """Return the kernel's drivers of the devices with active ports, such as "mlx5_core"; "" if sysfs has none."""
    folders = {SYSFS / "class/infiniband" / port.partition(":")[0] for port in active_rdma_ports()}
    links = [folder / "device/driver" for folder in folders]
    return {link.resolve().name if link.exists() else "" for link in links}


def lockable_bytes() -> int | None:
    """Return the bytes that this process may lock, as registering them with a NIC does; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = Path("/proc/self/status").read_text("ascii", "replace")
    capabilities = int(status.partition("CapEff:")[2].split(maxsplit=1)[0], 16)
    is_exempt = capabilities >> _CAP_IPC_LOCK & 1
    return None if is_exempt or soft == resource.RLIM_INFINITY else soft


def distance(one: Place, other: Place) -> str:
    """Return in words how far two devices are from each other."""
    common = _common(one, other)
    if common > 1:
        links = len(one.path) + len(other.path) - 2 * common
        return f"below one PCIe bridge, {links} links apart"
    if common:
        return "on one PCIe root complex"
    if -1 in one.nodes | other.nodes:
        return "on a NUMA node that the firmware does not name"
    return "on another NUMA node" if one.nodes.isdisjoint(other.nodes) else "on one NUMA node"


def _common(one: Place, other: Place) -> int:
    """Return the number of folders that two paths from the PCI root have in common."""
    both = zip(one.path, other.path, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _place(device: Path) -> Place:
    try:
        folder = device.resolve(strict=True)
        path = folder.relative_to((SYSFS / "devices").resolve()).parts
        return Place(path, frozenset([int((folder / "numa_node").read_text())]))
    except (OSError, ValueError):  # not a PCI device, such as a port in software
        return Place((), frozenset([-1]))


def place_of(device: str) -> Place:
    """Return the place of caches on `device`; on the CPU, the nodes where this process may run."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return _place(SYSFS / "bus/pci/devices" / _pci_address(int(index)))
    folders = [SYSFS / "devices/system/cpu" / f"cpu{cpu}" for cpu in os.sched_getaffinity(0)]
    nodes = [int(node.name[4:]) for folder in folders for node in folder.glob("node[0-9]*")]
    return Place((), frozenset(nodes))


def _pci_address(index: int) -> str:
    """Return a GPU's PCI address as sysfs writes it."""
    cuda, gpu, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(32)
    cuda.cuInit(0)
    if cuda.cuDeviceGet(ctypes.byref(gpu), index) or cuda.cuDeviceGetPCIBusId(text, 32, gpu):
        raise ConfigError("the CUDA driver does not report a GPU's PCI address", gpu=index)
    return text.value.decode().lower()
