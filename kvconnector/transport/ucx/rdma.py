"""RDMA between hosts: which of its ports a worker takes, and what to change where UCX goes by TCP.

A worker of UCX fills a receive queue for each RDMA device that its context has, and locks that memory. Where the system
refuses it, UCX tries again for ever: the worker starts, and its messages never leave. So such a context has no RDMA.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from kvconnector.errors import ConfigError, IncompatiblePeerError
from kvconnector.transport.base import LOCK_REMEDY
from kvconnector.transport.ucx.library import UcxLibrary, brings_libibverbs, rdma_modules
from kvconnector.transport.ucx.libucp import Context, Resource
from kvconnector.transport.ucx.ports import (
    SYSFS,
    active_drivers,
    active_rdma_ports,
    lockable_bytes,
    nearest,
    place_of,
)

logger = logging.getLogger(__name__)

AUTO_DEVICES = "auto"
RDMA_LANES = ("rc_", "dc_", "gga_", "srd", "ud_")
"""How UCX's transports begin whose hardware takes messages past the kernel."""
LOCKED_BYTES_PER_DEVICE = 39_845_888
"""What UCX locks at least for each RDMA device: the receive queue of `rc_verbs`, as 1.20 and 1.23 register it."""

Offers: TypeAlias = Callable[[Mapping[str, str]], Collection[Resource]]
"""What UCX could use under options, which are named without `UCX_`."""


def offers_of(library: UcxLibrary) -> Offers:
    """What a UCX offers: by a context that is opened for the question, which takes milliseconds."""

    def offers(options: Mapping[str, str]) -> Collection[Resource]:
        context = Context(library, options)
        try:
            return context.resources()
        finally:
            context.close()

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


def lack_of_memory(devices: Collection[str]) -> str:
    """Return why UCX cannot use these RDMA devices together, for want of memory that it may lock, and what to change;
    empty if it can.
    """
    limit, needed = lockable_bytes(), len(devices) * LOCKED_BYTES_PER_DEVICE
    if limit is None or limit >= needed:
        return ""
    return (
        f"this process may lock {limit} bytes (ulimit -l), and UCX locks at least {needed} for"
        f" {', '.join(sorted(devices))}: {LOCK_REMEDY}"
    )


def without_unlockable(
    options: Mapping[str, str], offers: Offers, *, require_rdma: bool
) -> dict[str, str]:
    """Return `options` that leave RDMA out, with a warning, where this process may not lock what UCX needs for it.

    Args:
        options: UCX's, settled by `settle_net_devices`.
        offers: See `offers_of`.
        require_rdma: See `UcxTransport`.

    Raises:
        ConfigError: RDMA is left out, and it is required or there is no TCP.
    """
    if lockable_bytes() is None:
        return dict(options)
    offered = offers(options)
    lack = lack_of_memory(rdma_devices(offered))
    if not lack:
        return dict(options)
    tcp = sorted(name for transport, name in offered if transport == "tcp")
    if require_rdma or not tcp:
        raise ConfigError(f"UCX cannot use RDMA: {lack}", require_rdma=require_rdma, tcp=tcp)
    logger.warning("KV caches travel between hosts by TCP, not by RDMA: %s", lack)
    return {**options, "NET_DEVICES": ",".join(tcp)}


def explain(options: Mapping[str, str], offers: Offers, library: Path, sysfs: Path = SYSFS) -> str:
    """Return why UCX, loaded from `library`, has no RDMA lane to a peer under `options`, and what to change."""
    ports = ", ".join(active_rdma_ports(sysfs))
    if not ports:
        return "this host has no RDMA device with an active port"
    if rdma_devices(offers(options)):
        return "the peer has none that this host reaches: see its log, and whether one network joins both"
    every = {**options, "NET_DEVICES": "all"}
    if devices := rdma_devices(offers(every)):
        if lack := lack_of_memory(devices):
            return lack
        return f"{_setting(options, 'NET_DEVICES')} leaves out {ports}: name those, or set ucx.net_devices=auto"
    if rdma_devices(offers({**every, "TLS": "all"})):
        return f"{_setting(options, 'TLS')} leaves out RDMA: add rc, or unset it"
    modules = rdma_modules(library)
    if not modules:
        return (
            f"{library} has no InfiniBand transports: install kvconnector[rdma], or set ucx.library to one that has"
            " them; `kvconnector doctor` lists them"
        )
    try:
        ctypes.CDLL(str(modules[0]))
    except OSError as error:
        return f"{modules[0]} cannot be loaded: {error}. Install rdma-core (libibverbs1, ibverbs-providers)"
    hint = "see whether /dev/infiniband is here, `ulimit -l` unlimited, and ibverbs-providers installed"
    if brings_libibverbs(library) and active_drivers(sysfs).isdisjoint(("mlx5_core", "")):
        hint = (
            "it brings a libibverbs that knows NVIDIA's NICs (mlx5) alone: set ucx.library=system"
        )
    return f"UCX can open none of {ports}: {hint}"


class RdmaWatch:
    """Warns, once for each set of lanes, where UCX takes TCP to another host. `require`: that is refused."""

    def __init__(
        self,
        options: Mapping[str, str],
        library: UcxLibrary,
        *,
        require: bool,
        sysfs: Path = SYSFS,
    ) -> None:
        self._options, self._library, self._sysfs = options, library, sysfs
        self._require = require
        self._warned: set[str] = set()

    def check(self, lanes: str) -> bool:
        """Returns True if RDMA ports are active here, and none of the lanes to a peer on another host is RDMA's. Raises
        IncompatiblePeerError: none of them is RDMA's, and that is required.
        """
        if any(lane.startswith(RDMA_LANES) for lane in lanes.split("+")):
            return False
        ports = sorted(active_rdma_ports(self._sysfs))
        if self._require:
            raise IncompatiblePeerError(
                f"ucx.require_rdma is set, and UCX has no RDMA lane here: {self._why()}",
                lanes=lanes,
            )
        if ports and lanes not in self._warned:
            self._warned.add(lanes)
            logger.warning(
                "KV caches travel between hosts by %s, although RDMA ports are active here (%s): %s",
                lanes,
                ", ".join(ports),
                self._why(),
            )
        return bool(ports)

    def _why(self) -> str:
        return explain(self._options, offers_of(self._library), self._library.path, self._sysfs)


def _setting(options: Mapping[str, str], name: str) -> str:
    """A setting and its value, ours or of UCX's environment."""
    if name in options:
        return f"ucx.{name.lower()}={options[name]}"
    return f"UCX_{name}={os.environ.get(f'UCX_{name}', '')}"
