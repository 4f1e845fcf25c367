"""The contract between the data path and whatever moves bytes: tagged messages between two workers.

Ordering. Messages of one tag through one endpoint match receives of that tag in the order in which both were posted.
Between different tags, or different endpoints, there is no order.

Lengths. A message fits its receive exactly. Any other ends the receive with `MessageSizeError`, and its buffer holds
anything. Zero bytes are a message like any other.

Ownership. One thread owns a transport and calls every method. A buffer belongs to the transport until its ticket
appears in `progress()`, and `Buffer.owner` is held for as long as the library needs the memory.

Waiting. `progress()` never blocks. To sleep, wait for `fileno()` to be readable, after one more `progress()`: an
operation may complete inside the call that started it. Wake once a second: some losses show only when looked for.

Control messages. `send_control` and `receive_control` move small messages that no receive was posted for, under tags
with `CONTROL_TAG_BIT`, which no other message may have. Those of one tag and endpoint arrive in the order in which they
were sent. Nothing completes: what cannot be delivered any more shows as `ControlFailed`, or at the next send.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from kvconnector.errors import KVConnectorError, TransportError

CONTROL_TAG_BIT = 1 << 63
"""Set in the 64-bit tags of control messages, and of no others."""

MAX_UNSENT_CONTROL_BYTES = 64 << 20
"""Of control messages that an endpoint may have on their way before its peer counts as lost: a bound of memory, since
who is silent is given up by the sessions.
"""

MAX_CONTROL_PER_CALL = 256
"""Control messages that one `receive_control` takes from the network."""


NO_FILENO = -1
"""`fileno()` of a transport that cannot wake a sleeper and must be polled."""


class MessageSizeError(TransportError):
    """A message arrived that is longer (truncated) or shorter than the receive that it matched."""


LOCK_REMEDY = (
    "set `ulimit -l unlimited` (LimitMEMLOCK=infinity in a systemd unit), or give the container"
    " securityContext.capabilities.add: [IPC_LOCK]"
)


class RegistrationError(TransportError):
    """The system does not register a message's memory with the network card, which locks it."""

    remedy = LOCK_REMEDY


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a transport reads or writes, on "cpu" or "cuda:N". `owner` is whatever keeps that memory alive."""

    address: int
    nbytes: int
    device: str
    owner: object


def buffer_of_bytes(content: bytes) -> Buffer:
    """The memory of a bytes object, to be read only."""
    address = ctypes.c_void_p.from_buffer(ctypes.c_char_p(content)).value or 0
    return Buffer(address, len(content), "cpu", content)


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one operation. `error` is None when the bytes were sent, or have arrived."""

    ticket: int
    error: KVConnectorError | None


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A control message that arrived under a known tag."""

    tag: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ControlRefused:
    """A control message that was dropped unread: its tag is not known, or it is longer than the tag's limit."""

    tag: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ControlFailed:
    """A control message sent through `endpoint` may not have arrived: those after it will not either."""

    endpoint: int
    error: KVConnectorError


ControlEvent: TypeAlias = ControlMessage | ControlRefused | ControlFailed


@runtime_checkable
class Transport(Protocol):
    """Tagged messages from and to one worker; the module's docstring is the contract. Every method but `progress`,
    `receive_control`, `disconnect` and `close` raises `LocalError` once the transport is closed.
    """

    @property
    def address(self) -> bytes:
        """What a peer passes to its `connect`. Opaque; stable from construction to `close`."""

    def connect(self, address: bytes) -> int:
        """Open a sending direction to a worker: its endpoint id.

        Raises:
            RemoteProtocolError: the bytes are no address of this kind of transport.
            IncompatiblePeerError: the library could not exchange messages with that worker, as both are set.
            TransportError: the library cannot reach that worker.
        """

    def disconnect(self, endpoint: int) -> None:
        """Give up an endpoint: what it still sends completes with `OperationCancelledError`, and may yet be received.
        The peer may lose its own endpoint to this worker. Idempotent.
        """

    def falls_back_to_tcp(self, endpoint: int) -> bool:
        """Returns True if an endpoint to another host has no RDMA lane although RDMA ports are active here."""

    def send(self, endpoint: int, tag: int, buffer: Buffer) -> int:
        """Post a message and return its ticket. It may complete before the peer has received it. One to a peer that is
        known to be lost completes with `PeerLostError`; no such endpoint (any more) is a `LocalError`.
        """

    def recv(self, tag: int, buffer: Buffer) -> int:
        """Post a receive for exactly this tag, from any endpoint, and return its ticket. It does not know its sender,
        so the loss of a peer does not end it unless its message was already arriving: cancel it.
        """

    def cancel(self, ticket: int) -> None:
        """End an operation with `OperationCancelledError`, unless it completes first. A cancelled send may still reach
        the peer, with whatever its memory holds then: never reuse its tag. `LocalError`: no such ticket was given.
        """

    def progress(self) -> list[Completion]:
        """Drive the library until nothing moves, without blocking, and return what ended: every ticket once. After
        `close`, one call returns what `close` cancelled.
        """

    def send_control(self, endpoint: int, tag: int, payload: bytes) -> None:
        """Post a control message. It never blocks, and `payload` is kept for as long as the library needs it.

        Raises:
            LocalError: no such endpoint (any more).
            PeerLostError: the peer is lost, or `MAX_UNSENT_CONTROL_BYTES` have not left yet.
        """

    def receive_control(
        self, limits: Mapping[int, int], *, progress: bool = False
    ) -> list[ControlEvent]:
        """Return the control messages that arrived or failed, at most `MAX_CONTROL_PER_CALL`; never blocks. Call it
        after `progress()`, before sleeping, until it returns nothing. `limits` are the bytes that a message may have,
        by tag; no memory is spent on others. `progress` drives the library first: call `progress()` as well before
        sleeping.
        """

    def discard_unexpected(self, awaited: Collection[int], mask: int) -> int:
        """Drop messages that `progress` brought and no `recv` was posted for, from the oldest to the first whose tag is
        `awaited` in the bits of `mask`. Returns their number; control messages are not among them.
        """

    def fileno(self) -> int:
        """A descriptor that is readable when `progress()` has work, or `NO_FILENO`."""

    def close(self) -> None:
        """Cancel what is outstanding and release everything, in order. Control messages still go out, for as long as
        the transport waits for its peers. Idempotent.
        """
