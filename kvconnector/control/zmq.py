"""The control channel: small messages between workers over ZMQ, with connection loss reported as an event.

It never retries, never reconnects and never interprets a payload.

- *Connections.* `connect` opens one and names it with a `PeerHandle`. The accepting side learns of it with the first
  message that arrives on it, under a handle of its own, and answers on that. No channel uses a handle twice.
- *Order.* Messages of one connection arrive in the order they were sent, each at most once. Those under way when a
  connection breaks may be lost.
- *Loss.* A connection ends for good when the peer closes it or dies, the handshake fails, a queue overflows, or the
  peer breaks the protocol. The end is reported as one `Disconnected`, after every message that had arrived; no event
  carries the handle afterwards. A connection that this side ended with `disconnect` is not reported.
- *Size.* A payload longer than `ControlLimits.max_message_bytes` is refused when it is sent, and a peer that sends one
  loses the connection, so that no peer can make this side allocate more.
- *Threads.* One thread at a time calls everything on a channel, except `wake`, which any thread may call.
- *Waits.* Only `poll` waits, at most its `timeout_s`; `close` waits at most `linger_s`.

There is one ROUTER for all incoming connections, and one DEALER for each outgoing one. ZMQ must not reconnect by
itself, because a new engine may have taken the old one's place. For the same reason no side sets an identity.

Losses are noticed at once if a process closes or dies, and after `heartbeat_timeout_s` if a host stops answering,
through ZMTP heartbeats that libzmq's own thread sends and answers without the GIL. An accepted connection that never
sent a message has no handle, so its loss is not reported. Each channel has a ZMQ context and I/O thread of its own.
"""

from __future__ import annotations

import itertools
import math
import time

import zmq

from kvconnector.control import libzmq
from kvconnector.control.address import HostPort, parse_address, parse_bind
from kvconnector.control.base import ControlEvent, ControlLimits, MessageTooLargeError, PeerHandle
from kvconnector.control.security import CurveKeys, Security, check_key
from kvconnector.control.waker import Descriptors, Waker
from kvconnector.control.zmq_incoming import IncomingConnections
from kvconnector.control.zmq_outgoing import OutgoingConnection
from kvconnector.control.zmq_sockets import milliseconds
from kvconnector.errors import ConfigError, PeerLostError, TransportError

MAX_SOCKETS = 1 << 14
"""Three sockets per outgoing connection. File descriptors, of which a connection takes five, run out first."""


