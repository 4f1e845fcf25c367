"""A worker's memory for consumers on its node: descriptors, through a socket.

*Purpose.* /proc/PID/fd leads to another process's memory only within one pid namespace, and each pod has its own. But
pods of a node can share a volume. A socket file in it joins them whatever their namespaces, and carries open
descriptors: of the memory, and of the producer's statm in /proc, which shows that the producer lives. So the memory is
the same as without containers, sealed and without a name: nothing in the volume needs a size, and the memory is freed
when the producer ends, however it ends. Only an empty socket file may be left, which the next producer removes.

CUDA memory that was mapped segment by segment has no other way, also within one pid namespace: its descriptors cannot
be opened through /proc. Without a shared folder the socket has no name, and consumers reach it as a descriptor of the
producer in /proc. They ask for a few segments at a time, each time on a connection of its own: no descriptor stays open
on either side, thousands of segments need no raised limit, and consumers that map at the same time do not wait for each
other's drivers. Each answer is as new as its question: the producer exports the segments when it is asked.

*Access.* Both ends ask the kernel for the other's user, which must be their own. The consumer sends the nonce from its
greeting; the socket's name is a digest of the nonce, which does not reveal it.

*Threads.* A thread of the producer waits in accept(2) and serves one consumer after the other. The consumer asks in its
driver's thread, in the greeting. *Deadlines.* `LIMIT_S` for each message, on both sides, however slowly it comes. The
CUDA driver has none: `close` waits `CLOSE_LIMIT_S`, or for as long as it may, then leaves the thread to it, which ends
once the driver returns.
*Failures.* If answering a consumer raises anything, the thread serves the next one.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from kvconnector.agenda import NEVER
from kvconnector.errors import ConfigError, KVConnectorError, PeerLostError, TransportError
from kvconnector.wire.export import FABRIC_HANDLE_BYTES, NONCE_BYTES

logger = logging.getLogger(__name__)

LIMIT_S = 1.0
CLOSE_LIMIT_S = 4 * LIMIT_S
"""More than serving one consumer takes: two messages, an answer, and a moment without free descriptors."""
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 1024
_CLOSED = (errno.EINVAL, errno.EBADF)
_PREFIX, _SUFFIX = "kvconnector-", ".sock"
MAX_ASKED = 64
"""Most segments of one question; a message carries at most 253 descriptors. More would keep the GIL of a busy engine
for too long, since the driver takes 0.16 ms for each, fewer would make a greeting longer: each question needs the GIL.
"""
_QUESTION = struct.Struct("<QII")
"""The epoch, the first segment's number, how many."""
_ANSWER = struct.Struct(f"<c{FABRIC_HANDLE_BYTES}s")
"""For each segment its kind, and the fabric handle if it is one. A refusal is one answer alone, with the reason."""
_IS_DESCRIPTOR, _IS_FABRIC, _IS_REFUSAL = b"d", b"f", b"!"

Segments: TypeAlias = Callable[[range], list[int | bytes]]
"""Returns handles of segments by their numbers, descriptors or fabric handles. Raises KVConnectorError."""


