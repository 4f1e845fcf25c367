"""RDMA between hosts: the ports that a worker uses, and the remedy if UCX uses TCP.

A worker of UCX fills a receive queue for each RDMA device of its context, and locks that memory. If the system refuses,
UCX tries again forever: the worker starts, but sends nothing. So such a context gets no RDMA.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeAlias

from kvconnector.errors import ConfigError, IncompatiblePeerError
from kvconnector.transport.tagged_messages import LOCK_REMEDY
from kvconnector.transport.ucx.library import UcxLibrary, knows_no_driver, rdma_modules
from kvconnector.transport.ucx.libucp import Context, Resource
from kvconnector.transport.ucx.ports import active_rdma_ports, lockable_bytes

logger = logging.getLogger(__name__)

RDMA_LANES = ("rc_", "dc_", "gga_", "srd", "ud_")
"""Prefixes of the names of UCX's transports whose hardware bypasses the kernel."""
LOCKED_BYTES_PER_DEVICE = 39_845_888
"""The least that UCX locks for each RDMA device: the receive queue of `rc_verbs`, as 1.20 and 1.23 register it."""

ResourcesOf: TypeAlias = Callable[[Mapping[str, str]], Collection[Resource]]
"""Returns the resources that UCX could use with these options, which are named without `UCX_`."""


def offered(library: UcxLibrary, options: Mapping[str, str]) -> set[Resource]:
    """Return the resources that a UCX could use with these options, by opening a context, which takes milliseconds."""
    context = Context(library, options)
    try:
        return context.resources()
    finally:
        context.close()


def rdma_devices(resources: Collection[Resource]) -> set[str]:
    """Return the devices among these that an RDMA transport uses."""
    return {device for transport, device in resources if transport.startswith(RDMA_LANES)}


