"""The control messages and their bytes. Pure."""

from kvconnector.wire.codec import (
    WIRE_MAJOR,
    decode,
    decode_batch,
    encode,
    encode_batch,
    refusal_error,
)

__all__ = ["WIRE_MAJOR", "decode", "decode_batch", "encode", "encode_batch", "refusal_error"]
