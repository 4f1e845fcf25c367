"""The control messages and their bytes. Pure."""

from kvconnector.wire.codec import (
    decode,
    decode_batch,
    encode,
    encode_batch,
    refusal_error,
    split_batch,
    version_of,
)

__all__ = [
    "decode",
    "decode_batch",
    "encode",
    "encode_batch",
    "refusal_error",
    "split_batch",
    "version_of",
]