class RdmaChoice:
    """What UCX may use for RDMA, for a worker with caches on `device` ("cpu" or "cuda:N").

    All `options` are UCX's, named without `UCX_`. `staging_bytes` of host memory are registered besides UCX's own.
    """

    def __init__(
        self,
        library: UcxLibrary,
        device: str = "cpu",
        *,
        staging_bytes: int = 0,
        offers: ResourcesOf | None = None,
    ) -> None:
        self._path = library.path
        self._staging_bytes = staging_bytes if device == "cpu" else 0
        self.offers = offers or partial(offered, library)
        self._warned: set[str] = set()

    def check_devices(self, options: Mapping[str, str]) -> None:
        """Check the names in NET_DEVICES. UCX itself takes those of its devices that are nearest to a message's memory.

        Raises:
            ConfigError: A named device cannot be used by UCX.
        """
        named = options.get("NET_DEVICES", "")
        if not named or named == "all":
            return
        offers = self.offers({key: each for key, each in options.items() if key != "NET_DEVICES"})
        usable = [*_tcp(offers), *sorted(rdma_devices(offers))]
        known_names = {name for each in usable for name in (each, each.partition(":")[0])}
        unknown = [name for name in named.split(",") if name not in known_names and "[" not in name]
        if unknown:
            raise ConfigError(
                "ucx.net_devices names a device that UCX cannot use: it does not exist, is down, has no"
                " address, or belongs"
                " to a transport that UCX lacks",
                named=unknown,
                usable=sorted(usable),
                active_rdma_ports=sorted(active_rdma_ports()),
            )

    def lack_of_memory(self, devices: Collection[str]) -> str:
        """Return why UCX may lock too little memory to use these RDMA devices together, and the remedy; "" if it may
        lock enough, or if there are none.
        """
        limit = lockable_bytes()
        needed = len(devices) * LOCKED_BYTES_PER_DEVICE + self._staging_bytes
        if not devices or limit is None or limit >= needed:
            return ""
        return (
            f"this process may lock {limit} bytes (ulimit -l), and UCX locks at least {needed} for"
            f" {', '.join(sorted(devices))} and staging.budget_bytes: {LOCK_REMEDY}"
        )

    def without_unlockable(
        self, options: Mapping[str, str], *, require_rdma: bool
    ) -> dict[str, str]:
        """Return `options`. They leave out RDMA, with a warning, if this process may not lock enough memory.

        Raises:
            ConfigError: RDMA is left out, and it is required or there is no TCP.
        """
        if lockable_bytes() is None:
            return dict(options)
        offers = self.offers(options)
        lack, tcp = self.lack_of_memory(rdma_devices(offers)), _tcp(offers)
        if not lack:
            return dict(options)
        if require_rdma or not tcp:
            raise ConfigError(f"UCX cannot use RDMA: {lack}", require_rdma=require_rdma, tcp=tcp)
        logger.warning("KV caches are sent between hosts over TCP, not over RDMA: %s", lack)
        return {**options, "NET_DEVICES": ",".join(tcp)}

    def explain(self, options: Mapping[str, str]) -> str:
        """Return why UCX has no RDMA lane to a peer under `options`, and the remedy."""
        ports = ", ".join(active_rdma_ports())
        if not ports:
            return "this host has no RDMA device with an active port"
        if rdma_devices(self.offers(options)):
            return "the peer has none that this host reaches: see its log, and whether one network joins both"
        every = {**options, "NET_DEVICES": "all"}
        if devices := rdma_devices(self.offers(every)):
            named = _setting(options, "NET_DEVICES")
            return self.lack_of_memory(devices) or (
                f"{named} leaves out {ports}: name those, or unset it"
            )
        if rdma_devices(self.offers({**every, "TLS": "all"})):
            return f"{_setting(options, 'TLS')} leaves out RDMA: add rc, or unset it"
        modules = rdma_modules(self._path)
        if not modules:
            return (
                f'{self._path} has no InfiniBand transports: pip install "kvconnector[rdma]", or set'
                " ucx.library to one that has them; `kvconnector doctor` lists them"
            )
        try:
            ctypes.CDLL(str(modules[0]))
        except OSError as error:
            return f"{modules[0]} cannot be loaded: {error}. Install rdma-core (libibverbs1, ibverbs-providers)"
        hint = "see whether /dev/infiniband is here, `ulimit -l` unlimited, and ibverbs-providers installed"
        if knows_no_driver(self._path):
            hint = "its libibverbs knows NVIDIA's NICs alone: set ucx.library to the path of the system's libucp.so.0"
        return f"UCX can open none of {ports}: {hint}"

    def check(self, lanes: str, options: Mapping[str, str], *, require_rdma: bool) -> bool:
        """Returns True if RDMA ports are active here, but no lane to a peer on another host uses RDMA; the log warns
        once for each set of lanes.

        Raises:
            IncompatiblePeerError: no lane uses RDMA, and `require_rdma` is set.
        """
        if any(lane.startswith(RDMA_LANES) for lane in lanes.split("+")):
            return False
        if require_rdma:
            why = f"ucx.require_rdma is set, and UCX has no RDMA lane here: {self.explain(options)}"
            raise IncompatiblePeerError(why, lanes=lanes)
        ports = sorted(active_rdma_ports())
        if ports and lanes not in self._warned:
            self._warned.add(lanes)
            logger.warning(
                "KV caches are sent between hosts over %s, although RDMA ports are active here (%s): %s",
                lanes,
                ", ".join(ports),
                self.explain(options),
            )
        return bool(ports)


def _tcp(resources: Collection[Resource]) -> list[str]:
    return sorted(device for transport, device in resources if transport == "tcp")


def _setting(options: Mapping[str, str], name: str) -> str:
    """Name a setting and its value, ours or from UCX's environment."""
    if name in options:
        return f"ucx.{name.lower()}={options[name]}"
    return f"UCX_{name}={os.environ.get(f'UCX_{name}', '')}"
