"""The control channel: small messages between workers, with connection loss reported as an event.

It never retries, never reconnects and never interprets a payload. Contract of every implementation, checked by
`tests.support.control_suite`:

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvconnector.errors import KVConnectorError, LocalError

PeerHandle = NewType("PeerHandle", int)
"""One connection, incoming or outgoing, of one channel. A reconnected peer has a new handle."""


class MessageTooLargeError(LocalError):
    """The payload is longer than `max_message_bytes`: it was not sent, and the connection is as it was."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived on a connection."""

    handle: PeerHandle
    payload: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection ended; its handle is not valid any more. `error` says why, as far as this side can know."""

    handle: PeerHandle
    error: KVConnectorError


ControlEvent = Received | Disconnected


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlLimits:
    """Bounds on memory and time of one channel. `kvconnector.config` checks the settings that they come from."""

    max_message_bytes: int
    """Longest payload, sent or received. The handshake's commands, about 300 bytes with keys, must fit too."""
    max_queued_messages: int
    """Messages that may wait in one direction of one connection."""
    max_messages_per_turn: int
    """Messages that one `poll` takes from one connection, or from all incoming ones together, before it returns."""
    connect_timeout_s: float
    """From `connect` to the end of the handshake; also how long an accepted connection may take for its handshake."""
    heartbeat_interval_s: float
    """How often an idle connection is probed."""
    heartbeat_timeout_s: float
    """How long a probe may stay unanswered before the connection counts as lost."""
    linger_s: float
    """How long `disconnect` and `close` go on delivering what was sent before. May be 0."""


def check_payload(payload: bytes, max_message_bytes: int) -> None:
    """Raise `MessageTooLargeError` for a payload that must not be sent."""
    if len(payload) > max_message_bytes:
        raise MessageTooLargeError(
            "message is too long for the control channel",
            message_bytes=len(payload),
            max_message_bytes=max_message_bytes,
        )


class ControlChannel(Protocol):
    """One worker's end of the control channel. The module's docstring is the contract."""

    @property
    def address(self) -> str:
        """`tcp://host:port` that peers connect to; the real port where port 0 was bound."""

    @property
    def server_key(self) -> str:
        """Public key that peers pass to `connect` with `address`; "" for a channel without keys."""

    def connect(self, address: str, server_key: str = "") -> PeerHandle:
        """Open a connection without waiting for it; messages may be sent on the handle at once. Failures arrive as
        `Disconnected`: `PeerUnreachableError` where nobody answers within `connect_timeout_s`, `AuthenticationError`
        where the keys do not fit, `RemoteProtocolError` where something else listens, `PeerLostError` where the peer
        leaves in between. Raises ConfigError: the address or the key is malformed, or only one side uses keys.
        """

    def send(self, handle: PeerHandle, payload: bytes) -> None:
        """Queue one message; never blocks. Raises MessageTooLargeError: nothing was sent; PeerLostError: the handle is
        gone, or its queue is full, which ends the connection; RemoteError: why else the connection is over.
        """

    def peer_of(self, handle: PeerHandle) -> str:
        """Address of a connection's peer, for texts: its host alone if it opened the connection."""

    def disconnect(self, handle: PeerHandle) -> None:
        """End a connection; `handle` is not valid afterwards. Idempotent, never blocks.

        What was sent before still goes out, for at most `linger_s`. The peer notices the end of a connection that this
        side opened. One that the peer opened is only ignored from now on: say goodbye first, and let the peer close.
        """

    def poll(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> list[ControlEvent]:
        """Wait until something happens, `wake` is called, or one of `extra_fds` is readable; return the events.

        It may also return early with nothing, and takes at most `max_messages_per_turn` messages from each source; the
        next call returns the rest at once.
        """

    def filenos(self) -> tuple[int, ...]:
        """Descriptors of which one becomes readable when something happens after the channel `is_settled`."""

    @property
    def is_settled(self) -> bool:
        """Returns True if nothing waits for `poll` that `filenos` would not show."""

    def wake(self) -> None:
        """Make the current `poll`, or the next one, return at once. Any thread may call it, also after `close`."""

    def close(self) -> None:
        """End every connection and release every resource. Idempotent; waits at most `linger_s`."""
