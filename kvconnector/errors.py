"""Every exception kvconnector raises, under one root: `LocalError` for mistakes of our caller, `TransportError` for the
transport library on this side, `RemoteError` for mistakes or the loss of a peer.
"""

from __future__ import annotations

from typing import ClassVar

_CONTROL = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}


def one_line(text: str) -> str:
    """Return a text with its control characters escaped: whoever wrote parts of it cannot forge lines of a log."""
    return text if text.isprintable() else text.translate(_CONTROL)


class KVConnectorError(Exception):
    """Base class of all errors. `context` holds the values that the text ends with: engine, rank, request, values that
    disagree. `remedy` says what to do about any error of the class, where the message does not.
    """

    remedy: ClassVar[str] = ""

    def __init__(self, message: str, **context: object) -> None:
        self.message = message
        self.context = context
        super().__init__(message)

    @property
    def statement(self) -> str:
        """The text without the remedy, in one line, as peers get it."""
        if not self.context:
            return one_line(self.message)
        details = ", ".join(f"{name}={value!r}" for name, value in self.context.items())
        return one_line(f"{self.message} [{details}]")

    def __str__(self) -> str:
        return f"{self.statement}; {self.remedy}" if self.remedy else self.statement


class LocalError(KVConnectorError):
    """The caller on this side made a mistake; nothing was sent and no state changed."""


class ConfigError(LocalError):
    """A setting is unknown, malformed, out of range, or contradicts another one."""


class GeometryError(LocalError):
    """A cache view, layout, topology or block size does not describe memory consistently."""


class BlockIdError(LocalError):
    """Block ids are out of the pool's range, or too few for the tokens they should hold."""


class CacheSpecError(LocalError):
    """Cache specs cannot be merged, grouped or sized as requested."""


class UnknownRequestError(LocalError):
    """The request is not, or no longer, known to this engine."""


class LocalProtocolError(LocalError):
    """An event arrived that the state machine does not accept in this state; the state is unchanged."""


class InternalError(KVConnectorError):
    """An unexpected exception in the connector ended this request or connection, and no other."""

    remedy = (
        "this is a bug in kvconnector: the log of this engine has the traceback, please report it"
    )


class TransportError(KVConnectorError):
    """The transport library failed on this side: set-up, registration, or a request it rejected."""

    remedy = "`kvconnector doctor` says what UCX and the memory of this host lack"


class CorruptionError(TransportError):
    """A chunk arrived damaged; nothing of it was unpacked."""

    remedy = "compare the ranks of several such errors: a network, memory or GPU between them damages bytes"


class OperationCancelledError(TransportError):
    """A send or a receive was cancelled before it completed."""

    remedy = "the log says before this which peer was given up, or what closed the transport"


class MemoryInUseError(TransportError):
    """A worker that was closed may still use the engine's cache memory: it must not be freed or reused."""

    remedy = "call close again later, or keep the memory until the process ends"


class RemoteError(KVConnectorError):
    """The peer made a mistake, refused, or is gone."""

    remedy = "the other engine's log says more"


class RemoteProtocolError(RemoteError):
    """The peer sent bytes that are no valid message: garbage, truncated, too long, or out of order."""

    remedy = "both sides need releases of one wire version, and a router that changes nothing"


class IncompatiblePeerError(RemoteError):
    """The peer's model, dtype, head counts, layers or wire version cannot work with ours."""

    remedy = "`kvconnector doctor --peer` compares both engines"


class AuthenticationError(RemoteError):
    """One of the two engines does not accept the other's key."""

    remedy = "each side needs the other's public key in its control.authorized_clients_file, see docs/hosts.md"


class ProducerNotAllowedError(RemoteError):
    """A request names a producer that `control.allowed_producers` does not list. Nothing was connected to."""

    remedy = (
        "if it is a producer of this deployment, add it to the list; else see which client or router sent the request,"
        " and strip kv_transfer_params from what clients send (docs/security.md)"
    )


class PeerUnreachableError(RemoteError):
    """The peer did not answer before the deadline."""

    remedy = (
        "see whether it runs and its ports are open: `kvconnector doctor --peer` from this host"
    )


class PeerLostError(RemoteError):
    """The peer answered before and is gone now: its endpoint closed or its heartbeats stopped."""

    remedy = "the other engine's log says why; prefill the requests that it was to send anew"


class TransferTimeoutError(RemoteError):
    """A transfer did not complete before its deadline."""

    remedy = (
        "look for a stuck engine or a slow network; peer.transfer_timeout_s is how long a read may go without a byte,"
        " peer.progress_timeout_s how long a prompt may go without a new token"
    )


class ReadRefusedError(RemoteError):
    """The producer refused a read; subclasses say why."""

    remedy = "a router must hand kv_transfer_params on unchanged; prefill the request anew"


class UnknownTransferError(ReadRefusedError):
    """The producer holds no blocks under this transfer id and secret."""


class LeaseExpiredError(ReadRefusedError):
    """The producer's lease on the request's blocks ended before the read."""

    remedy = "prefill the request anew; lease.duration_s there must cover the wait in this engine's queue"


class TransferAbortedError(ReadRefusedError):
    """The request was aborted on one of the two sides."""

    remedy = "prefill the request anew, if it is still wanted"


class StaleIncarnationError(ReadRefusedError):
    """The message was meant for an earlier start of the engine, which has been restarted since."""

    remedy = "that engine was restarted and has lost the blocks: prefill the request anew"


def require_counts(error: type[LocalError], **values: object) -> None:
    """Raise `error` for the first value that is no integer from 0 to 2^31 - 1, which is what messages carry."""
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise error(f"{name} must be an integer from 0 to 2^31 - 1", **{name: value})


def require_at_least(minimum: int, error: type[LocalError], **values: int | None) -> None:
    """Raise `error` for the first value that is no integer of at least `minimum`; None is skipped."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, int) and value >= minimum):
            raise error(f"{name} must be an integer of at least {minimum}", **{name: value})
