"""Memory that another process on this host shares (see `shared_memory`), mapped here: to be read, not written."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TypeAlias

import numpy as np

from kvconnector.datapath.direct.descriptor_socket import fetch_descriptor
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.wire.export import BOARD_OFFSET, BUCKET_BYTES, NONCE_BYTES, PoolExport

_OR_ELSEWHERE = (
    ", or in another container: caches in CPU memory need paths.shared_folder on both sides, those on GPUs one pid and"
    " ipc namespace (hostPID and hostIPC)"
)
_ANOTHER = f"the producer's process id is another process here{_OR_ELSEWHERE}"

Place: TypeAlias = tuple[int, int, int]
"""Memory of the producer: its address there, its bytes, and what to add to an address for the one that it has here."""


class PeerMemory:
    """The file that `export` names, as bytes in `array`, with its ranges in `places`. That of a CPU is looked for in
    `shared_folder` alone, if one is named.

    Raises:
        TransportError: another host or container, no permission, or a file that is not what a producer shares.
        PeerLostError: there is no such process any more.
    """

    def __init__(self, export: PoolExport, shared_folder: str = "") -> None:
        self._pid, self._statm = export.pid, -1
        if shared_folder and export.device == "cpu":
            fd = fetch_descriptor(shared_folder, export.nonce)
        else:
            fd = _open(export, f"fd/{export.fd}")
        try:
            nbytes = _checked_nbytes(fd, export)
            self._memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransportError(
                "a producer's memory cannot be mapped", reason=str(error)
            ) from error
        finally:
            os.close(fd)
        self.array = np.frombuffer(self._memory, np.uint8)
        if self.array[:NONCE_BYTES].tobytes() != export.nonce:
            self.close()
            raise TransportError(_ANOTHER, pid=export.pid)
        if export.device == "cuda":
            self._statm = _open(export, "statm")
        here = self.array.ctypes.data
        self.places: list[Place] = [
            (r.address, r.nbytes, here + r.offset - r.address) for r in export.ranges
        ]

    def check_alive(self) -> None:
        """Check that CUDA memory of the process is still there, which is freed after its other memory. What is mapped
        in `array` stays. Raises PeerLostError: it may be gone.
        """
        try:
            num_pages = os.pread(self._statm, 32, 0)
        except OSError:  # the process is gone altogether
            num_pages = b"0 "
        if num_pages.startswith(b"0 "):
            raise PeerLostError("the process that is read is gone", pid=self._pid)

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self.array = np.empty(0, np.uint8)
        self._memory.close()
        statm, self._statm = self._statm, -1
        if statm >= 0:
            os.close(statm)


def _open(export: PoolExport, name: str) -> int:
    path = f"/proc/{export.pid}/{name}"
    try:
        # whatever the peer has there: opening it must not wait
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except PermissionError as error:
        raise TransportError(
            "the kernel does not let this process open that one's memory: they need the same user",
            pid=export.pid,
        ) from error
    except OSError as error:
        if not os.path.exists(f"/proc/{export.pid}"):
            raise PeerLostError(
                f"the producer's process is gone{_OR_ELSEWHERE}", pid=export.pid
            ) from error
        raise TransportError(_ANOTHER, pid=export.pid, reason=str(error)) from error


def _checked_nbytes(fd: int, export: PoolExport) -> int:
    """Raises OSError: this is no memory that could be shared. ValueError: it could shrink, or the export names more."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        # reading a page that is gone would end this process
        raise ValueError("it is not sealed against shrinking")
    nbytes = os.fstat(fd).st_size
    stops = [each.offset + each.nbytes for each in export.ranges]
    if max(BOARD_OFFSET + export.num_buckets * BUCKET_BYTES, *stops, 0) > nbytes:
        raise ValueError(f"it has {nbytes} bytes, the export names more")
    return nbytes