class DescriptorServer:
    """Sends the descriptor `fd` and one of /proc/self/statm to every process of this user that knows `nonce`, until
    `close`: through a socket in `folder`, or if that is empty, one that is descriptor `socket_fd` of this process. It
    also sends handles of CUDA memory while it has `segments`: their epoch, and what exports them.

    Raises:
        ConfigError: there is no such folder, or this process may not write it.
        TransportError: no folder is named, and there is none for temporary files.
    """

    def __init__(self, folder: str, fd: int, nonce: bytes) -> None:
        self._folder, self._fd, self._nonce = folder, fd, nonce
        self.segments: tuple[int, Segments] | None = None
        self.socket_fd = -1
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            if folder:
                self._listen_in(folder)
            else:
                self._listen_unnamed()
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="kvconnector-memory", daemon=True)
        self._thread.start()

    def close(self, until_s: float = NEVER) -> None:
        """Give the descriptors to no further process. Waits for the present one, until `until_s` at the latest."""
        if self._folder:
            with suppress(OSError), _opened(self._folder) as place:
                (place / _name(self._nonce)).unlink()
        else:
            os.close(self.socket_fd)
        self._listener.shutdown(socket.SHUT_RDWR)  # accept(2) returns
        limit_s = max(0.0, min(CLOSE_LIMIT_S, until_s - time.monotonic()))
        self._thread.join(limit_s)
        if self._thread.is_alive():
            logger.warning(
                "a consumer's question for GPU memory is still being answered after %.1f s, as if the CUDA driver did"
                " not return. Nobody waits for it",
                limit_s,
            )
        self._listener.close()

    def _listen_in(self, folder: str) -> None:
        try:
            with _opened(folder) as place:
                _remove_stale(place)
                # it must not look stale before it listens
                unfinished = place / f"{_PREFIX}{secrets.token_hex(8)}"
                self._listen_at(str(unfinished))
                unfinished.rename(place / _name(self._nonce))
        except OSError as error:
            raise ConfigError(
                "paths.shared_folder must be a folder that this process may write: a volume that both pods mount",
                folder=folder,
                reason=str(error),
            ) from error

    def _listen_unnamed(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, _opened(folder) as place:
                self._listen_at(str(place / "socket"))
                self.socket_fd = os.open(place / "socket", os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(
                "no folder for temporary files can be written (TMPDIR), and paths.shared_folder is not set",
                reason=str(error),
            ) from error

    def _listen_at(self, path: str) -> None:
        os.fchmod(self._listener.fileno(), 0o600)
        self._listener.bind(path)
        self._listener.listen(_BACKLOG)

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
                self._serve_one(client)

    def _serve_one(self, client: socket.socket) -> None:
        key = _received(client, NONCE_BYTES)
        if key == self._nonce and _is_same_user(client):
            with open("/proc/self/statm", "rb") as statm:
                socket.send_fds(client, [b"!"], [self._fd, statm.fileno()])
        elif key == _segments_key(self._nonce) and _is_same_user(client):
            self._answer(client, _received(client, _QUESTION.size))

    def _answer(self, client: socket.socket, question: bytes) -> None:
        if len(question) < _QUESTION.size:
            return
        epoch, first, count = _QUESTION.unpack(question)
        handles: list[int | bytes] = []
        segments = self.segments  # looked up once: the driver's thread may withdraw them meanwhile
        try:
            if segments is None or segments[0] != epoch:
                raise TransportError("this memory has been withdrawn")
            if count > MAX_ASKED:
                raise TransportError("the request names too many segments")
            handles = segments[1](range(first, first + count))
            answers = [
                _ANSWER.pack(*((_IS_FABRIC, h) if isinstance(h, bytes) else (_IS_DESCRIPTOR, b"")))
                for h in handles
            ]
            fds = [handle for handle in handles if isinstance(handle, int)]
            socket.send_fds(client, [b"".join(answers)], fds)
        except KVConnectorError as error:
            reason = error.message.encode("ascii", "replace")[:FABRIC_HANDLE_BYTES]
            client.sendall(_ANSWER.pack(_IS_REFUSAL, reason))
        except OSError:
            raise  # the consumer is gone, or no descriptor is free
        except Exception:
            logger.exception("a consumer's request for GPU memory failed, and was refused")
            client.sendall(_ANSWER.pack(_IS_REFUSAL, b"an unexpected error, see its log"))
        finally:
            close_handles(handles)


def fetch_descriptors(folder: str, nonce: bytes, count: int) -> list[int]:
    """Fetch the first `count` descriptors of a producer that has this `nonce`: of its memory, of its statm. The caller
    closes them.

    Raises:
        TransportError: no producer has such a socket in this folder, it belongs to another user, or does not answer.
        PeerLostError: the producer has ended.
    """
    with _connected(folder, nonce) as server:
        server.sendall(nonce)
        _, fds, _, _ = socket.recv_fds(server, 1, count, socket.MSG_CMSG_CLOEXEC)
    if len(fds) < count:
        close_handles(fds)
        raise TransportError(
            "the producer does not share its memory with any process here", folder=folder
        )
    return fds


def fetch_segments(place: str, nonce: bytes, epoch: int, which: range) -> list[int | bytes]:
    """Fetch handles of a producer's segments.

    Args:
        place: The shared folder, or if that is not used the producer's `socket_fd` in /proc.
        nonce: The producer's.
        epoch: Of the export that names the segments.
        which: Their numbers, at most `MAX_ASKED`.

    Returns:
        A descriptor, which the caller closes, or a fabric handle of each.

    Raises:
        TransportError: As for `fetch_descriptors`; or the producer refuses, as when it has withdrawn its memory.
        PeerLostError: The producer has ended.
    """
    answers, fds = b"", list[int]()
    most_bytes, until_s = len(which) * _ANSWER.size, time.monotonic() + LIMIT_S
    try:
        with _connected(place, nonce) as server:
            server.sendall(_segments_key(nonce) + _QUESTION.pack(epoch, which.start, len(which)))
            while len(answers) <= most_bytes and len(fds) <= len(which):
                _set_timeout(server, until_s)
                data, more, _, _ = socket.recv_fds(
                    server, len(which) * _ANSWER.size, len(which), socket.MSG_CMSG_CLOEXEC
                )
                fds += more
                if not data:
                    break
                answers += data
        return _handles_of(answers, fds, len(which))
    except BaseException:
        close_handles(fds)
        raise


def _handles_of(answers: bytes, fds: list[int], count: int) -> list[int | bytes]:
    """Return the handles of an answer. Raises TransportError: it is a refusal, or does not have one for each."""
    found = [*_ANSWER.iter_unpack(answers[: len(answers) // _ANSWER.size * _ANSWER.size])]
    if found and found[0][0] == _IS_REFUSAL:
        reason = found[0][1].rstrip(bytes(1)).decode("ascii", "replace")
        raise TransportError("the producer does not share its GPU memory", reason=reason)
    num_fds = sum(kind == _IS_DESCRIPTOR for kind, _ in found)
    if len(found) != count or num_fds != len(fds):
        raise TransportError(
            "the producer answered with other handles than it was asked for",
            asked=count,
            handles=len(found),
            descriptors=len(fds),
        )
    left = iter(fds)
    return [next(left) if kind == _IS_DESCRIPTOR else handle for kind, handle in found]


def close_handles(handles: Sequence[int | bytes]) -> None:
    """Close those that are descriptors."""
    for handle in handles:
        if isinstance(handle, int):
            os.close(handle)


def _segments_key(nonce: bytes) -> bytes:
    """Return what a consumer sends in place of the nonce if it asks for segments."""
    return hashlib.blake2b(nonce, digest_size=NONCE_BYTES, person=b"segments").digest()


@contextmanager
def _connected(place: str, nonce: bytes) -> Iterator[socket.socket]:
    """Yield a connection to a producer of this user, by its folder or by its socket itself. See `fetch_segments`."""
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(LIMIT_S)
            if place.startswith("/proc/"):
                server.connect(place)
            else:
                with _opened(place) as folder:
                    server.connect(str(folder / _name(nonce)))
            if not _is_same_user(server):
                raise TransportError(
                    "the producer's memory belongs to another user: run both engines as the same user",
                    folder=place,
                )
            yield server
    except FileNotFoundError as error:
        if place.startswith("/proc/"):
            raise PeerLostError("the producer's process is gone", place=place) from error
        raise TransportError(
            "the producer has no socket in paths.shared_folder: it is on another node, or does not mount the"
            " same volume",
            folder=place,
        ) from error
    except ConnectionRefusedError as error:
        raise PeerLostError("the producer's process is gone", folder=place) from error
    except OSError as error:
        raise TransportError(
            "the producer's socket does not give out its memory",
            folder=place,
            reason=str(error),
        ) from error


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
    """Return a message, or less of it if that is all. Raises TimeoutError: it has not come within `LIMIT_S`."""
    data, until_s = b"", time.monotonic() + LIMIT_S
    while len(data) < nbytes:
        _set_timeout(client, until_s)
        more = client.recv(nbytes - len(data))
        if not more:
            break
        data += more
    client.settimeout(LIMIT_S)
    return data


def _set_timeout(connection: socket.socket, until_s: float) -> None:
    """Let the next call on a socket wait until `until_s`. Raises TimeoutError: that is over."""
    left_s = until_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError("timed out")
    connection.settimeout(left_s)
