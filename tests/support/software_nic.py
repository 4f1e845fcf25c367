"""RDMA ports in software, for processes that preload a stand-in for libibverbs: `software_nic.c` says how they work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvconnector.errors import TransportError
from kvconnector.transport.ucx.library import SOURCES, rdma_modules

TLS = "rc_verbs,tcp"
"""TCP is included because UCX agrees on lanes over it."""
_SOURCES = Path(__file__).with_suffix(".c"), Path(__file__).with_suffix(".map")


def ucx_with_ib():
    """Return a `ucx.library` with transports for RDMA, or None if none is installed."""
    open_mpi = Path(sys.prefix, "lib/openmpi/libucp.so.0")
    named = os.environ.get("KVCONNECTOR_UCX_LIBRARY", "")
    for source in (named, "nixl", str(open_mpi)):
        try:
            path = SOURCES[source]() if source in SOURCES else Path(source)
        except TransportError:
            continue
        if path.is_file() and rdma_modules(path):
            return source
    return None


class SoftwareNics:
    """A network of such ports, in a folder. Every process has two: "soft_0:1" and "soft_1:1"."""

    def __init__(self, folder):
        self.library = ucx_with_ib()
        if self.library is None:
            pytest.skip("needs a UCX with InfiniBand: NIXL's, Open MPI's or the system's")
        self._folder = folder / "network"
        self._folder.mkdir()
        self._verbs = folder / "libibverbs.so.1"
        source, versions = _SOURCES
        flags = [f"-Wl,-soname,{self._verbs.name}", f"-Wl,--version-script,{versions}"]
        command = ["gcc", "-shared", "-fPIC", "-O1", *flags, "-o", str(self._verbs), str(source)]
        built = shutil.which("gcc") and subprocess.run(
            command, capture_output=True, text=True, check=False
        )
        if not built or "infiniband/verbs.h: No such file" in built.stderr:
            pytest.skip("needs gcc and infiniband/verbs.h (Debian: apt-get install libibverbs-dev)")
        assert built.returncode == 0, built.stderr

    def environment(self, **more):
        """Return the variables of a process with these ports. `limit_bytes` bounds the memory that it may register."""
        named = {"LD_PRELOAD": self._verbs, "SOFTWARE_NIC": self._folder}
        return {name: str(value) for name, value in {**named, **more}.items()} | {
            "KVCONNECTOR_UCX_LIBRARY": self.library
        }

    def set_link(self, device, *, is_up):
        """Take the ports of all devices with this name down, or up again."""
        down = self._folder / f"{device}.down"
        if is_up:
            down.unlink()
        else:
            down.touch()
