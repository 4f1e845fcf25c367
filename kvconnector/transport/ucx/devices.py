"""The RDMA ports of a host, and which of them are nearest to a GPU, as sysfs tells. Pure: all is below one root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

SYSFS = Path("/sys")


class Place(NamedTuple):
    """Where a device or a process is: the folders from the PCI root down to the device, none for a process, and the
    NUMA nodes there; -1 where the firmware does not say.
    """

    path: tuple[str, ...]
    nodes: frozenset[int]


def active_rdma_ports(sysfs: Path = SYSFS) -> dict[str, Place]:
    """The RDMA ports whose link is up, as UCX names them: "mlx5_0:1"."""
    return {
        f"{state.parts[-4]}:{state.parts[-2]}": _place(state.parents[2] / "device", sysfs)
        for state in sorted(sysfs.glob("class/infiniband/*/ports/*/state"))
        if state.read_text().partition(":")[2].strip() == "ACTIVE"
    }


def place_of_gpu(pci_address: str, sysfs: Path = SYSFS) -> Place:
    """Where the GPU with an address like "0000:19:00.0" is."""
    return _place(sysfs / "bus/pci/devices" / pci_address, sysfs)


def place_of_cpus(cpus: Iterable[int], sysfs: Path = SYSFS) -> Place:
    """Where a process is that may run on these CPUs."""
    folders = [sysfs / "devices/system/cpu" / f"cpu{cpu}" for cpu in cpus]
    nodes = [int(node.name[4:]) for folder in folders for node in folder.glob("node[0-9]*")]
    return Place((), frozenset(nodes))


def nearest(devices: Mapping[str, Place], to: Place) -> list[str]:
    """The devices that share the longest way from the PCI root with `to`, which are behind the same switch where there
    is one; of these the ones on its NUMA node. All that are equally near.
    """

    def distance(place: Place) -> tuple[int, bool]:
        common = 0
        while place.path[common : common + 1] == to.path[common : common + 1] != ():
            common += 1
        return -common, place.nodes.isdisjoint(to.nodes)

    least = min(map(distance, devices.values()), default=None)
    return [name for name, place in devices.items() if distance(place) == least]


def _place(device: Path, sysfs: Path) -> Place:
    try:
        folder = device.resolve(strict=True)
        path = folder.relative_to((sysfs / "devices").resolve()).parts
        return Place(path, frozenset([int((folder / "numa_node").read_text())]))
    except (OSError, ValueError):  # of no PCI device, as in software
        return Place((), frozenset([-1]))
