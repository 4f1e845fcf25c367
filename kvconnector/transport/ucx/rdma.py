"""RDMA between hosts: its ports in sysfs, which of them a worker takes, and what to change where UCX goes by TCP."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvconnector.errors import ConfigError, IncompatiblePeerError
from kvconnector.transport.ucx.bindings import UcxBinding
from kvconnector.transport.ucx.libucp import context_resources

SYSFS = Path("/sys")


class Place(NamedTuple):
    """Where a device or a process is: the folders from the PCI root down to the device, none for a process, and the
    NUMA nodes there; -1 where the firmware does not say.
    """

    path: tuple[str, ...]
    nodes: frozenset[int]


def rdma_ports(sysfs: Path = SYSFS) -> dict[str, tuple[str, Place]]:
    """The RDMA ports as UCX names them ("mlx5_0:1"), the state of each link ("ACTIVE", "DOWN") and its place."""
    return {
        f"{state.parts[-4]}:{state.parts[-2]}": (
            state.read_text().partition(":")[2].strip(),
            _place(state.parents[2] / "device", sysfs),
        )
        for state in sorted(sysfs.glob("class/infiniband/*/ports/*/state"))
    }


def active_rdma_ports(sysfs: Path = SYSFS) -> dict[str, Place]:
    """Those whose link is up."""
    return {name: place for name, (state, place) in rdma_ports(sysfs).items() if state == "ACTIVE"}


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
    far = {
        name: (-_common(place, to), place.nodes.isdisjoint(to.nodes))
        for name, place in devices.items()
    }
    return [name for name in devices if far[name] == min(far.values())]


def distance(one: Place, other: Place) -> str:
    """How far two devices are from each other, in words."""
    common = _common(one, other)
    if common > 1:
        links = len(one.path) + len(other.path) - 2 * common
        return f"behind one PCIe bridge, {links} links apart"
    if common:
        return "on one PCIe root complex"
    if -1 in one.nodes | other.nodes:
        return "on a NUMA node that the firmware does not name"
    return "on another NUMA node" if one.nodes.isdisjoint(other.nodes) else "on one NUMA node"


def _common(one: Place, other: Place) -> int:
    """Folders that two ways from the PCI root have in common."""
    both = zip(one.path, other.path, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _place(device: Path, sysfs: Path) -> Place:
    try:
        folder = device.resolve(strict=True)
        path = folder.relative_to((sysfs / "devices").resolve()).parts
        return Place(path, frozenset([int((folder / "numa_node").read_text())]))
    except (OSError, ValueError):  # of no PCI device, as in software
        return Place((), frozenset([-1]))


logger = logging.getLogger(__name__)

AUTO_DEVICES = "auto"
RDMA_LANES = ("rc_", "dc_", "gga_", "srd", "ud_")
"""How UCX's transports begin whose hardware takes messages past the kernel."""

Resource: TypeAlias = tuple[str, str]
"""A transport of UCX's and its device, as ("rc_mlx5", "mlx5_0:1")."""
Offers: TypeAlias = Callable[[Mapping[str, str]], Collection[Resource]]
"""What UCX could use under options, which are named without `UCX_`."""


def offers_of(binding: UcxBinding) -> Offers:
    """What a binding's UCX offers: by a context that is opened for the question, which takes milliseconds."""

    def offers(options: Mapping[str, str]) -> Collection[Resource]:
        owners = [binding.open_context(options)]
        try:
            return context_resources(int(owners[0].handle))
        finally:
            binding.release(owners)

    return offers


def rdma_devices(resources: Collection[Resource]) -> set[str]:
    """The devices among these that some RDMA transport uses."""
    return {device for transport, device in resources if transport.startswith(RDMA_LANES)}


