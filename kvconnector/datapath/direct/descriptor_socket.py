"""A worker's memory for consumers in other containers of its node: its descriptor, through a socket in a shared folder.

*Purpose.* /proc/PID/fd leads to another process's memory only within one pid namespace, and each pod has its own. But
pods of a node can share a volume. A socket file in it joins them whatever their namespaces, and carries open
descriptors: of the memory, and of the producer's statm in /proc, which shows that the producer lives. So the memory is
the same as without containers, sealed and without a name: nothing in the volume needs a size, and the memory is freed
when the producer ends, however it ends. Only an empty socket file may be left, which the next producer removes.

*Access.* Both ends ask the kernel for the other's user, which must be their own. The consumer sends the nonce from its
greeting; the socket's name is a digest of the nonce, which does not reveal it.

*Threads.* A thread of the producer waits in accept(2) and serves one consumer after the other. The consumer asks in its
driver's thread, in the greeting. *Deadlines.* `LIMIT_S` for each message, on both sides.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvconnector.errors import ConfigError, PeerLostError, TransportError
from kvconnector.wire.export import NONCE_BYTES

LIMIT_S = 1.0
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 1024
_CLOSED = (errno.EINVAL, errno.EBADF)
_PREFIX, _SUFFIX = "kvconnector-", ".sock"


class DescriptorServer:
    """Sends the descriptor `fd` and one of /proc/self/statm to every process of this user that knows `nonce`, through a
    socket in `folder`, until `close`.

    Raises:
        ConfigError: there is no such folder, or this process may not write it.
    """

    def __init__(self, folder: str, fd: int, nonce: bytes) -> None:
        self._folder, self._fd, self._nonce = folder, fd, nonce
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            with _opened(folder) as place:
                _remove_stale(place)
                # it must not look stale before it listens
                unfinished = place / f"{_PREFIX}{secrets.token_hex(8)}"
                os.fchmod(self._listener.fileno(), 0o600)
                self._listener.bind(str(unfinished))
                self._listener.listen(_BACKLOG)
                unfinished.rename(place / _name(nonce))
        except OSError as error:
            self._listener.close()
            raise ConfigError(
                "paths.shared_folder must be a folder that this process may write: a volume that both pods mount",
                folder=folder,
                reason=str(error),
            ) from error
        self._thread = threading.Thread(target=self._serve, name="kvconnector-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the descriptors to no further process."""
        with suppress(OSError), _opened(self._folder) as place:
            (place / _name(self._nonce)).unlink()
        self._listener.shutdown(socket.SHUT_RDWR)  # accept(2) returns
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                time.sleep(LIMIT_S)  # no descriptor is free
                continue
            with client, suppress(OSError):
                client.settimeout(LIMIT_S)
                if _received(client, NONCE_BYTES) == self._nonce and _is_same_user(client):
                    with open("/proc/self/statm", "rb") as statm:
                        socket.send_fds(client, [b"!"], [self._fd, statm.fileno()])


def fetch_descriptors(folder: str, nonce: bytes, count: int) -> list[int]:
    """Fetch the first `count` descriptors of a producer that has this `nonce`: of its memory, of its statm. The caller
    closes them.

    Raises:
        TransportError: no producer has such a socket in this folder, it belongs to another user, or does not answer.
        PeerLostError: the producer has ended.
    """
    try:
        with socket.socket(socket.AF_UNIX) as server, _opened(folder) as place:
            server.settimeout(LIMIT_S)
            server.connect(str(place / _name(nonce)))
            if not _is_same_user(server):
                raise TransportError(
                    "the producer's memory belongs to another user: both need the same",
                    folder=folder,
                )
            server.sendall(nonce)
            _, fds, _, _ = socket.recv_fds(server, 1, count, socket.MSG_CMSG_CLOEXEC)
    except FileNotFoundError as error:
        raise TransportError(
            "the producer is not in paths.shared_folder: it is on another node, or has another volume or none there",
            folder=folder,
        ) from error
    except ConnectionRefusedError as error:
        raise PeerLostError("the producer's process is gone", folder=folder) from error
    except OSError as error:
        raise TransportError(
            "the producer's memory cannot be had from paths.shared_folder",
            folder=folder,
            reason=str(error),
        ) from error
    if len(fds) < count:
        for fd in fds:
            os.close(fd)
        raise TransportError("the producer gives its memory to nobody here", folder=folder)
    return fds


@contextmanager
def _opened(folder: str) -> Iterator[Path]:
    """Yield a path to the folder that is short enough for a socket's address, which has 108 bytes."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _name(nonce: bytes) -> str:
    return f"{_PREFIX}{hashlib.blake2b(nonce, digest_size=8).hexdigest()}{_SUFFIX}"


def _remove_stale(place: Path) -> None:
    """Remove the sockets of producers of this user that have ended."""
    for path in place.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            is_ours = path.is_socket() and path.lstat().st_uid == os.geteuid()
            if is_ours and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


def _is_same_user(other: socket.socket) -> bool:
    """Returns True if the process at the other end, as the kernel knows it, is this process's user."""
    options = (socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(other.getsockopt(*options))[1] == os.geteuid())


def _received(client: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (more := client.recv(nbytes - len(data))):
        data += more
    return data
