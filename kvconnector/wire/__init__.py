"""The control messages and their bytes. Pure."""

from kvconnector.wire.codec import (
    decode,
    decode_batch,
    encode,
    encode_batch,
    messages_of,
    refusal_error,
    version_of,
)

__all__ = [
    "decode",
    "decode_batch",
    "encode",
    "encode_batch",
    "messages_of",
    "refusal_error",
    "version_of",
]
