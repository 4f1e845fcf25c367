"""Every exception kvconnector raises, under one root.

`LocalError` is a mistake of our caller (a bad argument, a wrong configuration, an event out of order); `RemoteError` is
a mistake or a loss of the peer. Each carries the values that disagree in `context`, also as the end of its text.
"""

from __future__ import annotations


class KVConnectorError(Exception):
    """Root of the tree. `context` holds what the text names: engine, rank, request, values that disagree."""

    def __init__(self, message: str, **context: object) -> None:
        self.message = message
        self.context = context
        super().__init__(message)

    def __str__(self) -> str:
        if not self.context:
            return self.message
        details = ", ".join(f"{name}={value!r}" for name, value in self.context.items())
        return f"{self.message} [{details}]"


class LocalError(KVConnectorError):
    """The caller on this side made a mistake; nothing was sent and no state changed."""


class ConfigError(LocalError):
    """A setting is unknown, malformed, out of range, or contradicts another one."""


class GeometryError(LocalError):
    """A cache view, layout, topology or block size does not describe memory consistently."""


class BlockIdError(LocalError):
    """Block ids are out of the pool's range, or too few for the tokens they should hold."""


class CacheSpecError(LocalError):
    """Cache specs cannot be merged, grouped or sized as asked."""


class UnknownRequestError(LocalError):
    """The request is not, or no longer, known to this engine."""


class LocalProtocolError(LocalError):
    """An event arrived that the state machine does not accept in this state; the state is unchanged."""


class TransportError(KVConnectorError):
    """The transport library failed on this side: set-up, registration, or a request it rejected."""


class CorruptionError(TransportError):
    """A chunk is not what its producer sent; nothing of it was unpacked."""


class OperationCancelledError(TransportError):
    """A send or a receive was cancelled before it completed."""


class MemoryInUseError(TransportError):
    """A worker that was closed may still use the engine's cache memory: it must not be freed or reused."""


class RemoteError(KVConnectorError):
    """The peer made a mistake, refused, or is gone."""


class RemoteProtocolError(RemoteError):
    """The peer sent bytes that are no valid message: garbage, truncated, too long, or out of order."""


class IncompatiblePeerError(RemoteError):
    """The peer's model, dtype, head counts, layers or wire version cannot work with ours."""


class AuthenticationError(RemoteError):
    """The peer's keys, or ours in its eyes, are not the ones that were agreed on."""


class PeerUnreachableError(RemoteError):
    """The peer did not answer before the deadline."""


class PeerLostError(RemoteError):
    """The peer answered before and is gone now: its endpoint closed or its heartbeats stopped."""


class TransferTimeoutError(RemoteError):
    """A transfer did not complete before its deadline."""


class ReadRefusedError(RemoteError):
    """The producer refused a read; subclasses say why."""


class UnknownTransferError(ReadRefusedError):
    """The producer holds no blocks under this transfer id and secret."""


class LeaseExpiredError(ReadRefusedError):
    """The producer's lease on the request's blocks ended before the read."""


class TransferAbortedError(ReadRefusedError):
    """The request was aborted on one of the two sides."""


class StaleIncarnationError(ReadRefusedError):
    """The message names another start of the engine: it was restarted in between."""
