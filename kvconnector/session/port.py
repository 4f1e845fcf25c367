"""The outputs of the sessions: the methods of links, the data path and the engine's reports that they call. A session
calls these methods while it handles an event. None of them waits or calls the session back: results arrive as later
events. In these base classes the methods do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineId
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.planning import Segment
from kvconnector.session.lease import Send
from kvconnector.session.link import Link
from kvconnector.session.load import Load, RankRead, RemoteWorker
from kvconnector.session.trace import LeaseTrace
from kvconnector.wire.export import PoolExport
from kvconnector.wire.messages import Hello, HelloReply, Message, Probe


class LinkPort:
    """Control connections to peers."""

    def send(self, link: Link, message: Message) -> None:
        """Send a control message. If the link is gone, `LinkLost` follows.

        Raises:
            KVConnectorError: no message can carry these values. Nothing was sent, and the link stays.
        """

    def open_link(self, link: Link, address: str, public_key: str, version: int) -> None:
        """Connect `link` to a peer's control address. Our messages on it use this wire version."""

    def close_link(self, link: Link) -> None:
        """Close `link` once the messages sent on it are gone, and free its endpoint, mappings and warm-ups. Sends to a
        consumer worker at this link stop. No event follows. Idempotent.
        """

    def send_hello(
        self, link: Link, segments: tuple[Segment, ...], max_message_bytes: int = 0
    ) -> None:
        """Greet a producer worker: post the receive for its warm-up message, then send a `Hello` that names the
        `segments` of all reads from it. `WarmedUp` follows. It takes messages of `max_message_bytes`, 0 if not known.

        Raises:
            IncompatiblePeerError: the `Hello` is longer than it takes, or than we may send.
        """

    def connect_back(self, worker: RemoteWorker, reply: HelloReply) -> None:
        """Connect to the producer worker that sent `reply`, for as long as its link lasts. No event follows.

        Open an endpoint to its `transport_address`, although no data is sent there: the transport then knows the worker
        that sends to us, and can report its loss. Map the pools of its `export`: if that fails, its reads are packed.
        """

    def unmap_pools(self, link: Link) -> None:
        """Unmap the pools of the producer worker at `link`, once no read of them is under way. Later reads are packed.
        `PoolsUnmapped` follows, even if they were not mapped.
        """

    def map_pools(self, worker: RemoteWorker, export: PoolExport) -> None:
        """Map a producer worker's pools, which are not mapped. If that fails, reads are packed. No event follows."""


class DataPathPort:
    """The movement of bytes. A failure in one of these is a `WorkerFault`."""

    # -- of a producer --

    def open_endpoint(self, link: Link, hello: Hello) -> None:
        """Open an endpoint to a consumer worker and send its warm-up message. `EndpointOpened` or `LinkLost` comes."""

    def probe(self, link: Link, probe: Probe) -> None:
        """Send a consumer worker the bytes that its `Probe` asks for."""

    def expect_reads(self, blocks: tuple[GroupBlocks, ...]) -> None:
        """Prepare for reads of these blocks, which consumers may ask for soon."""

    def start_send(self, send: Send) -> None:
        """Send the chunks of a read. `SendOver` follows."""

    def stop_send(self, send: Send) -> None:
        """Send no further chunk of this read. `SendOver` follows once nothing reads its blocks. Idempotent."""

    def publish(self, key: bytes, watermark: Watermark) -> None:
        """Let consumers on this host read a lease up to its watermark, until `retract`. Called again when it grows."""

    def retract(self, key: bytes) -> None:
        """Make direct reads under this key fail if they end from now on. Called before `release`. Idempotent."""

    # -- of a consumer --

    def start_receive(self, read: RankRead) -> None:
        """Begin a read. `ReceiveFinished` or `ReceiveFailed` follows.

        A packed read posts receives and unpacks its chunks into its blocks: `ReceivePosted` comes first. If the
        worker's pools are mapped, the read copies from its `remote_blocks` instead, under the load's lease: then no
        `ReceivePosted` comes, and the peer takes no part in its end.
        """

    def stop_receive(self, read: RankRead) -> None:
        """Write no further chunk into the blocks of a read that `is_stopped`. `ReceiveStopped` follows once nothing
        writes them, unless the read has ended. Idempotent.
        """

    def drain_receive(self, read: RankRead, sent_chunks: int | None) -> None:
        """Drain a stopped read, of which the peer has sent exactly `sent_chunks` chunks: receive and drop these, and
        cancel the other receives. None means that the peer is lost: cancel all receives. `ReceiveDrained` follows.
        Idempotent.
        """


class EnginePort:
    """Reports to our own engine, and to its log."""

    def log_peer_met(self, engine_id: EngineId, summary: str) -> None:
        """Log that a producer engine has answered, and how its caches differ from ours."""

    def producer_started(self, request_id: str) -> None:
        """Report that the producer has started a followed request, or never will: its load may be asked for."""

    def finish_load(self, load: Load, error: KVConnectorError | None) -> None:
        """Report the end of a load: the engine may use its blocks, or `error` is the reason why it may not."""

    def fail_load(self, request_id: str, error: KVConnectorError) -> None:
        """Report a failed load about which nothing else is certain."""

    def release(
        self,
        request_id: str,
        outcome: str,
        trace: LeaseTrace | None,
        error: KVConnectorError | None = None,
    ) -> None:
        """Let the producer engine reuse the request's blocks. `outcome` is `released` if all consumer ranks confirmed,
        else `expired` or `aborted`, and `error` says why.
        """

    def note_contained(self, subject: str, error: Exception) -> None:
        """Log and count an exception that ended only `subject`. It is being handled, so its traceback is at hand."""


class Ports(NamedTuple):
    """All outputs of a session."""

    links: LinkPort
    data: DataPathPort
    engine: EnginePort
