"""Every UCX of this host, each examined in a process of its own, since a process uses only one.

`python -m kvconnector.transport.ucx.stacks SOURCE` writes its findings as JSON.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from kvconnector.errors import KVConnectorError
from kvconnector.transport.ucx.library import SOURCES, load_library
from kvconnector.transport.ucx.rdma import offered, rdma_devices

EXAMINE_TIMEOUT_S = 60.0


class Stack(msgspec.Struct, frozen=True):
    """A UCX: its source, its components, and the RDMA devices that it can use now; or the `error` that prevents its
    use.
    """

    source: str
    library: str = ""
    components: list[str] = []
    rdma_devices: list[str] = []
    error: str = ""


def examine_stacks() -> list[Stack]:
    """Examine every source, in the order in which they are preferred without RDMA."""
    command = [sys.executable, "-m", "kvconnector.transport.ucx.stacks"]
    started = [
        (source, subprocess.Popen([*command, source], stdout=subprocess.PIPE)) for source in SOURCES
    ]
    return [_outcome(source, process) for source, process in started]


def _outcome(source: str, process: subprocess.Popen[bytes]) -> Stack:
    try:
        return msgspec.json.decode(process.communicate(timeout=EXAMINE_TIMEOUT_S)[0], type=Stack)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Stack(source, error=f"it takes longer than {EXAMINE_TIMEOUT_S:.0f} s to start")
    except msgspec.DecodeError:
        return Stack(source, error=f"it ends its process with status {process.returncode}")


def examine(source: str) -> Stack:
    """Examine one source by loading it into this process."""
    try:
        library = load_library(source)
        devices = rdma_devices(offered(library, {}))
        return Stack(source, repr(library), library.components(), sorted(devices))
    except KVConnectorError as error:
        return Stack(source, error=error.statement)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(examine(sys.argv[1])))
