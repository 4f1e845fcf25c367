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
- *Work.* A `poll` costs as much as has happened, no matter how many connections there are. It takes messages of all
  connections in turns, so that no peer's keep those of the others waiting.

There is one ROUTER for all incoming connections, and one DEALER for each outgoing one. ZMQ must not reconnect by
itself, because a new engine may have taken the old one's place. For the same reason no side sets an identity.

Losses are noticed at once if a process closes or dies, and after `host_timeout_s` if a host stops answering, through
TCP's keepalive and user timeout. A process that is stopped, or whose threads hang, is not noticed here, since its
kernel answers: the sessions have heartbeats for that. ZMTP's own are off, see `zmq_sockets`. An earlier build that
sends some can still make libzmq abort this process: if a heartbeat follows more messages than are read ahead of a
`poll`, in the same few kilobytes, and the connection is reset before that `poll`. Reading ahead without a bound would
avoid that, but let one peer fill the memory. libzmq has no option to ignore heartbeats or to read one message at a
time, and a ROUTER cannot leave one peer's messages unread.

An accepted connection that never sent a message has no handle, so its loss is not reported. Each channel has a ZMQ
context and I/O thread of its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from contextlib import ExitStack
from functools import partial

import zmq

from kvconnector.agenda import Agenda
from kvconnector.control.address import HostPort, parse_address, parse_bind
from kvconnector.control.base import ControlEvent, ControlLimits, MessageTooLargeError, PeerHandle
from kvconnector.control.security import CurveKeys, Security, check_key
from kvconnector.control.waker import Descriptors, Waker
from kvconnector.control.zmq_incoming import IncomingConnections
from kvconnector.control.zmq_outgoing import OutgoingConnection
from kvconnector.control.zmq_sockets import cannot_open, milliseconds
from kvconnector.errors import ConfigError, PeerLostError, TransportError

