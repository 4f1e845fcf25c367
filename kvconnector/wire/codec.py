"""Bytes to messages and back. The envelope (magic, version, kind) is checked before the body is decoded, and its form
never changes. `versions` says which version a message is in.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
from msgspec import structs

from kvconnector import errors as e
from kvconnector.errors import KVConnectorError, RemoteProtocolError
from kvconnector.wire import messages as m
from kvconnector.wire import versions
from kvconnector.wire.messages import Refusal

MAGIC = b"KVCN"
_ENVELOPE = struct.Struct("<4sHH")

# Kinds are part of the wire: numbers are never reused. 15 was a message of version 1.
KINDS: dict[int, type[m.Message]] = {
    1: m.DirectoryRequest,
    2: m.Directory,
    3: m.DirectoryRefused,
    4: m.Hello,
    5: m.HelloReply,
    6: m.Read,
    7: m.ReadRefused,
    8: m.ReadEnded,
    9: m.CancelRead,
    10: m.Done,
    11: m.Abort,
    12: m.Heartbeat,
    13: m.HeartbeatReply,
    14: m.Bye,
    16: m.Progress,
    17: m.Probe,
    18: m.Batch,
}
RECLAIMED_SINCE = 4
"""The wire version in which a refusal can say that an offer was taken back."""
FIXED = frozenset({1, 3, 14})
"""A request to a directory, its refusal, and a goodbye are read in any version: their fields are only ever appended."""
_KIND_OF = {message: kind for kind, message in KINDS.items()}
_DECODERS = {kind: msgspec.msgpack.Decoder(message) for kind, message in KINDS.items()}
_ENCODER = msgspec.msgpack.Encoder()
_ERRORS: dict[Refusal, type[e.RemoteError]] = {
    Refusal.INCOMPATIBLE: e.IncompatiblePeerError,
    Refusal.UNKNOWN_TRANSFER: e.UnknownTransferError,
    Refusal.LEASE_EXPIRED: e.LeaseExpiredError,
    Refusal.ABORTED: e.TransferAbortedError,
    Refusal.STALE_INCARNATION: e.StaleIncarnationError,
    Refusal.INVALID_READ: e.ReadRefusedError,
    Refusal.NOT_GREETED: e.RemoteProtocolError,
    Refusal.INTERNAL: e.RemoteError,
    Refusal.RECLAIMED: e.OfferReclaimedError,
}


def refusal_error(refusal: Refusal, text: str, **context: object) -> e.RemoteError:
    """Return the exception for a peer's refusal."""
    return _ERRORS[refusal](text, **context)


def encode(message: m.Message, version: int | None = None) -> bytes:
    """Return a message with its envelope, in the newest version or the one that its link uses."""
    kind = _KIND_OF[type(message)]
    version = versions.SPOKEN.newest if version is None else version
    if version < versions.SPOKEN.newest:
        message = _of_version(message, version)
    return _ENVELOPE.pack(MAGIC, version, kind) + _ENCODER.encode(message)


def _of_version(message: m.Message, version: int) -> m.Message:
    """Return a message without the parts that releases of an older version would misread. If the older form cannot
    express the message, this is the place to raise an `IncompatiblePeerError`, which fails only the request whose
    message it is.
    """
    if (
        version < RECLAIMED_SINCE
        and isinstance(message, m.Progress | m.ReadRefused | m.ReadEnded)
        and message.refusal is Refusal.RECLAIMED
    ):
        return structs.replace(message, refusal=Refusal.LEASE_EXPIRED)
    return message


def encode_batch(payloads: Sequence[bytes], version: int | None = None) -> bytes:
    """Return encoded messages as one, in their order."""
    if len(payloads) == 1:
        return payloads[0]
    return encode(m.Batch(messages=tuple(payloads)), version)


def version_of(payload: bytes) -> int:
    """Return the version in which to answer a message: its own, or the oldest one if we do not speak its own."""
    found = _ENVELOPE.unpack_from(payload)[1] if len(payload) >= _ENVELOPE.size else None
    return found if found in versions.SPOKEN else versions.SPOKEN.oldest


def messages_of(batch: m.Batch) -> tuple[bytes, ...]:
    """Return the encoded messages of a batch. Raises RemoteProtocolError: one of them is a batch."""
    if any(map(_is_batch, batch.messages)):
        raise RemoteProtocolError("a batch of messages contains another batch")
    return batch.messages


def _is_batch(payload: bytes) -> bool:
    return len(payload) >= _ENVELOPE.size and _ENVELOPE.unpack_from(payload)[2] == _KIND_OF[m.Batch]


def decode_batch(payload: bytes) -> tuple[m.Message, ...]:
    """Return the message in `payload`, or those of the batch in it.

    Raises:
        IncompatiblePeerError, RemoteProtocolError: see `decode`, of any of them; or a batch holds a batch.
    """
    message = decode(payload)
    return tuple(map(decode, messages_of(message))) if isinstance(message, m.Batch) else (message,)


def decode(payload: bytes) -> m.Message:
    """Return the message in `payload`.

    Raises:
        IncompatiblePeerError: it has a wire version that is not spoken here, and its kind is not one of `FIXED`.
            RemoteProtocolError: it is not a valid message for another reason: garbage, truncated, wrong types, values
            out of range, an impossible geometry.
    """
    if len(payload) < _ENVELOPE.size:
        raise RemoteProtocolError("a message is shorter than its envelope", nbytes=len(payload))
    magic, version, kind = _ENVELOPE.unpack_from(payload)
    if magic != MAGIC:
        raise RemoteProtocolError(
            "these bytes are not a kvconnector message", starts_with=payload[:8]
        )
    if kind not in FIXED:
        versions.SPOKEN.check(version)
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise RemoteProtocolError("unknown message kind", kind=kind)
    try:
        return decoder.decode(memoryview(payload)[_ENVELOPE.size :])
    # UnicodeDecodeError: text that is not UTF-8; RecursionError: arrays nested too deeply to be skipped
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed {KINDS[kind].__name__}: {error}", nbytes=len(payload)
        ) from error
    except KVConnectorError as error:
        raise RemoteProtocolError(f"impossible {KINDS[kind].__name__}: {error}") from error