def settle_net_devices(
    options: Mapping[str, str], offers: Offers, device: str, sysfs: Path = SYSFS
) -> dict[str, str]:
    """`options` with "auto" for NET_DEVICES replaced by what it means for caches on `device` ("cpu" or "cuda:N").

    That is the RDMA ports nearest to the GPU, or to the CPUs that this process may use, and every interface for TCP.
    Without RDMA the choice is left to UCX. Raises ConfigError: a device is named that UCX cannot use.
    """
    named = options.get("NET_DEVICES", "")
    others = {name: value for name, value in options.items() if name != "NET_DEVICES"}
    if not named or named == "all":
        return dict(options)
    offered = offers(others)
    tcp = {name for transport, name in offered if transport == "tcp"}
    rdma = rdma_devices(offered)
    if named == AUTO_DEVICES:
        ports = active_rdma_ports(sysfs)
        near = nearest({name: ports[name] for name in ports.keys() & rdma}, place_of(device, sysfs))
        return (
            {**others, "NET_DEVICES": ",".join([*sorted(near), *sorted(tcp)])} if near else others
        )
    known = {name for each in tcp | rdma for name in (each, each.partition(":")[0])}
    unknown = [name for name in named.split(",") if name not in known and "[" not in name]
    if unknown:
        raise ConfigError(
            "ucx.net_devices names what UCX cannot use: a device that is not there, is down or has no address, or of a"
            " transport that UCX lacks",
            named=unknown,
            usable=sorted(tcp | rdma),
            active_rdma_ports=sorted(active_rdma_ports(sysfs)),
        )
    return dict(options)


def explain(options: Mapping[str, str], offers: Offers, library: Path, sysfs: Path = SYSFS) -> str:
    """Why UCX, loaded from `library`, has no RDMA lane to a peer under `options`, and what to change."""
    ports = ", ".join(active_rdma_ports(sysfs))
    if not ports:
        return "this host has no RDMA device with an active port"
    if rdma_devices(offers(options)):
        return "the peer has none that this host reaches: see its log, and whether one network joins both"
    every = {**options, "NET_DEVICES": "all"}
    if rdma_devices(offers(every)):
        return f"{_setting(options, 'NET_DEVICES')} leaves out {ports}: name those, or set ucx.net_devices=auto"
    if rdma_devices(offers({**every, "TLS": "all"})):
        return f"{_setting(options, 'TLS')} leaves out RDMA: add rc, or unset it"
    if not any((library.parent / "ucx").glob("libuct_ib*")):
        return (
            f"{library} has no InfiniBand transports, as those of pip's wheels: install a UCX of your system that has"
            " them, 1.18 or newer, and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
        )
    return f"UCX can open none of {ports}: see whether /dev/infiniband is here, and `ulimit -l` unlimited"


class RdmaWatch:
    """What is said, once for each set of lanes, where UCX takes TCP to another host. `require`: that is refused."""

    def __init__(
        self,
        options: Mapping[str, str],
        offers: Offers,
        *,
        require: bool,
        sysfs: Path = SYSFS,
    ) -> None:
        self._options, self._offers, self._sysfs = options, offers, sysfs
        self._require = require
        self._told: set[str] = set()

    def check(self, lanes: str) -> bool:
        """Look at the lanes to a peer on another host: whether RDMA ports are active here, and none of the lanes is
        RDMA's. Raises IncompatiblePeerError: none of them is RDMA's, and that is required.
        """
        if any(lane.startswith(RDMA_LANES) for lane in lanes.split("+")):
            return False
        ports = sorted(active_rdma_ports(self._sysfs))
        if self._require:
            raise IncompatiblePeerError(
                f"ucx.require_rdma is set, and UCX has no RDMA lane here: {self._why()}",
                lanes=lanes,
            )
        if ports and lanes not in self._told:
            self._told.add(lanes)
            logger.warning(
                "KV caches travel between hosts by %s, although RDMA ports are active here (%s): %s",
                lanes,
                ", ".join(ports),
                self._why(),
            )
        return bool(ports)

    def _why(self) -> str:
        return explain(self._options, self._offers, library_path(), self._sysfs)


def library_path() -> Path:
    """Where the libucp of this process is."""
    with Path("/proc/self/maps").open() as maps:
        return next((Path(line.split()[-1]) for line in maps if "/libucp.so" in line), Path())


def place_of(device: str, sysfs: Path = SYSFS) -> Place:
    """Where caches on `device` are."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return place_of_cpus(os.sched_getaffinity(0), sysfs)
    return place_of_gpu(_pci_address(int(index)), sysfs)


def _pci_address(index: int) -> str:
    """Of a GPU, as sysfs writes it."""
    cuda, gpu, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(32)
    cuda.cuInit(0)
    if cuda.cuDeviceGet(ctypes.byref(gpu), index) or cuda.cuDeviceGetPCIBusId(text, 32, gpu):
        raise ConfigError("the CUDA driver does not say where a GPU is", gpu=index)
    return text.value.decode().lower()


def _setting(options: Mapping[str, str], name: str) -> str:
    """A setting and its value, ours or of UCX's environment."""
    if name in options:
        return f"ucx.{name.lower()}={options[name]}"
    return f"UCX_{name}={os.environ.get(f'UCX_{name}', '')}"
