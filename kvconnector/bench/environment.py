"""The surroundings of a measurement: hardware, versions, commit."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from pathlib import Path

import msgspec
from msgspec import field

from kvconnector import __version__
from kvconnector.bench.options import TUNING

PACKAGES: tuple[str, ...] = ("numpy", "torch", "triton", "msgspec", "pyzmq", "nixl")
PACKAGES += ("ucxx-cu12", "ucxx-cu13", "ucx-py-cu12", "libucx-cu12", "libucx-cu13")
CHECKOUT = Path(__file__).resolve().parents[2]
DRIVER = "/proc/driver/nvidia/version", r"(\d+\.\d+(?:\.\d+)?)"
_GIT_TIMEOUT_S = 10


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `peers`: indices of the GPUs whose memory it can read."""

    name: str
    memory_bytes: int
    peers: tuple[int, ...]


def commit(checkout: Path = CHECKOUT) -> str:
    """Return the checkout's commit, with "+" if files differ from it. It is empty without git, and for files that have
    no checkout of their own: a repository around them has another history.
    """
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*", "--dirty=+"],
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.parent)},
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def cpu_name() -> str:
    """Return the processor's name."""
    return _found_in("/proc/cpuinfo", r"(?m)^model name\s*:\s*(.+)$") or platform.machine()


def free_memory_bytes() -> int:
    """Return the memory that this host can still give away, as its kernel estimates it; 0 if that is not known."""
    return int(_found_in("/proc/meminfo", r"(?m)^MemAvailable:\s*(\d+) kB$") or 0) << 10


def has_cuda_driver() -> bool:
    """Returns True if this host has CUDA's driver, and so probably GPUs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that torch can use; none if torch or the driver is missing."""
    # importing torch takes seconds
    if not has_cuda_driver() or importlib.util.find_spec("torch") is None:
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    indices = range(torch.cuda.device_count())
    return tuple(
        Gpu(
            name=torch.cuda.get_device_name(index),
            memory_bytes=int(torch.cuda.get_device_properties(index).total_memory),
            peers=tuple(
                peer
                for peer in indices
                if peer != index and torch.cuda.can_device_access_peer(index, peer)
            ),
        )
        for index in indices
    )


def installed_version(name: str) -> str:
    """Return a distribution's version; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _found_in(path: str, pattern: str) -> str:
    """Return the pattern's group in a file; empty if either is missing."""
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else ""


def _packages() -> dict[str, str]:
    found = {name: installed_version(name) for name in PACKAGES}
    ours = {"kvconnector": __version__, "python": platform.python_version()}
    return ours | {name: version for name, version in found.items() if version}


def _variables() -> dict[str, str]:
    named = sorted(name for name in os.environ if name.startswith(("UCX_", *TUNING)))
    return {name: os.environ[name] for name in named}


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The surroundings of a measurement, by default those of this process. `load_average` is that of the last minute:
    on a busy machine all times are long.
    """

    commit: str = field(default_factory=commit)
    cpu: str = field(default_factory=cpu_name)
    usable_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    load_average: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))
    gpus: tuple[Gpu, ...] = field(default_factory=gpus)
    driver: str = field(default_factory=lambda: _found_in(*DRIVER))
    system: str = f"{platform.system()} {platform.release()} {platform.machine()}"
    packages: dict[str, str] = field(default_factory=_packages)
    variables: dict[str, str] = field(default_factory=_variables)

    def __str__(self) -> str:
        named = ", ".join(gpu.name for gpu in self.gpus) or "no GPU"
        # twelve digits, and the mark of a checkout with changes; a wheel knows its version alone
        commit = self.commit[:12] + "+" * self.commit.endswith("+")
        built = f"commit {commit}" if commit else f"kvconnector {self.packages['kvconnector']}"
        return f"{self.cpu}, {self.usable_cores} cores, {named}; load {self.load_average}; {built}"
