"""Parts that both kinds of ZMQ connection share: socket options, monitor events, authorisation."""

from __future__ import annotations

import contextlib
import errno
import logging
import struct
from collections.abc import Iterator, Sequence, Sized

import zmq
from zmq.utils import z85

from kvconnector.control.base import ControlLimits
from kvconnector.control.security import CurveKeys, Security
from kvconnector.errors import PeerLostError, RemoteProtocolError, TransportError
from kvconnector.folded_log import Refusals

logger = logging.getLogger(__name__)

# A CURVE message adds its name (8), a nonce (8), an authenticator (16) and flags (1), RFC 26; ZMQ_MAXMSGSIZE is a sum.
_CURVE_OVERHEAD_BYTES = 33
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = "kvconnector"
_KEEPALIVE_PROBES = 3
_MAX_KEEPALIVE_S = (1 << 15) - 1
"""Linux takes no longer interval."""
_MONITOR_EVENT = struct.Struct("=HI")
MAX_MONITOR_EVENTS = 1 << 14
"""Events of one monitor that wait to be read, of about 140 bytes each; libzmq adds a thousand. A stranger's connection
that comes and goes makes two."""


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, rounded up: a short time must not become 0, which means "off" or "at once"."""
    return -int(-seconds * 1000 // 1)


def configure(
    socket: zmq.Socket[bytes], *, limits: ControlLimits, security: Security, ipv6: bool
) -> None:
    """Set the options common to both sides; before bind or connect."""
    overhead = _CURVE_OVERHEAD_BYTES if isinstance(security, CurveKeys) else 0
    socket.setsockopt(zmq.IPV6, int(ipv6))
    socket.setsockopt(zmq.LINGER, milliseconds(limits.linger_s))
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes + overhead)
    socket.setsockopt(zmq.SNDHWM, limits.max_queued_messages)
    socket.setsockopt(zmq.RCVHWM, limits.max_queued_messages)
    _let_the_kernel_watch(socket, limits.host_timeout_s)
    if isinstance(security, CurveKeys):
        socket.setsockopt(zmq.CURVE_PUBLICKEY, security.public_key.encode("ascii"))
        socket.setsockopt(zmq.CURVE_SECRETKEY, security.secret_key.encode("ascii"))


def _let_the_kernel_watch(socket: zmq.Socket[bytes], timeout_s: float) -> None:
    """Make connections end when the peer's host has not answered for so long, idle or with something unacknowledged.

    ZMTP has heartbeats of its own. They must stay off: a heartbeat that is due, or a peer's that is answered, writes to
    the connection, and libzmq 4.3.5 aborts the process if the connection has broken while as many messages as it reads
    ahead were waiting to be read. Every engine that is busy for a few seconds may be in that situation.
    """
    interval_s = min(max(1, int(timeout_s / (1 + _KEEPALIVE_PROBES))), _MAX_KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)
    # Linux's TCP_USER_TIMEOUT, which counts instead of the number of probes where both are set
    socket.setsockopt(zmq.TCP_MAXRT, milliseconds(timeout_s))


class Monitor:
    """The connection events of one socket.

    libzmq's I/O thread waits while `MAX_MONITOR_EVENTS` are unread, and with it every connection of the context, until
    they are drained. Strangers would have to open thousands of connections between two looks of the owner: while it
    computes for seconds, say, when nobody reads messages anyway. Then the kernel refuses further ones, and its own
    probes go on; without a bound libzmq would take 4,000 a second into memory.
    """

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        endpoint = f"inproc://monitor-{socket.fileno()}"
        self._monitored = socket
        self.socket: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVHWM, MAX_MONITOR_EVENTS)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.monitor(endpoint, events)
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def drain(self) -> Iterator[tuple[int, int, str]]:
        """Yield kind, value and endpoint of each event so far. The value is a file descriptor, an errno or a protocol
        error; the endpoint is the one that was connected to, or bound.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                event, endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
                kind, value = _MONITOR_EVENT.unpack(event)
                yield kind, value, endpoint.decode(errors="replace")

    def close(self) -> None:
        """Stop monitoring; before the monitored socket is closed."""
        # to stop takes a lock, which libzmq's thread holds while it waits for room
        for _ in self.drain():
            pass
        self._monitored.disable_monitor()
        self.socket.close()


class Authorizer:
    """Makes a `server` socket, before bind, demand CURVE from every client, and answers libzmq over ZAP (RFC 27) which
    clients that have proved their key may connect.

    It runs in the owner's poll loop. libzmq asks within one context only, so each channel has its own.
    """

    def __init__(self, server: zmq.Socket[bytes], keys: CurveKeys) -> None:
        self._authorized = keys.authorized_clients
        self.refusals = Refusals(logger)
        self.socket: zmq.Socket[bytes] = server.context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.bind(_ZAP_ENDPOINT)
        except zmq.ZMQError:
            self.socket.close()
            raise
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self, max_requests: int) -> bool:
        """Answer waiting requests, at most `max_requests`. Returns False if there may be more."""
        with contextlib.suppress(zmq.Again):
            for _ in range(max_requests):
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                self.socket.send_multipart(self._reply(frames), zmq.NOBLOCK)
            return False
        return True

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        version, request_id, _domain, address, _identity, mechanism, *credentials = frames
        is_curve = mechanism == b"CURVE" and credentials
        key = z85.encode(credentials[0]).decode("ascii") if is_curve else ""
        if key in self._authorized:
            return [version, request_id, b"200", b"OK", key.encode("ascii"), b""]
        self.refusals.note(f"clients at {address.decode()}", "key is not authorised", key or "none")
        return [version, request_id, b"400", b"not authorised", b"", b""]

    def close(self) -> None:
        """Stop answering; after the guarded socket is closed."""
        self.socket.close()


def cannot_open(what: str, error: zmq.ZMQError | OSError, **context: object) -> TransportError:
    """Return the error for sockets that cannot be made, such as those of "a control connection"."""
    no_file = error.errno in (errno.EMFILE, errno.ENFILE)
    hint = ": raise the limit of open files (ulimit -n)" if no_file else ""
    return TransportError(f"cannot open {what}: {error}{hint}", **context)


def queue_is_full(peer: str, limits: ControlLimits) -> PeerLostError:
    """Return the error for a peer that takes no more messages."""
    return PeerLostError(
        "the peer accepts no messages: the queue to it is full",
        peer=peer,
        queued_messages=limits.max_queued_messages,
    )


def check_frames(frames: Sequence[Sized], peer: str, limits: ControlLimits) -> None:
    """Raise `RemoteProtocolError` unless these are one message that is not too long."""
    if len(frames) != 1 or len(frames[0]) > limits.max_message_bytes:
        raise RemoteProtocolError(
            "the peer sent bytes that are not a control message",
            peer=peer,
            frame_bytes=[len(frame) for frame in frames],
        )
