"""Every exception kvconnector raises, under one root: `LocalError` for mistakes of our caller, `TransportError` for the
transport library on this side, `RemoteError` for mistakes or the loss of a peer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

_CONTROL = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}


def one_line(text: str) -> str:
    """Return a text with its control characters escaped: whoever wrote parts of it cannot forge lines of a log."""
    return text if text.isprintable() else text.translate(_CONTROL)


class Retry(StrEnum):
    """Where a router may send a request again that failed with an error, as a new one that is prefilled again."""

    SAME = "same"
    """To the same two engines: the blocks are gone, the engines are well."""
    OTHER = "other"
    """To other engines: one of these two is lost, broken or full, or they do not fit each other."""
    NEVER = "never"
    """Nowhere: it would fail again until somebody changes the request or a setting."""


class KVConnectorError(Exception):
    """Base class of all errors. `context` holds the values that the text ends with: engine, rank, request, values that
    disagree. `remedy` says what to do about any error of the class, where the message does not, and `retry` where a
    router may send the request again. Each class states its own.

    Args:
        message: What happened, without the values.
        context: The values by name, such as `engine` or `rank`.
    """

    remedy: ClassVar[str] = ""
    retry: ClassVar[Retry] = Retry.OTHER

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
        advice = self.advice()
        return f"{self.statement}; {advice}" if advice else self.statement

    @classmethod
    def advice(cls) -> str:
        """Return the end of the text: the remedy, and where to send the request again. Empty without a remedy."""
        return f"{cls.remedy} (retry: {cls.retry})" if cls.remedy else ""


class LocalError(KVConnectorError):
    """The caller on this side made a mistake; nothing was sent and no state changed."""

    retry = Retry.NEVER


class ConfigError(LocalError):
    """A setting is unknown, malformed, out of range, or contradicts another one."""

    retry = Retry.NEVER


class GeometryError(LocalError):
    """A cache view, layout, topology or block size does not describe memory consistently."""

    retry = Retry.NEVER


class BlockIdError(LocalError):
    """Block ids are out of the pool's range, or too few for the tokens they should hold."""

    retry = Retry.NEVER


class CacheSpecError(LocalError):
    """Cache specs cannot be merged, grouped or sized as requested."""

    retry = Retry.NEVER


class UnknownRequestError(LocalError):
    """The request is not, or no longer, known to this engine."""

    retry = Retry.NEVER


class LocalProtocolError(LocalError):
    """An event arrived that the state machine does not accept in this state; the state is unchanged."""

    retry = Retry.NEVER


class InternalError(KVConnectorError):
    """An unexpected exception in the connector ended this request or connection, and no other."""

    retry = Retry.OTHER
    remedy = (
        "this is a bug in kvconnector: the log of this engine has the traceback, please report it"
    )


class TransportError(KVConnectorError):
    """The transport library failed on this side: set-up, registration, or a request it rejected."""

    retry = Retry.OTHER
    remedy = "`kvconnector doctor` says what UCX and the memory of this host lack"


class CorruptionError(TransportError):
    """A chunk arrived damaged; nothing of it was unpacked."""

    retry = Retry.OTHER
    remedy = "compare the ranks of several such errors: a network, memory or GPU between them damages bytes"


class OperationCancelledError(TransportError):
    """A send or a receive was cancelled before it completed."""

    retry = Retry.OTHER
    remedy = "the log says before this which peer was given up, or what closed the transport"


class WorkerStuckError(TransportError):
    """A call of the CUDA driver, UCX or the system does not return, so this worker transfers nothing more."""

    retry = Retry.OTHER
    remedy = "restart this engine: its log names the call, and the system's log (dmesg) what the GPU or NIC reports"


class MemoryInUseError(TransportError):
    """A worker that was closed may still use the engine's cache memory: it must not be freed or reused."""

    retry = Retry.OTHER
    remedy = "call close again later, or keep the memory until the process ends"


