"""The one way out of the sessions: what they have done by links, the data path and the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineId
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.planning import Segment
from kvconnector.session.link import Link
from kvconnector.session.trace import HoldTrace
from kvconnector.wire.messages import Hello, HelloReply, Message, Probe

if TYPE_CHECKING:
    from kvconnector.session.lease import Send
    from kvconnector.session.load import Load
    from kvconnector.session.reads import RankRead
    from kvconnector.session.remote_engine import RemoteWorker

NEVER = float("inf")


class Port:
    """What a session calls while it handles an event. No method waits or calls a session back: what follows comes as a
    later event. This one does nothing.
    """

    # -- links --

    def send(self, link: Link, message: Message) -> None:
        """Send a control message; a link that is gone is reported as `LinkLost`."""

    def open_link(self, link: Link, address: str, public_key: str, version: int) -> None:
        """Connect `link` to a peer's control address; our messages on it are in this wire version."""

    def close_link(self, link: Link) -> None:
        """Close `link` after what was sent on it, with all that lasts as long as it, sends to a consumer worker among
        it; no event follows.
        """

    # -- of a producer --

    def open_endpoint(self, link: Link, hello: Hello) -> None:
        """Reach a consumer worker and send it the warm-up message; `EndpointOpened` or `LinkLost` follows."""

    def probe(self, link: Link, probe: Probe) -> None:
        """Send a consumer worker what its `Probe` asks for."""

    def expect_reads(self, blocks: tuple[GroupBlocks, ...]) -> None:
        """Consumers may ask for these blocks soon."""

    def start_send(self, send: Send) -> None:
        """Stream the chunks of a read. `SendOver` follows."""

    def stop_send(self, send: Send) -> None:
        """Send no further chunk of this read; `SendOver` follows once the blocks are not read any more."""

    def publish(self, key: bytes, watermark: Watermark) -> None:
        """Let consumers on this host read a lease up to its watermark, until `retract`. One that grows comes again."""

    def retract(self, key: bytes) -> None:
        """Reads under this key that end from now on do not count. It comes before `release`."""

    def release(self, request_id: str, outcome: str, trace: HoldTrace) -> None:
        """The producer engine may reuse the request's blocks. `outcome` is `expired` or `aborted` unless all
        confirmed.
        """

    # -- of a consumer --

    def met(self, engine_id: EngineId, summary: str) -> None:
        """Log that a producer engine is met, and how its caches differ from ours."""

    def greet(self, link: Link, segments: tuple[Segment, ...]) -> None:
        """Greet a producer worker: post the warm-up receive of `link`, then send a Hello that names the `segments` of
        all reads from it; `WarmedUp` follows.
        """

    def take_reply(self, worker: RemoteWorker, reply: HelloReply) -> None:
        """Use what a producer worker offers in its `reply` to our greeting, for as long as its link lasts; no event
        follows.

        Open the data plane's way to its `transport_address`, although nothing is sent there: a transport then knows
        whom it receives from, and can report the loss of that worker. Try to reach the pools of its `export` without
        its help: where that fails reads go the packed way.
        """

    def start_receive(self, read: RankRead) -> None:
        """Post receives for a read and unpack its chunks into its blocks. `ReceivePosted` follows, then
        `ReceiveFinished` or `ReceiveFailed`.

        Where the export of its link is open the read may be made there instead, from `remote_blocks` under the load's
        lease: then no `ReceivePosted` comes, and whatever the end is, it needs no peer.
        """

    def stop_receive(self, read: RankRead) -> None:
        """Write no further chunk into the blocks; `ReceiveStopped` follows once nothing writes them any more."""

    def drain_receive(self, read: RankRead, sent_chunks: int | None) -> None:
        """The peer sent exactly `sent_chunks` of a stopped read: receive and drop these, cancel the rest. None: the
        peer is gone, cancel all. `ReceiveDrained` follows.
        """

    def begun(self, request_id: str) -> None:
        """The producer computes a request that is followed, or never will: the engine may ask for its load."""

    def finish_load(self, load: Load, error: KVConnectorError | None) -> None:
        """The consumer engine may use the blocks of a load, or must do without: then `error` is the reason."""
