"""One connection that this side opened: a DEALER socket and its monitor."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress

import zmq

from kvconnector.control.address import HostPort
from kvconnector.control.base import ControlEvent, ControlLimits, Disconnected, PeerHandle, Received
from kvconnector.control.lookup import Lookup, is_name
from kvconnector.control.security import CurveKeys, Security
from kvconnector.control.zmq_sockets import (
    Monitor,
    cannot_open,
    check_frames,
    configure,
    queue_is_full,
)
from kvconnector.errors import (
    AuthenticationError,
    KVConnectorError,
    PeerLostError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransportError,
)

_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
)
# libzmq would reconnect after this time, but the connection is closed long before. Switching reconnection off instead
# makes libzmq drop messages that arrived before the loss.
_RECONNECT_NEVER_MS = 24 * 3600 * 1000
_CLOSED_IN_HANDSHAKE = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE
"""A peer that cannot decrypt our handshake closes without a reason, and so does a process that dies."""
PROBE_S = 0.25
SHORT_MESSAGE_BYTES = 64 << 10
"""A message length that no deployment refuses."""


def _missing_route(target: HostPort) -> str:
    """Return the system's error text if it has no route to an address, which libzmq does not report; otherwise "". This
    begins another connection and never blocks, so it finds what is known at once, not that a router or a neighbour is
    silent.
    """
    family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as s:
        cause = s.connect_ex((target.host, target.port))
        return os.strerror(cause) if cause in (errno.ENETUNREACH, errno.EHOSTUNREACH) else ""
    return ""


class _Probe:
    """A plain connection to a peer that closed another one, to see whether its process still listens. Never blocks, and
    does nothing while no descriptor is free. `target` has an IP address.
    """

    def __init__(self, target: HostPort) -> None:
        self._socket: socket.socket | None = None
        family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
        with suppress(OSError):
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._socket.connect_ex((target.host, target.port))

    def result(self) -> type[AuthenticationError | PeerLostError]:
        """Return the error that the peer's end means: a peer that still listens refused our keys."""
        with suppress(OSError):
            if self._socket is not None and self._socket.getpeername():
                return AuthenticationError
        return PeerLostError

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class OutgoingConnection:
    """A DEALER that connects once. It is over as soon as `error` is set; messages that had arrived can still be
    received. After it has returned `Disconnected` it is `finished`, and must be closed.

    A host's name is looked up first, and `wake` is called at its end: libzmq would look it up in the thread that
    serves all connections of the context, and lose them all if no name server answers. Its addresses are tried one
    after the other, each for its share of the time that is left, until one answers. Messages wait meanwhile, for libzmq
    drops those that it has queued for an address when another takes its place.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        handle: PeerHandle,
        target: HostPort,
        server_key: str,
        security: Security,
        limits: ControlLimits,
        now: float,
        wake: Callable[[], None],
    ) -> None:
        self.handle = handle
        self.error: KVConnectorError | None = None
        self.finished = False
        self.is_settled = False
        """The last `receive` returned everything that there was."""
        self.address = str(target)
        self._target = target
        self._probe: _Probe | None = None
        self._longest_bytes = 0
        self._lookup: Lookup | None = None
        self._untried: deque[str] = deque()
        """Addresses of the host's name that are left to try."""
        self._given_up: list[str] = []
        """Endpoints that did not answer."""
        self._unsent: list[bytes] = []
        """Messages that wait for the look-up, or for an address that answers."""
        self._uses_keys = isinstance(security, CurveKeys)
        self._limits = limits
        self._gives_up_at = now + limits.connect_timeout_s
        self.deadline: float | None = self._gives_up_at
        """The end of the present attempt; None once the handshake is done."""
        try:
            self._open(context, security, server_key)
        except zmq.ZMQError as exc:
            raise cannot_open("a control connection", exc, address=self.address) from exc
        if is_name(target.host):
            try:
                self._lookup = Lookup(target.host, wake)
            except TransportError:
                self.close(linger_ms=0)
                raise

    def _open(
        self, context: zmq.Context[zmq.Socket[bytes]], security: Security, server_key: str
    ) -> None:
        with ExitStack() as opened:
            self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            opened.callback(self.socket.close, linger=0)
            configure(self.socket, limits=self._limits, security=security, ipv6=True)
            # The deadline is ours: libzmq's own would look like a handshake that the peer refused.
            self.socket.setsockopt(zmq.HANDSHAKE_IVL, 0)
            self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_NEVER_MS)
            if self._uses_keys:
                self.socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode("ascii"))
            self.monitor = Monitor(self.socket, _EVENTS)
            opened.callback(self.monitor.close)
            if not is_name(self._target.host):
                self.socket.connect(self.address)
            opened.pop_all()

    @property
    def has_ended(self) -> bool:
        """Returns True if `receive` has a loss to report, even if no socket is readable."""
        return self.error is not None

    def send(self, payload: bytes) -> None:
        """Queue a message. Raises `error`, the reason why the connection is over."""
        if self.error is not None:
            raise self.error
        self._longest_bytes = max(self._longest_bytes, len(payload))
        if self._lookup is None and not self._untried:
            self._send_now(payload)
        elif len(self._unsent) < self._limits.max_queued_messages:
            self._unsent.append(payload)
        else:
            self.error = queue_is_full(self.address, self._limits)
        if self.error is not None:
            raise self.error

    def receive(self, now: float) -> list[ControlEvent]:
        """Return messages that arrived, and last `Disconnected`, once the connection is over and all is read."""
        if self._lookup is not None and self._lookup.is_over:
            self._take_addresses(self._lookup, now)
        # The monitor first: once it has reported the loss, everything that had arrived is readable.
        self._take_monitor()
        if self.error is None and self.deadline is not None and now >= self.deadline:
            self.error = self._after_probe() or PeerUnreachableError(
                "peer did not complete the handshake in time"
                if self._lookup is None
                else "the host name was not looked up in time",
                address=self.address,
                connect_timeout_s=self._limits.connect_timeout_s,
            )
        if isinstance(self.error, PeerUnreachableError) and self._untried:
            self._try_next(now)
        events: list[ControlEvent] = []
        self.is_settled = False
        try:
            for _ in range(self._limits.max_messages_per_turn):
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                check_frames(frames, self.address, self._limits)
                events.append(Received(self.handle, frames[0]))
            return events
        except RemoteProtocolError as error:
            self.error = error
        except zmq.Again:
            self.is_settled = True
        if self.error is not None:
            if self._given_up:
                self.error.context["tried"] = [*self._given_up, str(self._target)]
            events.append(Disconnected(self.handle, self.error))
            self.finished = True
        return events

    def close(self, linger_ms: int) -> None:
        """Release the sockets; libzmq goes on sending queued messages for at most `linger_ms`."""
        if self._lookup is not None:
            self._lookup.abandon()
        elif linger_ms and self.error is None:
            self._send_unsent()  # the address that is tried now may answer
        if self._probe is not None:
            self._probe.close()
        self.monitor.close()
        self.socket.close(linger=linger_ms)

    def _take_addresses(self, found: Lookup, now: float) -> None:
        """Connect to the first of the addresses that were found for the host's name."""
        self._lookup = None
        if self.error is not None:
            return
        if found.error:
            self.error = PeerUnreachableError(
                f"the host name does not resolve: {found.error}", address=self.address
            )
            return
        self._untried.extend(found.addresses)
        self._try_next(now)

    def _try_next(self, now: float) -> None:
        """Connect to the next address that libzmq accepts, instead of the one that was tried last."""
        if self.error is not None:
            self._given_up.append(str(self._target))
            with suppress(zmq.ZMQError):
                self.socket.disconnect(str(self._target))
        while self._untried:
            self._target = HostPort(self._untried.popleft(), self._target.port)
            self.error = None
            self.deadline = now + (self._gives_up_at - now) / (len(self._untried) + 1)
            try:
                self.socket.connect(str(self._target))
            except zmq.ZMQError as exc:
                self.error = PeerUnreachableError(
                    f"cannot connect to an address of the host: {exc}",
                    address=self.address,
                    found=str(self._target),
                )
                continue
            if not self._untried:
                self._send_unsent()
            return

    def _send_unsent(self) -> None:
        """Send what has waited for an address that answers."""
        unsent, self._unsent = self._unsent, []
        self._untried.clear()
        for payload in unsent:
            if self.error is None:
                self._send_now(payload)

    def _send_now(self, payload: bytes) -> None:
        """Give a message to the socket. Sets `error` if it does not take it."""
        try:
            self.socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            self._take_monitor()  # a connection that was refused has no queue either
            self.error = self.error or queue_is_full(self.address, self._limits)
        except zmq.ZMQError as exc:
            self.error = TransportError(f"cannot send: {exc}", address=self.address)

    def _take_monitor(self) -> None:
        for kind, value, endpoint in self.monitor.drain():
            if endpoint in self._given_up:
                continue
            if kind == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.deadline = None
                self._send_unsent()
            elif self.error is None and self._probe is None:
                if self._uses_keys and (kind, value) == _CLOSED_IN_HANDSHAKE:
                    self._probe = _Probe(self._target)
                    self.deadline = time.monotonic() + PROBE_S
                else:
                    self.error = self._explain(kind, value)

    def _after_probe(self) -> KVConnectorError | None:
        """Return why the peer closed during the handshake, if it did: a peer that lives could not decrypt it."""
        if self._probe is None:
            return None
        error = self._probe.result()
        return error(
            "peer closed the connection during the handshake: it has another server key, or no keys"
            if error is AuthenticationError
            else "peer ended during the handshake",
            address=self.address,
        )

    def _explain(self, kind: int, value: int) -> KVConnectorError:
        """Return the reason why a connection is over."""
        error: type[KVConnectorError]
        context: dict[str, object] = {"address": self.address}
        match kind, value:
            case zmq.Event.HANDSHAKE_FAILED_AUTH, _:
                error = AuthenticationError
                text = "peer does not list our public key among its authorised clients"
            case (
                zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
                zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC | zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH,
            ):
                error = AuthenticationError
                text = "keys do not fit: only one side uses keys, or the peer's key is another one"
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL, _:
                error, text = RemoteProtocolError, "peer is no control channel"
                context["zmtp_error"] = hex(value)
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, errno.ETIMEDOUT:
                error, text = PeerUnreachableError, "peer did not answer the handshake"
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, _:
                error, text = PeerLostError, "peer ended during the handshake"
                if not self._uses_keys:
                    text += ", or it uses keys and this side has none"
                context["cause"] = errno.errorcode.get(value, value)
            case _ if self.deadline is None:
                error, text = PeerLostError, "peer closed the connection or stopped answering"
                if self._longest_bytes > SHORT_MESSAGE_BYTES:
                    context["longest_message_bytes"] = self._longest_bytes
                    text += (
                        ", perhaps because of a message longer than its control.max_message_bytes"
                    )
            case _:
                error = PeerUnreachableError
                text = "nothing listens there"
                if cause := _missing_route(self._target):
                    text = (
                        f"this host has no route to that address ({cause}): see the address, this host's interfaces and"
                        " routes, and in a pod its network policy"
                    )
        return error(text, **context)
