"""The control messages and their bytes. Pure."""

from kvconnector.wire.codec import decode, encode
from kvconnector.wire.refusals import error_of
from kvconnector.wire.version import WIRE_MAJOR

__all__ = ["WIRE_MAJOR", "decode", "encode", "error_of"]
