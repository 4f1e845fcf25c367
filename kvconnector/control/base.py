"""A control channel's events, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from kvconnector.errors import KVConnectorError, LocalError, Retry

PeerHandle = NewType("PeerHandle", int)
"""One connection, incoming or outgoing, of one channel. A reconnected peer has a new handle."""


class MessageTooLargeError(LocalError):
    """The payload is longer than `max_message_bytes`: it was not sent, and the connection is as it was."""

    retry = Retry.NEVER

    @classmethod
    def of(cls, payload: bytes, max_message_bytes: int) -> MessageTooLargeError:
        """Return the error with both lengths."""
        return cls(
            "message is too long for the control channel",
            message_bytes=len(payload),
            max_message_bytes=max_message_bytes,
        )


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
    """Messages that one `poll` takes from one connection, or from all incoming ones together, before it returns; as
    many are read ahead of it from each incoming one."""
    connect_timeout_s: float
    """Seconds from `connect` to the end of the handshake; an accepted connection has as long for its own."""
    host_timeout_s: float
    """A connection is lost after this long without any answer of the peer's host, in seconds. The kernel probes idle
    connections in whole seconds, so that it takes up to a quarter of this longer, and at least two seconds."""
    linger_s: float
    """How long `disconnect` and `close` continue to deliver messages sent before, in seconds. May be 0."""
