"""A raw TCP socket, which is what a transfer between hosts is held against."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from kvconnector.bench.options import TIMEOUT_S
from kvconnector.errors import PeerLostError

_REQUEST = struct.Struct("<Q")
_SOCKET_BUFFER_BYTES = 4 << 20


@contextmanager
def open_stream(address: tuple[str, int], nbytes: int) -> Iterator[Callable[[int], None]]:
    """A function that asks `serve_stream` for at most `nbytes` bytes over TCP, and waits for them in plain memory that
    is touched in this limit's turns only, as a transfer's is. Raises PeerLostError: the other side does not answer.
    """
    target = np.full(nbytes, 2, dtype=np.uint8).data
    try:
        client = socket.create_connection(address, timeout=TIMEOUT_S)
    except OSError as error:
        raise PeerLostError(f"no raw socket: {error}", address=address) from error
    with client:
        _tune(client)
        yield partial(_move, client, target)


def _move(client: socket.socket, target: memoryview, nbytes: int) -> None:
    got = 0
    try:
        client.sendall(_REQUEST.pack(nbytes))
        while got < nbytes:
            count = client.recv_into(target[got:nbytes])
            if not count:
                raise ConnectionError("it was closed early")
            got += count
    except OSError as error:
        raise PeerLostError(f"the raw socket failed: {error}", got=got, wanted=nbytes) from error


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
