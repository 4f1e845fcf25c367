"""The control messages and their bytes. Pure."""

from kvconnector.wire.codec import WIRE_MAJOR, decode, encode, error_of

__all__ = ["WIRE_MAJOR", "decode", "encode", "error_of"]
