"""Every exception that kvconnector raises, under one root: `LocalError` for mistakes of the caller, `TransportError`
for failures of the transport library on this side, `RemoteError` for mistakes or the loss of a peer.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import ClassVar

_CONTROL = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}


def one_line(text: str) -> str:
    """Return a text with its control characters escaped, so that a peer that wrote a part cannot forge log lines."""
    return text if text.isprintable() else text.translate(_CONTROL)


class Retry(StrEnum):
    """Where a router may retry a failed request, as a new request that is prefilled again."""

    SAME = "same"
    """On the same two engines: the blocks are gone, but the engines are healthy."""
    OTHER = "other"
    """On other engines: one of these two is lost, broken or full, or they are not compatible."""
    NEVER = "never"
    """Nowhere: the request would fail again until somebody changes it or a setting."""


class KVConnectorError(Exception):
    """Base class of all errors. `context` holds the values that the text ends with: the engine, the rank, the request,
    values that disagree. `remedy` says what to do about any error of the class if the message does not, and `retry`
    where a router may retry the request. Each class states its own.

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
        """Return the end of the text: the remedy, and where to retry the request. Empty without a remedy."""
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
    """This engine does not know the request, or no longer knows it."""

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
    """The transport library failed on this side: during set-up or registration, or by rejecting a request."""

    retry = Retry.OTHER
    remedy = "run `kvconnector doctor`: it says what is wrong with UCX or with memory limits on this host"


class CorruptionError(TransportError):
    """A chunk arrived damaged, and was not unpacked."""

    retry = Retry.OTHER
    remedy = "compare the ranks in several such errors, to find the network, memory or GPU that damages bytes"


class OperationCancelledError(TransportError):
    """A send or a receive was cancelled before it completed."""

    retry = Retry.OTHER
    remedy = "earlier log lines say which peer was given up, or what closed the transport"


class WorkerStuckError(TransportError):
    """A call into the CUDA driver, UCX or the system does not return, so this worker transfers nothing more."""

    retry = Retry.OTHER
    remedy = (
        "restart this engine: its log names the call, and dmesg shows what the GPU or NIC reported"
    )


class MemoryInUseError(TransportError):
    """A closed worker may still be using the engine's cache memory, so the memory must not be freed or reused."""

    retry = Retry.OTHER
    remedy = "call close again later, or keep the memory until the process ends"


class RemoteError(KVConnectorError):
    """The peer made a mistake, refused, or is gone."""

    retry = Retry.OTHER
    remedy = "see the other engine's log"


class RemoteProtocolError(RemoteError):
    """The peer sent bytes that are not a valid message: garbage, truncated, too long, or out of order."""

    retry = Retry.OTHER
    remedy = "both engines need releases with a common wire version, and the router must pass parameters on unchanged"


class IncompatiblePeerError(RemoteError):
    """The peer's model, dtype, head counts, layers or wire version are not compatible with ours."""

    retry = Retry.OTHER
    remedy = "run `kvconnector doctor --peer` to compare both engines"


class AuthenticationError(RemoteError):
    """One of the two engines does not accept the other's key."""

    retry = Retry.OTHER
    remedy = "each side needs the other's public key in its control.authorized_clients_file (docs/hosts.md)"


class ProducerNotAllowedError(RemoteError):
    """A request names a producer that `control.allowed_producers` does not list. No connection was made."""

    retry = Retry.NEVER
    remedy = (
        "if the producer belongs to this deployment, add it to the list; otherwise find the client or router"
        " that sent"
        " the request, and strip kv_transfer_params from what clients send (docs/security.md)"
    )


class PeerUnreachableError(RemoteError):
    """The peer did not answer before the deadline."""

    retry = Retry.OTHER
    remedy = "check that it is running and its ports are open: run `kvconnector doctor --peer` on this host"


class PeerLostError(RemoteError):
    """The peer answered before but is gone now: its endpoint closed or its heartbeats stopped."""

    retry = Retry.OTHER
    remedy = "see the other engine's log for the cause; prefill the request again"


class TransferTimeoutError(RemoteError):
    """A transfer did not complete before its deadline."""

    retry = Retry.OTHER
    remedy = (
        "look for a stuck engine or a slow network; peer.transfer_timeout_s limits the time without a byte of a read,"
        " peer.progress_timeout_s the time without a new token of a prompt"
    )


class OtherPromptError(RemoteError):
    """The producer computed a different prompt: its tokens, adapter, cache salt or images are different."""

    remedy = (
        "check that the router sends both engines the same request, and that both render it alike"
    )
    retry = Retry.NEVER


class ReadRefusedError(RemoteError):
    """The producer refused a read; subclasses say why."""

    retry = Retry.NEVER
    remedy = "the router must pass kv_transfer_params on unchanged; prefill the request again"


class UnknownTransferError(ReadRefusedError):
    """The producer holds no blocks under this transfer id and secret."""

    retry = Retry.SAME


class LeaseExpiredError(ReadRefusedError):
    """The producer's lease on the request's blocks ended before the read."""

    retry = Retry.SAME
    remedy = "prefill the request again; the producer's lease.duration_s must cover the wait in this engine's queue"


class OfferReclaimedError(LeaseExpiredError):
    """The producer ran short of cache blocks, and took back those of this request, the oldest that nobody had read."""

    retry = Retry.OTHER
    remedy = (
        "the producer is full of prompts that no decode engine fetches: add decode engines, or raise its"
        " lease.reclaim_above"
    )


class TransferAbortedError(ReadRefusedError):
    """The request was aborted on one of the two sides."""

    retry = Retry.SAME
    remedy = "prefill the request again, if it is still wanted"


class StaleIncarnationError(ReadRefusedError):
    """The message was meant for an engine that has been restarted since."""

    retry = Retry.SAME
    remedy = "the other engine was restarted and has lost the blocks: prefill the request again"


def retry_of(reason: str) -> Retry:
    """Return where a request may be retried, given the reason in a worker's output: an error's class, a colon, a text.

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
    """Raise `error` for the first value that is not an integer from 0 to 2^31 - 1, the range that messages carry."""
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise error(f"{name} must be an integer from 0 to 2^31 - 1", **{name: value})


def require_seconds(**values: float) -> None:
    """Raise LocalError for the first value that is not a finite number."""
    for name, value in values.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise LocalError(f"{name} must be a finite number of seconds", **{name: value})


def require_at_least(minimum: int, error: type[LocalError], **values: int | None) -> None:
    """Raise `error` for the first value that is not an integer of at least `minimum`; None is skipped."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, int) and value >= minimum):
            raise error(f"{name} must be an integer of at least {minimum}", **{name: value})
