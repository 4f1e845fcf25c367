"""Events of a session, besides the engine's orders. The machines get the time beside each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from kvconnector.errors import KVConnectorError, RemoteProtocolError
from kvconnector.session.completion import Phase
from kvconnector.session.link import Link
from kvconnector.wire import messages as m

if TYPE_CHECKING:
    from kvconnector.session.lease import Send
    from kvconnector.session.reads import RankRead
    from kvconnector.session.remote_engine import RemoteEngine

MessageT_co = TypeVar("MessageT_co", bound=m.Message, covariant=True)


class FromPeer(msgspec.Struct, Generic[MessageT_co], frozen=True, eq=False):
    """A message of the worker, or the directory service, at `link`. Tables name it by the message's type."""

    link: Link
    message: MessageT_co


class LinkLost(msgspec.Struct, frozen=True):
    """A control connection ended or could not be made, or the data plane cannot reach the consumer worker there."""

    link: Link
    error: KVConnectorError


class Tick(msgspec.Struct, frozen=True):
    """Time passed: deadlines are looked at."""


# Producer side.


class EndpointOpened(msgspec.Struct, frozen=True):
    """The data plane reaches the consumer worker, and the warm-up message is on its way."""

    link: Link


class SendOver(msgspec.Struct, frozen=True):
    """The blocks of a read are not read any more. All of its chunks were sent, or it ended early: then exactly
    `sent_chunks` were or are being sent. `phases` are by the clock of the data path.
    """

    send: Send
    sent_chunks: int | None = None
    error: KVConnectorError | None = None
    phases: tuple[Phase, ...] = ()


# Consumer side.


class EngineReady(msgspec.Struct, frozen=True):
    """All ranks of a producer engine that this rank needs are connected and warm."""

    engine: RemoteEngine


class EngineLost(msgspec.Struct, frozen=True):
    """A producer engine cannot be reached, refused us, or is gone."""

    engine: RemoteEngine
    error: KVConnectorError


class WarmedUp(msgspec.Struct, frozen=True):
    """The warm-up message of a producer worker arrived; `error` if it did not."""

    link: Link
    error: KVConnectorError | None = None


class OfReceive(msgspec.Struct, frozen=True):
    """A report of the data path about a read."""

    read: RankRead


class ReceivePosted(OfReceive, frozen=True):
    """Receives for a read are posted, `window` of them at a time: the producer may start."""


class ReceiveAdvanced(OfReceive, frozen=True):
    """Another chunk of a read arrived."""


DIRECT_PATH = "direct"
"""Of reads of the producer's pools, through CUDA IPC or shared memory."""
PACKED_PATH = "packed"
TCP_FALLBACK = "-tcp-fallback"
"""Ends the path of what was sent by TCP although RDMA ports are active on this host."""


class ReceiveFinished(OfReceive, frozen=True):
    """All bytes of a read are in our blocks: `seconds` after its posting or first copy, by `DIRECT_PATH` or as it was
    sent. `phases` are parts of a read that was sent, by the clock of the data plane.
    """

    seconds: float = 0.0
    path: str = ""
    phases: tuple[Phase, ...] = ()


class ReceiveFailed(OfReceive, frozen=True):
    """The data plane could not complete a read; nothing writes our blocks any more. `ReceiveDrained` follows."""

    error: KVConnectorError


class ReceiveStopped(OfReceive, frozen=True):
    """A read that was stopped writes our blocks no more. `ReceiveDrained` follows."""


class ReceiveDrained(OfReceive, frozen=True):
    """A stopped or failed read's slots are free: nothing more of it is awaited. The last event of such a read."""


FROM_CONSUMER: frozenset[type] = frozenset(
    {m.Hello, m.Read, m.CancelRead, m.Done, m.Abort, m.Heartbeat, m.Probe}
)
FROM_PRODUCER: frozenset[type] = frozenset(
    {
        m.Directory,
        m.DirectoryRefused,
        m.HelloReply,
        m.Progress,
        m.ReadRefused,
        m.ReadEnded,
        m.HeartbeatReply,
    }
)


def event_of(link: Link, message: m.Message) -> FromPeer[Any] | None:
    """The event that a message on `link` is; None for a goodbye, which ends the link.

    Raises:
        RemoteProtocolError: a message that this side does not take on such a link.
    """
    if isinstance(message, m.Bye):
        return None
    if type(message) not in (FROM_CONSUMER if link.number < 0 else FROM_PRODUCER):
        raise RemoteProtocolError(
            f"a {type(message).__name__} is not expected on this connection", link=link.number
        )
    return FromPeer(link, message)


def kind_of(event: object) -> type:
    """The type by which tables name an event: for a peer's message the message's."""
    return type(event.message) if isinstance(event, FromPeer) else type(event)