class ControlChannel:
    """One worker's, or one directory service's, end of the control channel. The module's docstring is the contract.

    Args:
        bind_host: Where to listen, see `parse_bind`.
        bind_port: The port; 0 takes a free one.
        advertise_host: The host that peers connect to; None for `bind_host`.
        security: The keys; None runs without any.
        limits: Bounds on memory and time.

    Raises:
        ConfigError: a malformed or contradicting address, or the port cannot be bound.
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
        self.security = security
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
        self.address = str(HostPort(advertised, self._incoming.port))
        """`tcp://host:port` that peers connect to; the real port where port 0 was bound."""
        self.is_settled = False
        """Nothing waits for `poll` that `fd` would not show."""
        self._first_deadline = math.inf
        self._waker = Waker()
        self._poller = libzmq.Poller(self._waker.fileno())
        self._descriptors = Descriptors()
        self.fd = self._descriptors.fd
        """A descriptor that becomes readable when something happens after the channel `is_settled`."""
        self._descriptors.add(self._waker.fileno())
        self._watch(self._incoming.socket)
        self._watch(self._incoming.monitor.socket)
        if self._incoming.authorizer is not None:
            self._watch(self._incoming.authorizer.socket)

    @property
    def server_key(self) -> str:
        """Public key that peers pass to `connect` with `address`; "" for a channel without keys."""
        return self.security.public_key if isinstance(self.security, CurveKeys) else ""

    def connect(self, address: str, server_key: str = "") -> PeerHandle:
        """Open a connection without waiting for it; messages may be sent on the handle at once. Failures arrive as
        `Disconnected`: `PeerUnreachableError` if nobody answers within `connect_timeout_s`, `AuthenticationError` if
        the keys do not fit, `RemoteProtocolError` if something else listens, `PeerLostError` if the peer leaves
        meanwhile.

        Raises:
            ConfigError: the address or the key is malformed, or only one side uses keys.
            TransportError: the channel is closed, or no descriptor is free.
        """
        self._check_open()
        target = parse_address(address)
        if isinstance(self.security, CurveKeys):
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
            security=self.security,
            limits=self._limits,
            now=time.monotonic(),
            wake=self.wake,
        )
        self._outgoing[handle] = connection
        if connection.deadline is not None:
            self._first_deadline = min(self._first_deadline, connection.deadline)
        self._watch(connection.socket)
        self._watch(connection.monitor.socket)
        return handle

    def send(self, handle: PeerHandle, payload: bytes) -> None:
        """Queue one message; never blocks.

        Raises:
            MessageTooLargeError: Nothing was sent.
            PeerLostError: The handle is gone, or its queue is full, which ends the connection.
            RemoteError: The connection has ended for another reason.
        """
        if len(payload) > self._limits.max_message_bytes:
            raise MessageTooLargeError.of(payload, self._limits.max_message_bytes)
        # messages that arrive while a socket sends do not make its descriptor readable
        self.is_settled = False
        if (connection := self._outgoing.get(handle)) is not None:
            connection.send(payload)
        elif handle in self._incoming:
            self._incoming.send(handle, payload)
        else:
            raise PeerLostError("connection is gone", handle=handle)

    def peer_of(self, handle: PeerHandle) -> str:
        """Return the address of a connection's peer, for texts: only its host if the peer opened the connection."""
        connection = self._outgoing.get(handle)
        return self._incoming.peer_of(handle) if connection is None else connection.address

    def disconnect(self, handle: PeerHandle) -> None:
        """End a connection; `handle` is not valid afterwards. Idempotent, never blocks.

        Messages sent before still go out, for at most `linger_s`. The peer notices the end of a connection that this
        side opened. One that the peer opened is only ignored from now on: send a goodbye first, and let the peer close.
        """
        self.is_settled = False
        if handle in self._outgoing:
            self._drop(handle, milliseconds(self._limits.linger_s))
        elif handle in self._incoming:
            self._incoming.forget(handle)

    def poll(self, timeout_s: float) -> list[ControlEvent]:
        """Wait until something happens, or `wake` is called; `timeout_s` bounds the wait. Returns the events.

        It may also return early with nothing, and takes at most `max_messages_per_turn` messages from each source; the
        next call returns the rest at once.

        Raises:
            TransportError: the channel is closed.
        """
        if timeout_s == 0.0 and self.is_settled and not self._closed:
            is_due = self._incoming.ending or self._descriptors.is_any_readable()
            if not is_due and time.monotonic() < self._first_deadline:
                return []
        self._check_open()
        ready, is_woken = self._poller.poll(milliseconds(self._wait_s(timeout_s)))
        self.is_settled = not ready
        if is_woken:
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
                self.is_settled = False  # it may connect and send only now
                events += connection.receive(now)
                if connection.finished:
                    self._drop(connection.handle, linger_ms=0)
        deadlines = [c.deadline for c in self._outgoing.values() if c.deadline is not None]
        self._first_deadline = min(deadlines, default=math.inf)
        return events

    def wake(self) -> None:
        """Make the current `poll`, or the next one, return at once. Any thread may call it, also after `close`."""
        self._waker.wake()

    def close(self) -> None:
        """End every connection and release every resource. Idempotent; waits at most `linger_s`."""
        if self._closed:
            return
        self._closed = True
        linger_ms = milliseconds(self._limits.linger_s)
        for handle in list(self._outgoing):
            self._drop(handle, linger_ms)
        self._incoming.close(linger_ms)
        self._descriptors.close()
        self._waker.close()
        self._context.term()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("control channel is closed", address=self.address)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        """Poll a socket from now on. Its descriptor does not show messages that came before."""
        self._poller.register(socket)
        self._descriptors.add(int(socket.getsockopt(zmq.FD)))
        self.is_settled = False

    def _drop(self, handle: PeerHandle, linger_ms: int) -> None:
        connection = self._outgoing.pop(handle)
        for socket in (connection.socket, connection.monitor.socket):
            self._poller.unregister(socket)
            self._descriptors.remove(int(socket.getsockopt(zmq.FD)))
        connection.close(linger_ms)

    def _wait_s(self, timeout_s: float) -> float:
        """Return how long to wait: not past a connect deadline, and not at all if a loss is still to be reported."""
        if self._incoming.ending or any(each.error for each in self._outgoing.values()):
            return 0.0
        return min(timeout_s, max(0.0, self._first_deadline - time.monotonic()))
