"""Bytes to messages and back. The envelope (magic, major, kind) is checked before the body is decoded.

Majors: 1, the first. 2: heartbeats name what is followed, and messages travel in batches. 3: `Progress` has a watermark
as one field, a greeting names the segments of all reads, and a read only ranges, which both sides cut into the same
chunks. Within a major, fields are only ever appended, and chunks are cut in the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from kvconnector import errors as e
from kvconnector.errors import IncompatiblePeerError, KVConnectorError, RemoteProtocolError
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal

WIRE_MAJOR = 3
MAGIC = b"KVCN"
_ENVELOPE = struct.Struct("<4sHH")

# Kinds are part of the wire: numbers are never reused. 15 was a message of major 1.
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
}


def refusal_error(refusal: Refusal, text: str, **context: object) -> e.RemoteError:
    """The exception that a peer's refusal becomes here."""
    return _ERRORS[refusal](text, **context)


def encode(message: m.Message) -> bytes:
    """The message with its envelope."""
    kind = _KIND_OF[type(message)]
    return _ENVELOPE.pack(MAGIC, WIRE_MAJOR, kind) + _ENCODER.encode(message)


def encode_batch(payloads: Sequence[bytes]) -> bytes:
    """Encoded messages as one, in their order."""
    return payloads[0] if len(payloads) == 1 else encode(m.Batch(messages=tuple(payloads)))


def decode_batch(payload: bytes) -> tuple[m.Message, ...]:
    """The message in `payload`, or those of the batch in it.

    Raises:
        IncompatiblePeerError, RemoteProtocolError: see `decode`, of any of them; or a batch holds a batch.
    """
    message = decode(payload)
    if not isinstance(message, m.Batch):
        return (message,)
    messages = tuple(decode(each) for each in message.messages)
    if any(isinstance(each, m.Batch) for each in messages):
        raise RemoteProtocolError("a batch of messages holds another batch")
    return messages


def decode(payload: bytes) -> m.Message:
    """The message in `payload`. Raises IncompatiblePeerError: another wire major; RemoteProtocolError: anything else
    that is no valid message: garbage, truncated, wrong types, values out of range, an impossible geometry.
    """
    if len(payload) < _ENVELOPE.size:
        raise RemoteProtocolError("a message is shorter than its envelope", nbytes=len(payload))
    magic, major, kind = _ENVELOPE.unpack_from(payload)
    if magic != MAGIC:
        raise RemoteProtocolError("these bytes are no kvconnector message", starts_with=payload[:8])
    if major != WIRE_MAJOR:
        raise IncompatiblePeerError(
            "the peer speaks another wire version", ours=WIRE_MAJOR, theirs=major
        )
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise RemoteProtocolError("unknown message kind", kind=kind)
    try:
        return decoder.decode(memoryview(payload)[_ENVELOPE.size :])
    # UnicodeDecodeError: text that is no UTF-8; RecursionError: arrays nested too deeply to be skipped
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"malformed {KINDS[kind].__name__}: {error}", nbytes=len(payload)
        ) from error
    except KVConnectorError as error:
        raise RemoteProtocolError(f"impossible {KINDS[kind].__name__}: {error}") from error
