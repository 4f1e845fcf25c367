"""Refusals as they travel, and the exceptions they become on the other side."""

from __future__ import annotations

from kvconnector import errors as e
from kvconnector.wire.messages import Refusal

_ERRORS: dict[Refusal, type[e.RemoteError]] = {
    Refusal.INCOMPATIBLE: e.IncompatiblePeerError,
    Refusal.UNKNOWN_TRANSFER: e.UnknownTransferError,
    Refusal.LEASE_EXPIRED: e.LeaseExpiredError,
    Refusal.ABORTED: e.TransferAbortedError,
    Refusal.STALE_INCARNATION: e.StaleIncarnationError,
    Refusal.INVALID_READ: e.ReadRefusedError,
    Refusal.NOT_GREETED: e.RemoteProtocolError,
    Refusal.INTERNAL: e.RemoteError,
}


def error_of(refusal: Refusal, text: str, **context: object) -> e.RemoteError:
    """The exception that a peer's refusal becomes here."""
    return _ERRORS[refusal](text, **context)
