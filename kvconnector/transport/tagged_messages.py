"""What tagged messages over UCX promise, and the types of `UcxTransport`.

There is one transport. The data path hands libucp's functions and handles to the compiled loop, so no other could take
its place; the tests' loopback network stands in for it behind the same calls.

Ordering. Messages of one tag through one endpoint match receives of that tag in the order in which both were posted.
Between different tags, or different endpoints, there is no order.

Lengths. A message fits its receive exactly. Any other length ends the receive with `MessageSizeError`, and the content
of its buffer is undefined. A message may have zero bytes.

Ownership. One thread owns a transport and calls every method. A buffer belongs to the transport until its ticket
appears in `progress()`. The transport keeps `Buffer.owner` for as long as the library needs the memory.

Waiting. `progress()` never blocks. To sleep, wait for `fileno()` to be readable, after one more `progress()`: an
operation may complete inside the call that started it. Wake once a second: some losses are noticed only by looking.

Control messages. `send_control` and `receive_control` move small messages without posted receives, under tags with
`CONTROL_TAG_BIT`, which no other message may have. Those of one tag and endpoint arrive in the order in which they were
sent. They have no completions: a lost message shows as `ControlFailed`, or at the next send.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TypeAlias

from kvconnector.errors import KVConnectorError, Retry, TransportError

CONTROL_TAG_BIT = 1 << 63
"""Set in the 64-bit tags of control messages, and of no others."""

MAX_UNSENT_CONTROL_BYTES = 64 << 20
"""Bytes of control messages that may be under way to a peer before it counts as lost: this bounds memory only, since
the sessions give up a silent peer.
"""

MAX_CONTROL_PER_CALL = 256
"""The most control messages that one `receive_control` takes from the network."""


class MessageSizeError(TransportError):
    """A message arrived that is longer (truncated) or shorter than the receive that it matched."""

    retry = Retry.OTHER


LOCK_REMEDY = (
    "set `ulimit -l unlimited` (LimitMEMLOCK=infinity in a systemd unit), or give the container"
    " securityContext.capabilities.add: [IPC_LOCK]"
)


class RegistrationError(TransportError):
    """The system refused to register a message's memory with the network card, which locks the memory."""

    retry = Retry.OTHER
    remedy = LOCK_REMEDY


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a transport reads or writes, on "cpu" or "cuda:N". `owner` keeps that memory alive."""

    address: int
    nbytes: int
    device: str
    owner: object


def buffer_of_bytes(content: bytes) -> Buffer:
    """Return the memory of a bytes object, which must not be written."""
    address = ctypes.c_void_p.from_buffer(ctypes.c_char_p(content)).value or 0
    return Buffer(address, len(content), "cpu", content)


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one operation. `error` is None if the bytes were sent, or have arrived."""

    ticket: int
    error: KVConnectorError | None


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A control message that arrived under a known tag."""

    tag: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ControlRefused:
    """A control message that was dropped unread: its tag is unknown, or it is longer than the tag's limit."""

    tag: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ControlFailed:
    """A control message sent through `endpoint` may not have arrived. Later ones will not either."""

    endpoint: int
    error: KVConnectorError


ControlEvent: TypeAlias = ControlMessage | ControlRefused | ControlFailed
