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
from ctypes import c_char_p, c_int, c_short, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import zmq
from zmq.backend.cython import _zmq

_MESSAGE_BYTES = 64
"""`zmq_msg_t`, which zmq.h gives this size."""
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
    "zmq_send": (c_int, c_void_p, c_char_p, c_size_t, c_int),
    "zmq_poll": (c_int, c_void_p, c_int, ctypes.c_long),
}


class _PollItem(ctypes.Structure):
    _fields_ = (("socket", c_void_p), ("fd", c_int), ("events", c_short), ("revents", c_short))


_SHORTS = ctypes.sizeof(_PollItem) // ctypes.sizeof(c_short)
_REVENTS = _PollItem.revents.offset // ctypes.sizeof(c_short)


@cache
def _libraries() -> tuple[Any, Any]:
    """Return pyzmq's libzmq as a caller sees it that releases the GIL, and as one that keeps it."""
    releasing = ctypes.CDLL(_zmq.__file__)
    keeping = ctypes.PyDLL(_zmq.__file__, handle=releasing._handle)
    for library in (releasing, keeping):
        for name, (restype, *argtypes) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = restype, argtypes
    return releasing, keeping


def _failed(keeping: Any) -> zmq.ZMQError:
    number = int(keeping.zmq_errno())
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
    _, keeping = _libraries()
    address, last = socket.underlying, len(frames) - 1
    for index, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0)
        while keeping.zmq_send(address, frame, len(frame), flags) < 0:
            if (error := _failed(keeping)).errno != errno.EINTR:
                raise error


def receive(socket: zmq.Socket[bytes]) -> Arrival:
    """Return the next message.

    Raises:
        zmq.Again: There is none.
        zmq.ZMQError: The socket is closed.
    """
    _, keeping = _libraries()
    address = socket.underlying
    part = ctypes.create_string_buffer(_MESSAGE_BYTES)
    keeping.zmq_msg_init(part)
    frames: list[bytes] = []
    fd, peer = -1, None
    try:
        while True:
            while keeping.zmq_msg_recv(part, address, zmq.NOBLOCK) < 0:
                if (error := _failed(keeping)).errno != errno.EINTR:
                    raise error
            if not frames:
                fd = int(keeping.zmq_msg_get(part, zmq.SRCFD))
                peer = keeping.zmq_msg_gets(part, _PEER_ADDRESS)
            size = keeping.zmq_msg_size(part)
            frames.append(ctypes.string_at(keeping.zmq_msg_data(part), size))
            if not keeping.zmq_msg_more(part):
                return Arrival(frames, fd, None if peer is None else peer.decode())
    finally:
        keeping.zmq_msg_close(part)


class Poller:
    """Sockets and one descriptor, of which `poll` says which are readable. A poll without a wait keeps the GIL."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._sockets: dict[zmq.Socket[bytes], None] = {}
        self._items: Any = None

    def register(self, socket: zmq.Socket[bytes]) -> None:
        """Poll one more."""
        self._sockets[socket] = None
        self._items = None

    def unregister(self, socket: zmq.Socket[bytes]) -> None:
        """Stop polling one, before it is closed."""
        del self._sockets[socket]
        self._items = None

    def poll(self, timeout_ms: int) -> tuple[set[zmq.Socket[bytes]], bool]:
        """Wait until one is readable. Returns the sockets that are, and if the descriptor is; none if the time is over
        or the wait was interrupted.
        """
        if self._items is None:
            descriptor = _PollItem(None, self._fd, zmq.POLLIN, 0)
            sockets = (_PollItem(each.underlying, 0, zmq.POLLIN, 0) for each in self._sockets)
            self._items = (_PollItem * (1 + len(self._sockets)))(descriptor, *sockets)
        releasing, keeping = _libraries()
        library = releasing if timeout_ms else keeping
        if library.zmq_poll(self._items, len(self._items), timeout_ms) <= 0:
            return set(), False
        # all at once: a thousand attributes of C structs take longer than the poll
        shorts = memoryview(self._items).cast("B").cast("h")
        of_fd, *of_sockets = shorts[_REVENTS::_SHORTS].tolist()
        pairs = zip(self._sockets, of_sockets, strict=True)
        return {socket for socket, revents in pairs if revents}, of_fd != 0
