"""The control channel over ZMQ: one ROUTER for all incoming connections, one DEALER for each outgoing one.

ZMQ must not reconnect by itself, because a new engine may have taken the old one's place. For the same reason no side
sets an identity.

Losses are seen at once where a process closes or dies, and after `heartbeat_timeout_s` where a host stops answering, by
ZMTP heartbeats that libzmq's own thread sends and answers without the GIL. An accepted connection that never sent a
message has no handle, so its loss is not reported. Each channel has a ZMQ context and I/O thread of its own.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import zmq

from kvconnector.control.address import HostPort, parse_address, parse_bind
from kvconnector.control.base import ControlEvent, ControlLimits, PeerHandle, check_payload
from kvconnector.control.security import CurveKeys, Security, check_key
from kvconnector.control.waker import Descriptors, Waker
from kvconnector.control.zmq_incoming import IncomingConnections
from kvconnector.control.zmq_outgoing import OutgoingConnection
from kvconnector.control.zmq_sockets import milliseconds
from kvconnector.errors import ConfigError, PeerLostError, TransportError

MAX_SOCKETS = 1 << 14
"""Three for each outgoing connection. File descriptors, of which one takes five, are the limit that is met first."""


class ZmqControlChannel:
    """A `ControlChannel` over TCP. The contract is in `kvconnector.control.base`.

    `bind_host`, `bind_port` and `advertise_host` as for `parse_bind`. Raises ConfigError: a malformed or contradicting
    address, or the port cannot be bound.
    """

    def __init__(
        self,
        *,
        bind_host: str,
        bind_port: int,
        advertise_host: str | None,
        security: Security,
        limits: ControlLimits,
    ) -> None:
        bind, advertised = parse_bind(bind_host, bind_port, advertise_host)
        self._security = security
        self._limits = limits
        self._handles = map(PeerHandle, itertools.count(1))
        self._outgoing: dict[PeerHandle, OutgoingConnection] = {}
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        # libzmq's default allows 340 connections, which is fewer producer ranks than a large cluster has
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        try:
            self._incoming = IncomingConnections(
                self._context, bind=bind, security=security, limits=limits, handles=self._handles
            )
        except BaseException:
            self._context.term()
            raise
        self._address = str(HostPort(advertised, self._incoming.port))
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._descriptors: Descriptors | None = None
        self.is_settled = False
        self._first_deadline = math.inf
        self._poller.register(self._waker.fileno(), zmq.POLLIN)
        for socket in (self._incoming.socket, self._incoming.monitor.socket):
            self._poller.register(socket, zmq.POLLIN)
        if self._incoming.authorizer is not None:
            self._poller.register(self._incoming.authorizer.socket, zmq.POLLIN)

    @property
    def address(self) -> str:
        return self._address

    @property
    def server_key(self) -> str:
        return self._security.public_key if isinstance(self._security, CurveKeys) else ""

    def connect(self, address: str, server_key: str = "") -> PeerHandle:
        self._check_open()
        target = parse_address(address)
        if isinstance(self._security, CurveKeys):
            if not server_key:
                raise ConfigError("this channel uses keys and the peer named none", address=address)
            check_key(server_key, "the peer's server key")
        elif server_key:
            raise ConfigError(
                "the peer uses keys and this channel has none; give it the deployment's keys",
                address=address,
            )
        handle = next(self._handles)
        connection = OutgoingConnection(
            self._context,
            handle=handle,
            target=target,
            server_key=server_key,
            security=self._security,
            limits=self._limits,
            now=time.monotonic(),
        )
        self._outgoing[handle] = connection
        self._forget_descriptors()
        if connection.deadline is not None:
            self._first_deadline = min(self._first_deadline, connection.deadline)
        self._poller.register(connection.socket, zmq.POLLIN)
        self._poller.register(connection.monitor.socket, zmq.POLLIN)
        return handle

    def send(self, handle: PeerHandle, payload: bytes) -> None:
        check_payload(payload, self._limits.max_message_bytes)
        # what arrives while a socket sends does not make its descriptor readable
        self.is_settled = False
        if (connection := self._outgoing.get(handle)) is not None:
            connection.send(payload)
        elif handle in self._incoming:
            self._incoming.send(handle, payload)
        else:
            raise PeerLostError("connection is gone", handle=handle)

    def peer_of(self, handle: PeerHandle) -> str:
        connection = self._outgoing.get(handle)
        return self._incoming.peer_of(handle) if connection is None else connection.address

    def disconnect(self, handle: PeerHandle) -> None:
        self.is_settled = False
        if handle in self._outgoing:
            self._drop(handle, milliseconds(self._limits.linger_s))
        elif handle in self._incoming:
            self._incoming.forget(handle)

    def poll(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> list[ControlEvent]:
        if timeout_s == 0.0 and self.is_settled and not self._closed and not self._is_due():
            return []
        self._check_open()
        wait_s = self._wait_s(timeout_s)
        watched = set(extra_fds)
        for fd in watched:
            self._poller.register(fd, zmq.POLLIN)
        try:
            ready = dict(self._poller.poll(milliseconds(wait_s)))
        finally:
            for fd in watched:
                self._poller.unregister(fd)
        # Sockets that are not ready are not called: every call releases the GIL, which a busy thread may then keep.
        self.is_settled = not (ready.keys() - {self._waker.fileno(), *watched})
        if self._waker.fileno() in ready:
            self._waker.clear()
        incoming, authorizer = self._incoming, self._incoming.authorizer
        if authorizer is not None and authorizer.socket in ready:
            authorizer.answer(self._limits.max_messages_per_turn)
        events: list[ControlEvent] = []
        if incoming.ending or incoming.socket in ready or incoming.monitor.socket in ready:
            events += incoming.receive()
        now = time.monotonic()
        for connection in list(self._outgoing.values()):
            is_ready = connection.socket in ready or connection.monitor.socket in ready
            if is_ready or connection.is_due(now):
                events += connection.receive(now)
                if connection.finished:
                    self._drop(connection.handle, linger_ms=0)
        deadlines = [c.deadline for c in self._outgoing.values() if c.deadline is not None]
        self._first_deadline = min(deadlines, default=math.inf)
        return events

    def filenos(self) -> tuple[int, ...]:
        return (self._watch().fd,)

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        linger_ms = milliseconds(self._limits.linger_s)
        for handle in list(self._outgoing):
            self._drop(handle, linger_ms)
        self._incoming.close(linger_ms)
        self._forget_descriptors()
        self._waker.close()
        self._context.term()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("control channel is closed", address=self._address)

    def _drop(self, handle: PeerHandle, linger_ms: int) -> None:
        connection = self._outgoing.pop(handle)
        self._forget_descriptors()
        self._poller.unregister(connection.socket)
        self._poller.unregister(connection.monitor.socket)
        connection.close(linger_ms)

    def _forget_descriptors(self) -> None:
        self.is_settled = False
        if self._descriptors is not None:
            self._descriptors.close()
            self._descriptors = None

    def _watch(self) -> Descriptors:
        if self._descriptors is None:
            sockets = [socket for socket, _ in self._poller.sockets if not isinstance(socket, int)]
            fds = (int(socket.getsockopt(zmq.FD)) for socket in sockets)
            self._descriptors = Descriptors((self._waker.fileno(), *fds))
            self.is_settled = False
        return self._descriptors

    def _is_due(self) -> bool:
        """Returns True if polling would find anything, in a channel that is settled."""
        if self._incoming.ending or self._watch().is_any_readable():
            return True
        return time.monotonic() >= self._first_deadline

    def _wait_s(self, timeout_s: float) -> float:
        """How long to wait: not past a connect deadline, and not at all for a loss that is still to be reported."""
        if self._incoming.ending or any(each.error for each in self._outgoing.values()):
            return 0.0
        return min(timeout_s, max(0.0, self._first_deadline - time.monotonic()))