NUM_DESCRIPTORS = 16
"""More than a channel needs before its first connection."""
MAX_SOCKETS = 1 << 14
"""Three sockets per outgoing connection. File descriptors, of which a connection takes five, run out first."""
_INCOMING = PeerHandle(0)
"""Stands for all connections that peers opened, in the tables of those that have something to read."""


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
        TransportError: no descriptor is free.
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
        _check_descriptors(bind)
        self.security = security
        self.max_message_bytes = limits.max_message_bytes
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
        self._unsettled: dict[PeerHandle, None] = {}
        """Connections at which `poll` must look, whatever their descriptors show."""
        self._have_sent: dict[PeerHandle, None] = {}
        """Connections that have sent since: a socket's descriptor does not show messages that came meanwhile."""
        self._owners: dict[int, PeerHandle] = {}
        """The connection whose socket each descriptor belongs to."""
        self._looked_up: deque[PeerHandle] = deque()
        """Connections whose host was looked up. The look-up's thread appends, and wakes `poll`."""
        self._deadlines: Agenda[OutgoingConnection] = Agenda()
        self._waker = Waker()
        self._descriptors = Descriptors()
        self.fd = self._descriptors.fd
        """A descriptor that becomes readable when something happens after the channel `is_settled`."""
        self._descriptors.add(self._waker.fileno())
        self._watch(_INCOMING, self._incoming.socket)
        self._watch(_INCOMING, self._incoming.monitor.socket)
        if self._incoming.authorizer is not None:
            self._watch(_INCOMING, self._incoming.authorizer.socket)

    @property
    def is_settled(self) -> bool:
        """Returns True if nothing waits for `poll` that `fd` would not show."""
        return not (self._unsettled or self._have_sent)

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
                raise ConfigError("this channel uses keys, but the peer gave none", address=address)
            check_key(server_key, "the peer's server key")
        elif server_key:
            raise ConfigError(
                "the peer uses keys, but this channel has none: configure the deployment's keys here",
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
            wake=partial(self._note_looked_up, handle),
        )
        self._outgoing[handle] = connection
        self._plan(connection)
        self._watch(handle, connection.socket)
        self._watch(handle, connection.monitor.socket)
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
        if (connection := self._outgoing.get(handle)) is not None:
            self._have_sent[handle] = None
            connection.send(payload)
        elif handle in self._incoming:
            self._have_sent[_INCOMING] = None
            self._incoming.send(handle, payload)
        else:
            raise PeerLostError("connection is gone", handle=handle)

    def peer_of(self, handle: PeerHandle) -> str:
        """Return the address of a connection's peer, for texts: only its host if the peer opened the connection."""
        connection = self._outgoing.get(handle)
        return self._incoming.peer_of(handle) if connection is None else connection.address

    def origin_of(self, handle: PeerHandle) -> str:
        """Return who opened a connection, as far as this channel knows: the peer's public key or, without keys, the
        address of its host; "" if it was not the peer.
        """
        return self._incoming.origin_of(handle)

    def disconnect(self, handle: PeerHandle) -> None:
        """End a connection; `handle` is not valid afterwards. Idempotent, never blocks.

        Messages sent before still go out, for at most `linger_s`. The peer notices the end of a connection that this
        side opened. One that the peer opened is only ignored from now on: send a goodbye first, and let the peer close.
        """
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
        self._check_open()
        self._find_unsettled(timeout_s)
        events: list[ControlEvent] = []
        looked_at, self._unsettled = self._unsettled, {}
        now = time.monotonic()
        for handle in looked_at:
            if handle == _INCOMING:
                events += self._incoming.receive()
                if not self._incoming.is_settled:
                    self._unsettled[handle] = None
            elif handle in self._outgoing:
                events += self._receive(self._outgoing[handle], now)
        return events

    def _find_unsettled(self, timeout_s: float) -> None:
        """Wait until something happens, and add the connections at which it may have happened."""
        for fd in self._descriptors.wait(milliseconds(self._wait_s(timeout_s))):
            if fd == self._waker.fileno():
                self._waker.clear()
            else:
                self._unsettled[self._owners[fd]] = None
        for handle in self._have_sent:
            side = self._incoming if handle == _INCOMING else self._outgoing[handle]
            if side.has_ended or _is_readable(side.socket):
                self._unsettled[handle] = None
        self._have_sent.clear()
        while self._looked_up:
            self._unsettled[self._looked_up.popleft()] = None
        now = time.monotonic()
        while self._deadlines.next_deadline() <= now:
            self._unsettled |= dict.fromkeys([each.handle for each in self._deadlines.due(now)])

    def _receive(self, connection: OutgoingConnection, now: float) -> list[ControlEvent]:
        """Return what has happened on a connection, and forget it if that was its end."""
        events = connection.receive(now)
        if connection.finished:
            self._drop(connection.handle, linger_ms=0)
            return events
        if not connection.is_settled:
            self._unsettled[connection.handle] = None
        self._plan(connection)
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

    def _note_looked_up(self, handle: PeerHandle) -> None:
        """Let `poll` look at a connection whose host name was looked up. Called by the look-up's thread."""
        self._looked_up.append(handle)
        self.wake()

    def _plan(self, connection: OutgoingConnection) -> None:
        """Look at a connection at its deadline, if it has one."""
        if connection.deadline is None:
            self._deadlines.forget(connection)
        else:
            self._deadlines.plan(connection, connection.deadline)

    def _watch(self, owner: PeerHandle, socket: zmq.Socket[bytes]) -> None:
        """Look at a socket in the next `poll`, and then whenever its descriptor is readable."""
        fd = int(socket.getsockopt(zmq.FD))
        self._owners[fd] = owner
        self._descriptors.add(fd)
        self._unsettled[owner] = None

    def _drop(self, handle: PeerHandle, linger_ms: int) -> None:
        connection = self._outgoing.pop(handle)
        self._unsettled.pop(handle, None)
        self._have_sent.pop(handle, None)
        self._deadlines.forget(connection)
        for socket in (connection.socket, connection.monitor.socket):
            fd = int(socket.getsockopt(zmq.FD))
            self._descriptors.remove(fd)
            del self._owners[fd]
        connection.close(linger_ms)

    def _wait_s(self, timeout_s: float) -> float:
        """Return how long to wait: not past a connect deadline, and not at all if something may be there already."""
        if not (timeout_s and self.is_settled):
            return 0.0
        return min(timeout_s, max(0.0, self._deadlines.next_deadline() - time.monotonic()))


def _check_descriptors(bind: HostPort) -> None:
    """Raise TransportError if the process may not open as many files as a channel needs: libzmq would abort it."""
    with ExitStack() as opened:
        try:
            for _ in range(NUM_DESCRIPTORS):
                opened.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
        except OSError as error:
            raise cannot_open("a control channel", error, address=str(bind)) from error


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Returns True if a message is there. Otherwise one that comes later makes the socket's descriptor readable."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
