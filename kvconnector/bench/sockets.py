"""A raw TCP socket, which is what a transfer between hosts is held against."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

import numpy as np

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.options import TIMEOUT_S
from kvconnector.errors import PeerLostError

_REQUEST = struct.Struct("<Q")
_SOCKET_BUFFER_BYTES = 4 << 20


class SocketStream:
    """Asks `serve_stream` for bytes over TCP, into plain memory that is touched in this limit's turns only, as a
    transfer's is. Raises PeerLostError: nobody listens there.
    """

    def __init__(self, address: tuple[str, int], nbytes: int) -> None:
        self.target = np.full(nbytes, 2, dtype=np.uint8)
        try:
            self._client = socket.create_connection(address, timeout=TIMEOUT_S)
        except OSError as error:
            raise PeerLostError(f"no raw socket: {error}", address=address) from error
        _tune(self._client)

    def __enter__(self) -> SocketStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def move(self, nbytes: int) -> None:
        """One request. Raises PeerLostError if the answer ends early."""
        got = 0
        target = self.target.data
        try:
            self._client.sendall(_REQUEST.pack(nbytes))
            while got < nbytes:
                count = self._client.recv_into(target[got:nbytes])
                if not count:
                    raise PeerLostError("the socket was closed early", got=got, wanted=nbytes)
                got += count
        except OSError as error:
            raise PeerLostError(f"the socket failed: {error}", got=got, wanted=nbytes) from error

    def verify(self, nbytes: int) -> None:
        """One request. Raises ResultMismatchError if other bytes come than are sent."""
        self.target[:] = 2
        self.move(nbytes)
        if not ((self.target[:nbytes] == 1).all() and (self.target[nbytes:] == 2).all()):
            raise ResultMismatchError("the raw socket brought other bytes")


def serve_stream(host: str, nbytes: int) -> int:
    """Answer one client with up to `nbytes` until it leaves, in a thread: the port. An error closes the connection."""
    listener = socket.create_server((host, 0))
    threading.Thread(target=_serve, args=(listener, nbytes), daemon=True).start()
    return int(listener.getsockname()[1])


def _serve(listener: socket.socket, nbytes: int) -> None:
    content = memoryview(bytearray(b"\1") * nbytes)
    with suppress(OSError), listener:
        listener.settimeout(TIMEOUT_S)
        connection, _ = listener.accept()
        with connection:
            # of the other contenders' turns, too
            connection.settimeout(10 * TIMEOUT_S)
            _tune(connection)
            while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
                connection.sendall(content[: _REQUEST.unpack(request)[0]])


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
