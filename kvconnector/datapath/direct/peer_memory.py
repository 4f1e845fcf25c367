"""Memory that another process on this host shares (see `shared_memory`), mapped here: to be read, not written."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np

from kvconnector.datapath.direct.descriptor_socket import fetch_descriptors
from kvconnector.errors import KVConnectorError, PeerLostError, TransportError
from kvconnector.wire.export import BOARD_OFFSET, BUCKET_BYTES, NONCE_BYTES, PoolExport

_OR_ELSEWHERE = (
    ", or in another container: both sides need paths.shared_folder, or one pid namespace (hostPID)"
)
_ANOTHER = f"the producer's process id is another process here{_OR_ELSEWHERE}"

Place: TypeAlias = tuple[int, int, int]
"""Memory of the producer: its address there, its bytes, and what to add to an address for the one that it has here."""


class PeerMemory:
    """The file that `export` names, as bytes in `array`, with its ranges in `places`. It is looked for in
    `shared_folder` alone, if one is named.

    Raises:
        TransportError: another host or container, no permission, or a file that is not what a producer shares.
        PeerLostError: there is no such process any more.
    """

    def __init__(self, export: PoolExport, shared_folder: str = "") -> None:
        self._pid = export.pid
        fd, *statm = _descriptors(export, shared_folder)
        self._statm = statm[0] if statm else -1
        with ExitStack() as undone:
            undone.callback(self._close_statm)
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
                raise TransportError(_ANOTHER, pid=export.pid)
            undone.pop_all()
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
        self._close_statm()

    def _close_statm(self) -> None:
        statm, self._statm = self._statm, -1
        if statm >= 0:
            os.close(statm)


def _descriptors(export: PoolExport, shared_folder: str) -> list[int]:
    """Descriptors of the producer's memory and, for pools on a GPU, of its statm; to be closed by the caller."""
    names = [f"fd/{export.fd}", "statm"][: 2 if export.device == "cuda" else 1]
    if shared_folder:
        return fetch_descriptors(shared_folder, export.nonce, len(names))
    # whatever the peer has there: opening it must not wait
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    with ExitStack() as undone:
        fds = []
        for name in names:
            try:
                fds.append(os.open(f"/proc/{export.pid}/{name}", flags))
            except OSError as error:
                raise _refusal(error, export) from error
            undone.callback(os.close, fds[-1])
        undone.pop_all()
    return fds


def _refusal(error: OSError, export: PoolExport) -> KVConnectorError:
    if isinstance(error, PermissionError):
        return TransportError(
            f"this process may not open the producer's memory: it is another user's{_OR_ELSEWHERE}",
            pid=export.pid,
        )
    if not os.path.exists(f"/proc/{export.pid}"):
        return PeerLostError(f"the producer's process is gone{_OR_ELSEWHERE}", pid=export.pid)
    return TransportError(_ANOTHER, pid=export.pid, reason=str(error))


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
