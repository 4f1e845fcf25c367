"""All connections that peers opened: one ROUTER socket and its monitor.

A ROUTER names each connection by an identity and does not report when one ends. Its monitor does, but names the file
descriptor. Messages have both: they carry the descriptor they came from. Descriptors are reused, but libzmq reports in
order, and before a descriptor is free again, that a connection was accepted and that it ended. So after a message has
been received and all monitor events have been read, its connection is known.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

import zmq

from kvconnector.control.address import HostPort
from kvconnector.control.base import ControlEvent, ControlLimits, Disconnected, PeerHandle, Received
from kvconnector.control.security import Security
from kvconnector.control.zmq_sockets import (
    Authorizer,
    Monitor,
    cannot_open,
    check_frames,
    configure,
    milliseconds,
    queue_is_full,
)
from kvconnector.errors import (
    ConfigError,
    KVConnectorError,
    PeerLostError,
    RemoteProtocolError,
    TransportError,
)

_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED
# If the peer broke the protocol, libzmq reports the end just before it delivers the last messages. These must not look
# like a new connection, so the latest identities that have ended are remembered.
_MAX_RETIRED = 256


@dataclass(slots=True, eq=False)
class _Peer:
    """One accepted connection that has sent something."""

    handle: PeerHandle
    identity: bytes
    fd: int
    address: str
    key: str
    """Its public key, "" without keys."""
    error: KVConnectorError | None = None
    """The reason why it is over. Set before the end is reported, or when an ignored one is closed."""
    ignored: bool = False
    """True if it is over for the caller. A ROUTER cannot close one connection, so its further messages are dropped."""


class IncomingConnections:
    """The bound ROUTER. New handles come from `handles`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        bind: HostPort,
        security: Security,
        limits: ControlLimits,
        handles: Iterator[PeerHandle],
    ) -> None:
        self._limits = limits
        self._handles = handles
        self._by_handle: dict[PeerHandle, _Peer] = {}
        self._by_identity: dict[bytes, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}
        self._open_fds: set[int] = set()
        self._ending: list[_Peer] = []
        """Connections whose loss `receive` reports once nothing is left to read."""
        self.is_settled = False
        """The last `receive` returned everything that there was."""
        self._retired: deque[bytes] = deque(maxlen=_MAX_RETIRED)
        self.authorizer: Authorizer | None = None
        with ExitStack() as opened:
            try:
                self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
                opened.callback(self.socket.close, linger=0)
                configure(self.socket, limits=limits, security=security, ipv6=":" in bind.host)
                # Messages have any length, so only few are read ahead for each connection: as many as one turn takes
                # from all. The others stay with their sender.
                ahead = min(limits.max_queued_messages, limits.max_messages_per_turn)
                self.socket.setsockopt(zmq.RCVHWM, ahead)
                self.socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(limits.connect_timeout_s))
                self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                # Our peers state no identity. Of two connections with the same one libzmq would otherwise keep the
                # second one's memory, 14 KB with what it has sent, until this socket is closed.
                self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
                if security is not None:
                    self.authorizer = Authorizer(self.socket, security)
                    opened.callback(self.authorizer.close)
                self.monitor = Monitor(self.socket, _EVENTS)
                opened.callback(self.monitor.close)
            except zmq.ZMQError as exc:
                raise cannot_open("a control channel", exc, address=str(bind)) from exc
            try:
                self.socket.bind(str(bind))
            except zmq.ZMQError as exc:
                raise ConfigError(
                    f"cannot listen for control connections: {exc}", address=str(bind)
                ) from exc
            opened.pop_all()

    @property
    def port(self) -> int:
        return int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def has_ended(self) -> bool:
        """Returns True if `receive` has a loss to report, even if no socket is readable."""
        return bool(self._ending)

    def __contains__(self, handle: PeerHandle) -> bool:
        return handle in self._by_handle

    def send(self, handle: PeerHandle, payload: bytes) -> None:
        """Queue a message. Raises PeerLostError, which `receive` reports as well."""
        peer = self._by_handle[handle]
        if peer.error is not None:
            raise PeerLostError("connection is lost", peer=peer.address, cause=str(peer.error))
        try:
            self.socket.send_multipart([peer.identity, payload], zmq.NOBLOCK)
        except zmq.Again as exc:
            peer.error = queue_is_full(peer.address, self._limits)
            self._ending.append(peer)
            raise peer.error from exc
        except zmq.ZMQError as exc:
            if exc.errno == errno.EHOSTUNREACH:
                self._note_closed(peer)
                raise PeerLostError("peer closed the connection", peer=peer.address) from exc
            raise TransportError(f"cannot send: {exc}", peer=peer.address) from exc

    def peer_of(self, handle: PeerHandle) -> str:
        peer = self._by_handle.get(handle)
        return "a lost peer" if peer is None else peer.address

    def origin_of(self, handle: PeerHandle) -> str:
        peer = self._by_handle.get(handle)
        return "" if peer is None else peer.key or peer.address

    def forget(self, handle: PeerHandle) -> None:
        """Drop a handle without a report; ignore further messages of its connection."""
        self._by_handle.pop(handle).ignored = True

    def receive(self) -> list[ControlEvent]:
        """Answer clients that ask if they may connect. Return messages of all connections, in turns, then the losses
        of those that have nothing left to read. While there are more connections that came or went than a turn has
        messages, nothing else is read: whose a message is can only be told after them.
        """
        limit, authorizer = self._limits.max_messages_per_turn, self.authorizer
        is_answered = authorizer is None or authorizer.answer(limit)
        self.is_settled = False
        if self._read_monitor(limit) == limit:
            return []
        events: list[ControlEvent] = []
        try:
            for _ in range(limit):
                self._receive_one(events)
        except zmq.Again:
            events += self._settle()
            self.is_settled = is_answered
        return events

    def close(self, linger_ms: int) -> None:
        """Release the sockets; libzmq goes on sending queued messages for at most `linger_ms`."""
        self._by_handle.clear()
        self.monitor.close()
        self.socket.close(linger=linger_ms)
        if self.authorizer is not None:
            self.authorizer.close()

    def _receive_one(self, events: list[ControlEvent]) -> None:
        first, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        identity = first.bytes
        peer = self._by_identity.get(identity)
        if peer is None:
            has_key = self.authorizer is not None
            if identity in self._retired or (origin := _origin(first, has_key=has_key)) is None:
                return
            peer = self._admit(identity, *origin)
        if peer.ignored:
            return
        try:
            check_frames(frames, peer.address, self._limits)
            events.append(Received(peer.handle, frames[0].bytes))
        except RemoteProtocolError as error:
            events.append(Disconnected(peer.handle, error))
            self.forget(peer.handle)

    def _admit(self, identity: bytes, fd: int, address: str, key: str) -> _Peer:
        """Give a connection a handle, with its first message."""
        peer = _Peer(next(self._handles), identity, fd, address, key)
        self._by_handle[peer.handle] = peer
        self._by_identity[peer.identity] = peer
        self._read_monitor()
        if fd not in self._open_fds:
            self._note_closed(peer)
            return peer
        predecessor = self._by_fd.get(fd)
        self._by_fd[fd] = peer
        if predecessor is not None:
            # both came through the same descriptor, so the earlier connection ended before this one began
            self._note_closed(predecessor)
        return peer

    def _read_monitor(self, limit: int | None = None) -> int:
        """Note which connections came and went, at most `limit` times. Returns how many times."""
        count = 0
        for kind, fd, _ in islice(self.monitor.drain(), limit):
            count += 1
            if kind == zmq.Event.ACCEPTED:
                self._open_fds.add(fd)
                continue
            self._open_fds.discard(fd)
            if fd in self._by_fd:
                self._note_closed(self._by_fd.pop(fd))
        return count

    def _note_closed(self, peer: _Peer) -> None:
        """Settle the loss once nothing is left to read."""
        peer.error = peer.error or PeerLostError(
            "peer closed the connection or stopped answering", peer=peer.address
        )
        if peer not in self._ending:
            self._ending.append(peer)

    def _settle(self) -> list[ControlEvent]:
        """Report losses. Identities are kept, and ignored, as long as messages may still have them."""
        events: list[ControlEvent] = []
        for peer in self._ending:
            if peer.error is not None and not peer.ignored:
                events.append(Disconnected(peer.handle, peer.error))
                self.forget(peer.handle)
            if self._by_fd.get(peer.fd) is not peer:
                del self._by_identity[peer.identity]
                self._retired.append(peer.identity)
        self._ending.clear()
        return events


def _origin(frame: zmq.Frame, *, has_key: bool) -> tuple[int, str, str] | None:
    """Return the file descriptor, the IP address and the public key of the connection that a frame came from; None for
    a peer that did no handshake, since libzmq takes arbitrary bytes for its oldest protocol, which has none.

    Only a peer that was asked for its key has one. Otherwise it may state any `User-Id` itself, also one that is no
    text.
    """
    try:
        address = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return None
    key = str(frame.get("User-Id")) if has_key else ""
    fd = int(frame.get(zmq.SRCFD))
    if fd < 0:
        raise TransportError(
            "this libzmq does not say which connection a message came from",
            libzmq=zmq.zmq_version(),
        )
    return fd, address, key