class RemoteError(KVConnectorError):
    """The peer made a mistake, refused, or is gone."""

    retry = Retry.OTHER
    remedy = "the other engine's log says more"


class RemoteProtocolError(RemoteError):
    """The peer sent bytes that are no valid message: garbage, truncated, too long, or out of order."""

    retry = Retry.OTHER
    remedy = "both sides need releases of one wire version, and a router that changes nothing"


class IncompatiblePeerError(RemoteError):
    """The peer's model, dtype, head counts, layers or wire version cannot work with ours."""

    retry = Retry.OTHER
    remedy = "`kvconnector doctor --peer` compares both engines"


class AuthenticationError(RemoteError):
    """One of the two engines does not accept the other's key."""

    retry = Retry.OTHER
    remedy = "each side needs the other's public key in its control.authorized_clients_file, see docs/hosts.md"


class ProducerNotAllowedError(RemoteError):
    """A request names a producer that `control.allowed_producers` does not list. Nothing was connected to."""

    retry = Retry.NEVER
    remedy = (
        "if it is a producer of this deployment, add it to the list; else see which client or router sent the request,"
        " and strip kv_transfer_params from what clients send (docs/security.md)"
    )


class PeerUnreachableError(RemoteError):
    """The peer did not answer before the deadline."""

    retry = Retry.OTHER
    remedy = (
        "see whether it runs and its ports are open: `kvconnector doctor --peer` from this host"
    )


class PeerLostError(RemoteError):
    """The peer answered before and is gone now: its endpoint closed or its heartbeats stopped."""

    retry = Retry.OTHER
    remedy = "the other engine's log says why; prefill again what it was to send"


class TransferTimeoutError(RemoteError):
    """A transfer did not complete before its deadline."""

    retry = Retry.OTHER
    remedy = (
        "look for a stuck engine or a slow network; peer.transfer_timeout_s is how long a read may go without a byte,"
        " peer.progress_timeout_s how long a prompt may go without a new token"
    )


class OtherPromptError(RemoteError):
    """The producer computed another prompt than this one: with other tokens, another adapter, cache salt or images."""

    remedy = (
        "check that the router sends both engines the same request, and that they render it alike"
    )
    retry = Retry.NEVER


class ReadRefusedError(RemoteError):
    """The producer refused a read; subclasses say why."""

    retry = Retry.NEVER
    remedy = "a router must pass kv_transfer_params on unchanged; prefill the request again"


class UnknownTransferError(ReadRefusedError):
    """The producer holds no blocks under this transfer id and secret."""

    retry = Retry.SAME


class LeaseExpiredError(ReadRefusedError):
    """The producer's lease on the request's blocks ended before the read."""

    retry = Retry.SAME
    remedy = "prefill the request again; lease.duration_s there must cover the wait in this engine's queue"


class OfferReclaimedError(LeaseExpiredError):
    """The producer ran out of cache blocks, and took back this request's, the oldest that nobody had read."""

    retry = Retry.OTHER
    remedy = (
        "that engine is full of prompts that no decode engine fetches: add decode engines, or raise"
        " lease.reclaim_above there"
    )


class TransferAbortedError(ReadRefusedError):
    """The request was aborted on one of the two sides."""

    retry = Retry.SAME
    remedy = "prefill the request again, if it is still wanted"


class StaleIncarnationError(ReadRefusedError):
    """The message was meant for an earlier start of the engine, which has been restarted since."""

    retry = Retry.SAME
    remedy = "that engine was restarted and has lost the blocks: prefill the request again"


def retry_of(reason: str) -> Retry:
    """Return where a request may be sent again, by the reason in a worker's output: an error's class, a colon, a text.

    An unknown class counts as `KVConnectorError`.
    """
    name, kinds = reason.partition(":")[0], [KVConnectorError]
    while kinds:
        kind = kinds.pop()
        if kind.__name__ == name:
            return kind.retry
        kinds += kind.__subclasses__()
    return KVConnectorError.retry


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
