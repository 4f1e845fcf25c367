"""Calls of an object's methods from another process: msgpack both ways, and the method's annotations say what the bytes
are. Nothing is unpickled.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import msgspec

from kvconnector.errors import KVConnectorError


class CallFailedError(KVConnectorError):
    """A call raised in the other process, or that process is gone; the text is its own or the end of its log."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What happened instead of a return."""

    text: str


def encode_call(method: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """The call as bytes for `answer`."""
    return msgspec.msgpack.encode((method.__name__, arguments))


def answer(target: object, request: bytes, methods: Sequence[Callable[..., Any]]) -> bytes:
    """Call one of these methods; what it returned or raised, as bytes for `decode_answer`."""
    try:
        name, arguments = msgspec.msgpack.decode(request, type=tuple[str, list[msgspec.Raw]])
        if name not in [each.__name__ for each in methods]:
            raise CallFailedError("there is no such method", method=name)
        method = getattr(target, name)
        hints = get_type_hints(method)
        parameters = inspect.signature(method).parameters
        pairs = zip(parameters, arguments, strict=True)
        result = (
            method(*(msgspec.msgpack.decode(each, type=hints[name]) for name, each in pairs)),
        )
    except KVConnectorError as error:
        return failure(f"failed: {type(error).__name__}: {error}")
    except Exception as error:
        # Whatever it was, the caller must hear of it rather than wait.
        return failure("failed: " + "".join(traceback.format_exception(error)))
    return msgspec.msgpack.encode(result)


def failure(text: str) -> bytes:
    """The answer that what was called did this instead of returning."""
    return msgspec.msgpack.encode(Failed(text.strip()))


def decode_answer(name: str, method: Callable[..., Any], answered: bytes) -> Any:
    """What the method returned. Raises CallFailedError: it raised; `name` says where."""
    result: Any = get_type_hints(method)["return"]
    decoded = msgspec.msgpack.decode(answered, type=Failed | tuple[result])
    if isinstance(decoded, Failed):
        raise CallFailedError(f"{name} {decoded.text}")
    return decoded[0]
