"""Memory that another process on this host shares (see `shared_memory`), mapped here: to be read, not written."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from kvconnector.errors import PeerLostError, TransportError
from kvconnector.wire.export import BOARD_OFFSET, BUCKET_BYTES, NONCE_BYTES, PoolExport


class PeerMemory:
    """The file that `export` names, as bytes in `array`; `places` are its ranges: address there, bytes, what to add for
    the address here.

    Raises:
        TransportError: another host or pid namespace, no permission, or a file that is not what a producer shares.
        PeerLostError: there is no such process any more.
    """

    def __init__(self, export: PoolExport) -> None:
        fd = _open(export)
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
            raise TransportError(
                "the producer's process id is another process here", pid=export.pid
            )
        here = self.array.ctypes.data
        self.places = [(r.address, r.nbytes, here + r.offset - r.address) for r in export.ranges]

    def close(self) -> None:
        """Unmap it. Idempotent."""
        del self.array
        self._memory.close()


def _open(export: PoolExport) -> int:
    path = f"/proc/{export.pid}/fd/{export.fd}"
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
            raise PeerLostError("the producer's process is gone", pid=export.pid) from error
        raise TransportError(
            "the producer's process id is another process here", pid=export.pid, reason=str(error)
        ) from error


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
