"""Reading the memory of another process on this host (cross-memory attach), as far as the kernel lets us."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

from kvconnector.errors import KVConnectorError, PeerLostError, TransportError


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class MemoryReader:
    """Reads of `nbytes` from process `pid`, a few hundred bytes: it keeps the GIL. One thread at a time. Raises
    TransportError: this platform has no cross-memory attach.
    """

    def __init__(self, pid: int, nbytes: int) -> None:
        self._pid = pid
        self._nbytes = nbytes
        self._buffer = ctypes.create_string_buffer(nbytes)
        self._local = _IoVec(ctypes.addressof(self._buffer), nbytes)
        self._remote = _IoVec(0, nbytes)
        self._vectors = ctypes.byref(self._local), ctypes.byref(self._remote)
        self._readv = _readv()

    def read(self, address: int) -> bytes:
        """What is at an address. Raises PeerLostError: there is no such process any more. TransportError: it may not be
        read, or has nothing at these addresses.
        """
        self._remote.base = address
        found = self._readv(self._pid, self._vectors[0], 1, self._vectors[1], 1, 0)
        if found != self._nbytes:
            raise read_error(self._pid, ctypes.get_errno() if found < 0 else errno.EFAULT)
        return self._buffer.raw


def read_memory(pid: int, address: int, nbytes: int) -> bytes:
    """`nbytes` at `address` of process `pid`; see `MemoryReader`."""
    return MemoryReader(pid, nbytes).read(address)


def read_error(pid: int, number: int) -> KVConnectorError:
    """What the `errno` of a read of another process's memory means."""
    if number == errno.ESRCH:
        return PeerLostError("the process that is read is gone", pid=pid)
    if number == errno.EPERM:
        return TransportError(
            "the kernel does not let this process read that one: they need the same user, and neither a ptrace_scope "
            "above 1 nor a container without CAP_SYS_PTRACE may be in the way",
            pid=pid,
        )
    if number == errno.EFAULT:
        return TransportError("the process that is read has no memory there", pid=pid)
    return TransportError(
        "another process's memory cannot be read", pid=pid, reason=os.strerror(number)
    )


@cache
def _readv() -> Any:
    try:
        function = ctypes.PyDLL(None, use_errno=True).process_vm_readv
    except AttributeError as exc:
        raise TransportError("this platform has no process_vm_readv") from exc
    function.restype = ctypes.c_ssize_t
    function.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return function
