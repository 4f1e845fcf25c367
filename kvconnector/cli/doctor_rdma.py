"""Findings of `kvconnector doctor` about RDMA: the network to other hosts, ports, locked memory, and fork."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterator

from kvconnector.bench.environment import gpus
from kvconnector.bench.sizes import format_bytes
from kvconnector.cli.console import Finding, Verdict
from kvconnector.config import ConnectorConfig
from kvconnector.runtime.channels import ucx_options
from kvconnector.transport.tagged_messages import LOCK_REMEDY
from kvconnector.transport.ucx import UcxLibrary
from kvconnector.transport.ucx.ports import (
    active_rdma_ports,
    distance,
    lockable_bytes,
    place_of,
    rdma_ports,
)
from kvconnector.transport.ucx.rdma import (
    LOCKED_BYTES_PER_DEVICE,
    RdmaChoice,
    rdma_devices,
)

_RAILS = "UCX_MAX_RNDV_RAILS"
_DEFAULT_RAILS = 2
_COPIES_ON_FORK = (5, 12)
"""The first kernel that copies memory which a device has pinned when its process forks, instead of sharing it."""
_FORK_UNNEEDED = 2
"""`ibv_is_fork_initialized` returns this if the kernel copies, as some distributions' older kernels do."""


def network(library: UcxLibrary, device: str, config: ConnectorConfig) -> Finding:
    """Report the network that moves KV caches to other hosts with these settings."""
    choice = RdmaChoice(library, device, staging_bytes=config.staging.budget_bytes)
    options = ucx_options(config)
    choice.check_devices(options)
    devices = rdma_devices(choice.offers(options))
    lack = choice.lack_of_memory(devices)
    if not devices or lack:
        why = lack or choice.explain(options)
        verdict: Verdict = "warn" if devices or active_rdma_ports() else "note"
        return Finding("network", verdict, f"between hosts UCX will use TCP: {why}")
    text = (
        f"RDMA over {', '.join(sorted(devices))}; UCX uses the port nearest to a message's memory"
    )
    named_rails = os.environ.get(_RAILS, "")
    rails = int(named_rails) if named_rails.isdecimal() else _DEFAULT_RAILS
    if (num_ports := len(devices)) > rails:
        text += f"; UCX sends a message by {rails} of these {num_ports} RDMA ports: {_RAILS}={num_ports} takes all"
    return Finding("network", "ok", text)


def rdma_places() -> Iterator[Finding]:
    """Report each RDMA port and its distance from each GPU, or from the CPUs if there is no GPU."""
    devices = [f"cuda:{index}" for index in range(len(gpus()))] or ["cpu"]
    for port, (state, place) in rdma_ports().items():
        far = "; ".join(f"{device}: {distance(place, place_of(device))}" for device in devices)
        verdict: Verdict = "ok" if state == "ACTIVE" else "warn"
        yield Finding("rdma", verdict, f"{port} is {state}. {far}")
    if not rdma_ports():
        return
    yield _fork_safety()
    if (limit := lockable_bytes()) is not None:
        text = (
            f"this process may lock {format_bytes(limit)} (ulimit -l): UCX needs"
            f" {format_bytes(LOCKED_BYTES_PER_DEVICE)} for each port, and staging.budget_bytes for caches on CPUs, else"
            f" it takes TCP: {LOCK_REMEDY}"
        )
        yield Finding("rdma", "warn", text)


def _fork_safety() -> Finding:
    """Report what a fork of this process does to memory that UCX has registered."""
    release = platform.release()
    version = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if version >= _COPIES_ON_FORK or _is_fork_init_unneeded():
        return Finding("fork", "ok", f"kernel {release} copies registered memory for a child")
    asked = any(os.environ.get(name) for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE"))
    if os.environ.get("UCX_IB_FORK_INIT", "try") in ("n", "no", "0") and not asked:
        text = (
            f"kernel {release} shares registered memory with a child, and UCX_IB_FORK_INIT turns protection off: after"
            " a fork the NIC may read and write pages that are not the engine's any more. Unset it, or set"
            " RDMAV_FORK_SAFE=1"
        )
        return Finding("fork", "warn", text)
    text = (
        f"with kernel {release} a forked child lacks memory that UCX registered, and ends with SIGSEGV if it touches"
        " it: fork before the engine starts, or start programs (multiprocessing's spawn). With huge pages set"
        " RDMAV_HUGEPAGES_SAFE=1"
    )
    return Finding("fork", "note", text)


def _is_fork_init_unneeded() -> bool:
    """Returns True if the system's libibverbs says that the kernel copies registered memory on a fork."""
    try:
        state = ctypes.CDLL("libibverbs.so.1").ibv_is_fork_initialized()
        return bool(state == _FORK_UNNEEDED)
    except (OSError, AttributeError):
        return False
