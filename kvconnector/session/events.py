"""Events of a session, besides the engine's orders. The time is an argument of `handle`, not a field of the events."""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnector.errors import KVConnectorError, RemoteProtocolError
from kvconnector.session.completion import Phase
from kvconnector.session.lease import Send
from kvconnector.session.link import FromPeer, Link
from kvconnector.session.load import RankRead, RemoteEngine
from kvconnector.wire import messages as m


class LinkLost(msgspec.Struct, frozen=True):
    """A control connection ended or could not be made, or the data plane cannot reach the consumer worker at `link`."""

    link: Link
    error: KVConnectorError


class Tick(msgspec.Struct, frozen=True):
    """Time passed: the session checks its deadlines."""


# Producer side.


class EndpointOpened(msgspec.Struct, frozen=True):
    """The data plane can reach the consumer worker, and the warm-up message was sent."""

    link: Link


class SendOver(msgspec.Struct, frozen=True):
    """A send is over and reads no block any more. If it ended early, `sent_chunks` of its chunks were handed to the
    network; None: all of them. `phases` are in seconds of the data path's clock.
    """

    send: Send
    sent_chunks: int | None = None
    error: KVConnectorError | None = None
    phases: tuple[Phase, ...] = ()


# Consumer side.


class EngineReady(msgspec.Struct, frozen=True):
    """All ranks of a producer engine that this rank reads from have greeted and are warm."""

    engine: RemoteEngine


class EngineLost(msgspec.Struct, frozen=True):
    """A producer engine cannot be reached, refused us, or is gone."""

    engine: RemoteEngine
    error: KVConnectorError


class WarmedUp(msgspec.Struct, frozen=True):
    """The warm-up message of a producer worker arrived, or `error` says why it did not."""

    link: Link
    error: KVConnectorError | None = None


class PoolsUnmapped(msgspec.Struct, frozen=True):
    """The pools of a producer worker are no longer mapped."""

    link: Link


class OfReceive(msgspec.Struct, frozen=True):
    """A report from the data path about a read."""

    read: RankRead


class ReceivePosted(OfReceive, frozen=True):
    """Receives for the first `window` chunks of a read are posted: the producer may start."""


class ReceiveAdvanced(OfReceive, frozen=True):
    """Another chunk of a read arrived, or another piece of a direct read was copied."""


DIRECT_PATH = "direct"
"""The path of reads that copy from the producer's pools, mapped by CUDA IPC or shared memory."""
PACKED_PATH = "packed"
TCP_FALLBACK = "-tcp-fallback"
"""Suffix of a path whose bytes went by TCP although this host has active RDMA ports."""


class ReceiveFinished(OfReceive, frozen=True):
    """All bytes of a read are in our blocks. `seconds` counts from the posted receive or the first copy. `path` is
    `DIRECT_PATH`, or the name of a packed path. A packed read has `phases`, in seconds of the data path's clock.
    """

    seconds: float = 0.0
    path: str = ""
    phases: tuple[Phase, ...] = ()


class ReceiveFailed(OfReceive, frozen=True):
    """The data path could not complete a read and no longer writes to our blocks. `ReceiveDrained` follows."""

    error: KVConnectorError


class ReceiveStopped(OfReceive, frozen=True):
    """A stopped read no longer writes to our blocks. `ReceiveDrained` follows."""


class ReceiveDrained(OfReceive, frozen=True):
    """The slots of a stopped or failed read are free. This is the last event of such a read."""


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
    """Return the event for a message that came on `link`; None for a `Bye`, which ends the link.

    Raises:
        RemoteProtocolError: this side takes no such message on such a link.
    """
    if type(message) in (FROM_CONSUMER if link.number < 0 else FROM_PRODUCER):
        return FromPeer(link, message)
    if isinstance(message, m.Bye):
        return None
    raise RemoteProtocolError(
        f"a {type(message).__name__} is not expected on this connection", link=link.number
    )
