"""libzmq's calls that do not wait, made without releasing the GIL.

pyzmq releases the GIL in every call. Messages are sent and received by the owner of the driver lock, often an engine's
thread that makes progress inline, while the driver's thread waits for the GIL because the same message woke it. A call
that releases the GIL hands it over there and then to that thread, which cannot have the lock, and has to wake up the
owner again: two switches of threads for a call that takes a microsecond.

Sockets stay pyzmq's: it makes, configures, monitors and closes them, and this module takes their addresses. It loads no
library of its own, but looks the functions up in the one that pyzmq brings. Errors are pyzmq's, too.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import zmq
from zmq.backend.cython import _zmq

_MESSAGE_BYTES = 64
"""`zmq_msg_t`, which zmq.h gives this size."""
_INT_BYTES = ctypes.sizeof(c_int)
_PEER_ADDRESS = b"Peer-Address"
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "zmq_errno": (c_int,),
    "zmq_msg_init": (c_int, c_void_p),
    "zmq_msg_recv": (c_int, c_void_p, c_void_p, c_int),
    "zmq_msg_data": (c_void_p, c_void_p),
    "zmq_msg_size": (c_size_t, c_void_p),
    "zmq_msg_more": (c_int, c_void_p),
    "zmq_msg_get": (c_int, c_void_p, c_int),
    "zmq_msg_gets": (c_char_p, c_void_p, c_char_p),
    "zmq_msg_close": (c_int, c_void_p),
    "zmq_getsockopt": (c_int, c_void_p, c_int, c_void_p, c_void_p),
    "zmq_send": (c_int, c_void_p, c_char_p, c_size_t, c_int),
}


@cache
def _library() -> Any:
    """Return pyzmq's libzmq as a caller sees it that keeps the GIL."""
    library = ctypes.PyDLL(_zmq.__file__)
    for name, (restype, *argtypes) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = restype, argtypes
    return library


def _failed(library: Any) -> zmq.ZMQError:
    number = int(library.zmq_errno())
    return zmq.Again(number) if number == errno.EAGAIN else zmq.ZMQError(number)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that arrived, with what its first frame says of the connection that it came from."""

    frames: list[bytes]
    fd: int
    """The descriptor of that connection; -1 if this libzmq does not say it."""
    address: str | None
    """The peer's IP address; None for a peer that did no handshake."""


def send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Queue a message.

    Raises:
        zmq.Again: The queue is full; nothing was sent.
        zmq.ZMQError: libzmq refuses it; nothing was sent.
    """
    library = _library()
    address, last = socket.underlying, len(frames) - 1
    for index, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0)
        while library.zmq_send(address, frame, len(frame), flags) < 0:
            if (error := _failed(library)).errno != errno.EINTR:
                raise error


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Returns True if a message is there. Otherwise one that comes later makes the socket's descriptor readable.

    Raises:
        zmq.ZMQError: The socket is closed.
    """
    library, events, nbytes = _library(), c_int(), c_size_t(_INT_BYTES)
    while library.zmq_getsockopt(socket.underlying, zmq.EVENTS, byref(events), byref(nbytes)) < 0:
        if (error := _failed(library)).errno != errno.EINTR:
            raise error
    return bool(events.value & zmq.POLLIN)


def receive(socket: zmq.Socket[bytes]) -> Arrival:
    """Return the next message.

    Raises:
        zmq.Again: There is none, and one that comes later makes the socket's descriptor readable.
        zmq.ZMQError: The socket is closed.
    """
    library = _library()
    address = socket.underlying
    part = ctypes.create_string_buffer(_MESSAGE_BYTES)
    library.zmq_msg_init(part)
    frames: list[bytes] = []
    fd, peer = -1, None
    try:
        while True:
            while library.zmq_msg_recv(part, address, zmq.NOBLOCK) < 0:
                if (error := _failed(library)).errno != errno.EINTR:
                    raise error
            if not frames:
                fd = int(library.zmq_msg_get(part, zmq.SRCFD))
                peer = library.zmq_msg_gets(part, _PEER_ADDRESS)
            size = library.zmq_msg_size(part)
            frames.append(ctypes.string_at(library.zmq_msg_data(part), size))
            if not library.zmq_msg_more(part):
                return Arrival(frames, fd, None if peer is None else peer.decode())
    finally:
        library.zmq_msg_close(part)
