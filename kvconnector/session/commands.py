"""Commands of sessions to the runtime. They name links (control connections) and read keys, never sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType

import msgspec

from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineId
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.planning import Segment, SourceRead
from kvconnector.session.trace import HoldTrace, LoadTrace
from kvconnector.topology import RankGeometry
from kvconnector.wire.messages import HelloReply, Message, Probe, Read

if TYPE_CHECKING:
    from kvconnector.session.load import Load
    from kvconnector.session.remote_engine import RemoteWorker

LinkId = NewType("LinkId", int)
"""One control connection, as the runtime numbers it."""
NEVER = float("inf")


class Command:
    """Something that the runtime is to do."""

    __slots__ = ()


class SendMessage(Command, msgspec.Struct, frozen=True):
    """Send a control message; a link that is gone is reported as `LinkLost`."""

    link: LinkId
    message: Message


class OpenLink(Command, msgspec.Struct, frozen=True):
    """Connect `link` to a peer's control address; our messages on it are in this wire version."""

    link: LinkId
    address: str
    public_key: str
    version: int


class CloseLink(Command, msgspec.Struct, frozen=True):
    """Close `link` after what was sent on it, with all that lasts as long as it, sends to a consumer worker among it;
    no event follows.
    """

    link: LinkId


class OpenEndpoint(Command, msgspec.Struct, frozen=True):
    """Reach a consumer worker and send it the warm-up message; `EndpointOpened` or `LinkLost` follows."""

    link: LinkId
    transport_address: bytes
    warm_up_tag: int
    warm_up_bytes: int


class SendProbe(Command, msgspec.Struct, frozen=True):
    """Send a consumer worker what its `Probe` asks for."""

    link: LinkId
    probe: Probe


class LogEngine(Command, msgspec.Struct, frozen=True):
    """Log that a producer engine is met, and how its caches differ from ours."""

    engine_id: EngineId
    summary: str


class TakeReply(Command, msgspec.Struct, frozen=True, eq=False):
    """Use what a producer worker offers in its `reply` to our greeting, for as long as `link` lasts; no event follows.

    Open the data plane's way to its `transport_address`, although nothing is sent there: a transport then knows whom it
    receives from, and can report the loss of that worker. Try to reach the pools of its `export` without its help,
    `theirs` is what it holds: where that fails reads go the packed way.
    """

    link: LinkId
    engine_id: EngineId
    theirs: RankGeometry
    reply: HelloReply


class ExpectWarmUp(Command, msgspec.Struct, frozen=True):
    """Greet a producer worker: post the warm-up receive of `link`, then send a Hello that names the `segments` of all
    reads from it; `WarmedUp` follows.
    """

    link: LinkId
    segments: tuple[Segment, ...]


class StartSend(Command, msgspec.Struct, frozen=True, eq=False):
    """Stream the chunks of `source` from these blocks, as `read` asks. `SendOver` follows."""

    link: LinkId
    read: Read
    source: SourceRead
    blocks: tuple[GroupBlocks, ...]


class StopSend(Command, msgspec.Struct, frozen=True):
    """Send no further chunk of this read; `SendOver` follows once the blocks are not read any more."""

    link: LinkId
    read_id: int


class StartReceive(Command, msgspec.Struct, eq=False):
    """Post receives for a read and unpack its chunks into these blocks. `ReceivePosted` follows, then
    `ReceiveFinished` or `ReceiveFailed`.

    Where the export of `link` is open the read may be made there instead, from `remote_blocks` under the load's lease:
    then no `ReceivePosted` comes, and whatever the end is, it needs no peer. A lease that is followed is published
    under its id and secret alone.

    The rest is the session's record, which it forgets when the read is complete or, once stopped, when the data plane
    awaits nothing more of it. A `share` of its bytes is here, 0 where that is not known. `is_asked`: the peer knows of
    it. `is_peer_over`: the peer sends no more than the data plane knows of. `deadline` bounds the peer's answer to a
    cancellation.
    """

    read_id: int
    load: Load
    worker: RemoteWorker
    link: LinkId
    source: SourceRead
    blocks: tuple[GroupBlocks, ...]
    remote_blocks: tuple[GroupBlocks, ...]
    share: float = 0.0
    is_stopped: bool = False
    is_asked: bool = False
    is_peer_over: bool = False
    deadline: float = NEVER


class StopReceive(Command, msgspec.Struct, frozen=True):
    """Write no further chunk into the blocks; `ReceiveStopped` follows once nothing writes them any more."""

    read_id: int


class DrainReceive(Command, msgspec.Struct, frozen=True):
    """The peer sent exactly `sent_chunks` of a stopped read: receive and drop these, cancel the rest. None: the peer
    is gone, cancel all. `ReceiveDrained` follows.
    """

    read_id: int
    sent_chunks: int | None


class ExpectReads(Command, msgspec.Struct, frozen=True):
    """Consumers may ask for these blocks soon."""

    blocks: tuple[GroupBlocks, ...]


class PublishLease(Command, msgspec.Struct, frozen=True):
    """Consumers on this host may read a lease up to its watermark, until `RetractLease`. One that grows comes again."""

    key: bytes
    watermark: Watermark


class RetractLease(Command, msgspec.Struct, frozen=True):
    """Reads under this key that end from now on do not count. It comes before `ReleaseBlocks`."""

    key: bytes


class ReleaseBlocks(Command, msgspec.Struct, frozen=True):
    """The producer engine may reuse the request's blocks. `outcome` is `expired` or `aborted` unless all confirmed."""

    request_id: str
    outcome: str
    trace: HoldTrace


class NotifyPrefillStarted(Command, msgspec.Struct, frozen=True):
    """The producer computes a request that is followed, or never will: the engine may ask for its load."""

    request_id: str


class FinishLoad(Command, msgspec.Struct, frozen=True):
    """The consumer engine may use the request's blocks, or must do without: then `error` is the reason. Its first
    `filled_tokens` tokens are in the blocks all the same, if that is known. `extra`: see `Progress`.
    """

    request_id: str
    error: KVConnectorError | None
    trace: LoadTrace | None = None
    filled_tokens: int | None = None
    extra: bytes = b""
