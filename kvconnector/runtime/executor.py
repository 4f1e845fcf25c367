"""The sessions' ports, which act through links, the data path and the outbox; and the content of greetings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from kvconnector._version import __version__
from kvconnector.config import ConnectorConfig
from kvconnector.control.base import MessageTooLargeError
from kvconnector.control.security import check_server
from kvconnector.datapath.direct.export_check import check_export
from kvconnector.datapath.pools import Pools
from kvconnector.errors import IncompatiblePeerError, KVConnectorError
from kvconnector.ids import EngineId, Incarnation, Rank
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.planning import Route
from kvconnector.runtime.links import Links
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import RequestTrace
from kvconnector.session import events as ev
from kvconnector.session.containment import WorkerFault
from kvconnector.session.lease import Send
from kvconnector.session.link import Link
from kvconnector.session.load import Load, RankRead, RemoteWorker
from kvconnector.session.peers import Peer
from kvconnector.session.port import DataPathPort, EnginePort, LinkPort, Ports
from kvconnector.session.trace import LeaseTrace
from kvconnector.topology import EngineGeometry, Segment
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire import messages as m
from kvconnector.wire.export import PoolExport
from kvconnector.wire.packed_geometry import PackedGeometry

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath

logger = logging.getLogger(__name__)


_COMPLETED = frozenset({m.DirectoryRequest, m.HelloReply})
"""Messages to which `SessionLinks` adds what only this side of the port knows."""

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")


def of_worker(call: Callable[ArgumentsP, ResultT]) -> Callable[ArgumentsP, ResultT]:
    """Mark a call of the data path or the transport: an unexpected exception there ends the worker, since what these
    share with the loop and the network may be torn.
    """

    @wraps(call)
    def guarded(*arguments: ArgumentsP.args, **named: ArgumentsP.kwargs) -> ResultT:
        try:
            return call(*arguments, **named)
        except KVConnectorError:
            raise
        except Exception as error:
            raise WorkerFault(f"{call.__name__} failed: {error!r}") from error

    return guarded


class SessionLinks(LinkPort):
    """The sessions' connections to peers: their control channels, endpoints and mappings."""

    def __init__(self, links: Links, datapath: DataPath, outbox: Outbox, hello: m.Hello) -> None:
        self._links = links
        self._datapath = datapath
        self._outbox = outbox
        self._hello = hello

    def send(self, link: Link, message: m.Message) -> None:
        if type(message) in _COMPLETED:
            self._send_completed(link, message)
        else:
            self._links.send(link, message)

    def _send_completed(self, link: Link, message: m.Message) -> None:
        """Send one of `_COMPLETED`, with its other fields."""
        if isinstance(message, m.HelloReply) and not message.refusal:
            inbox = self._links.answer_inbox(link, self._datapath.sends.endpoint(link))
            self._answer(link, msgspec.structs.replace(message, control=inbox))
            return
        if isinstance(message, m.DirectoryRequest):
            limit = self._hello.max_message_bytes
            message = msgspec.structs.replace(message, max_message_bytes=limit)
        self._links.send(link, message)

    def _answer(self, link: Link, reply: m.HelloReply) -> None:
        """Answer a consumer. If the answer is too long for it, leave the export out; its reads are then packed. Raises:
        IncompatiblePeerError: even without the export the answer is too long.
        """
        try:
            self._links.send(link, reply)
            return
        except MessageTooLargeError as error:
            why = _too_long("the answer to a greeting", error)
        if reply.export is not None:
            self._links.refusals.note(
                f"direct reads to consumer {self._links.peer_of(link)}",
                "AnswerTooLong",
                f"{why}; its reads are packed: raise it on the decode engine",
            )
            reply = msgspec.structs.replace(reply, export=None, text=why[: m.MAX_TEXT])
            with suppress(MessageTooLargeError):
                self._links.send(link, reply)
                return
        raise IncompatiblePeerError(f"{why}: raise it on the decode engine")

    def open_link(self, link: Link, address: str, public_key: str, version: int) -> None:
        try:
            check_server(self._links.control.security, address, public_key)
            self._links.open(link, address, public_key, version)
        except KVConnectorError as error:
            self._datapath.events.append(ev.LinkLost(link, error))

    @of_worker
    def close_link(self, link: Link) -> None:
        self._links.leave_transport(link)
        self._datapath.sends.close_endpoint(link)
        self._datapath.receives.disconnect(link)
        # last: a producer that closes frees its pools once we have disconnected
        self._datapath.reads.close(link, partial(self._links.close, link))

    def send_hello(
        self, link: Link, segments: tuple[Segment, ...], max_message_bytes: int = 0
    ) -> None:
        if not self._links.is_connected(link):
            return
        self._links.limit_messages(link, max_message_bytes)
        tag, nbytes = self._expect_warm_up(link)
        hello = msgspec.structs.replace(
            self._hello,
            warm_up_tag=tag,
            warm_up_bytes=nbytes,
            control=self._links.open_inbox(link),
            segments=segments,
        )
        try:
            self._links.send(link, hello)
        except MessageTooLargeError as error:
            ours, theirs = hello.max_message_bytes, max_message_bytes or hello.max_message_bytes
            side = "the prefill engine" if theirs < ours else "the decode engine"
            why = _too_long("the greeting", error)
            raise IncompatiblePeerError(
                f"{why}: raise it on {'both engines' if ours == theirs else side}"
            ) from error

    @of_worker
    def _expect_warm_up(self, link: Link) -> tuple[int, int]:
        return self._datapath.receives.expect_warm_up(link)

    @of_worker
    def connect_back(self, worker: RemoteWorker, reply: m.HelloReply) -> None:
        if not self._links.is_connected(worker.link):
            return
        if reply.transport_address:
            try:
                endpoint = self._datapath.receives.connect_back(
                    worker.link, reply.transport_address
                )
            except KVConnectorError as error:
                self._links.lose(worker.link, error)
                return
            self._links.use_endpoint(worker.link, endpoint)
        self._reach_pools(worker, reply.export)
        if reply.export is None and reply.text:
            rank = worker.geometry.rank
            logger.info(
                "reads from rank %s are packed, because its engine says: %s", rank, reply.text
            )
            self._outbox.read_packed("its engine says why, see this rank's log")

    @of_worker
    def unmap_pools(self, link: Link) -> None:
        unmapped = partial(self._datapath.events.append, ev.PoolsUnmapped(link))
        self._datapath.reads.close(link, unmapped)

    @of_worker
    def map_pools(self, worker: RemoteWorker, export: PoolExport) -> None:
        self._reach_pools(worker, export)

    def _reach_pools(self, worker: RemoteWorker, export: PoolExport | None) -> None:
        routes = [each for each in worker.engine.routes if each.peer == worker.geometry.rank]
        if export is not None:
            self._open_export(worker, export, routes)
        if not worker.link.maps_pools:
            for route in routes:
                self._datapath.prepare_chunks(route, packing=False)

    def _open_export(
        self, worker: RemoteWorker, export: PoolExport, routes: Sequence[Route]
    ) -> None:
        producer = (worker.engine.name.engine_id, worker.geometry.rank)
        if reason := self._datapath.reads.why_packed:
            logger.info("reads from %s rank %s are packed: %s", *producer, reason)
            self._outbox.read_packed(reason)
            return
        try:
            check_export(export, worker.geometry)
            how = self._datapath.reads.open(worker.link, export, routes)
        except KVConnectorError as error:
            logger.info("reads from %s rank %s are packed: %s", *producer, error)
            self._outbox.read_packed(error.message)
            return
        logger.info(
            "reads from %s rank %s are direct (%s): its pools can be read from here", *producer, how
        )


class SessionDataPath(DataPathPort):
    """The sessions' reads and sends, and the lease board."""

    def __init__(self, datapath: DataPath) -> None:
        self._datapath = datapath

    @of_worker
    def open_endpoint(self, link: Link, hello: m.Hello) -> None:
        if isinstance(link.peer, Peer) and link.peer.route is not None:
            self._datapath.prepare_chunks(link.peer.route, packing=True)
        self._datapath.sends.open_endpoint(link, hello)

    @of_worker
    def probe(self, link: Link, probe: m.Probe) -> None:
        self._datapath.sends.probe(link, probe)

    @of_worker
    def expect_reads(self, blocks: tuple[GroupBlocks, ...]) -> None:
        self._datapath.sends.expect(blocks)

    @of_worker
    def start_send(self, send: Send) -> None:
        self._datapath.sends.submit(send)

    @of_worker
    def stop_send(self, send: Send) -> None:
        self._datapath.sends.stop(send)

    @of_worker
    def publish(self, key: bytes, watermark: Watermark) -> None:
        if self._datapath.board is not None:  # otherwise nobody reads these pools
            self._datapath.board.publish(key, watermark)

    @of_worker
    def retract(self, key: bytes) -> None:
        if self._datapath.board is not None:
            self._datapath.board.retract(key)

    @of_worker
    def start_receive(self, read: RankRead) -> None:
        self._datapath.reads.submit(read)

    @of_worker
    def stop_receive(self, read: RankRead) -> None:
        self._datapath.reads.stop(read)

    @of_worker
    def drain_receive(self, read: RankRead, sent_chunks: int | None) -> None:
        self._datapath.receives.drain(read, sent_chunks)


class SessionReports(EnginePort):
    """The sessions' reports to the engine, and to its log."""

    def __init__(self, outbox: Outbox, clock: Callable[[], float], slow_load_s: float) -> None:
        self._outbox = outbox
        self._clock = clock
        self._slow_load_s = slow_load_s

    def log_peer_met(self, engine_id: EngineId, summary: str) -> None:
        logger.info("greeted engine %s; this engine relative to it: %s", engine_id, summary)

    def producer_started(self, request_id: str) -> None:
        self._outbox.producer_started(request_id)

    def release(
        self,
        request_id: str,
        outcome: str,
        trace: LeaseTrace | None,
        error: KVConnectorError | None = None,
    ) -> None:
        held = None
        if trace is not None:
            phases = trace.phases(self._clock(), time.time() - time.monotonic())
            held = RequestTrace(request_id=request_id, kind="hold", outcome=outcome, phases=phases)
        self._outbox.released(request_id, outcome, held, error)

    def finish_load(self, load: Load, error: KVConnectorError | None) -> None:
        if error is not None:
            # the scheduler half warns, once for all ranks
            logger.debug("load of request %s failed: %s", load.request_id, error)
        outcome = "done" if error is None else type(error).__name__
        ahead_s = time.time() - time.monotonic()
        trace = load.trace.ended(load.request_id, outcome, self._clock(), ahead_s)
        if 0.0 < self._slow_load_s < trace.waited_s:
            logger.warning("a load took %.3f s: %s", trace.waited_s, trace)
        self._outbox.load_ended(
            load.request_id, error, trace, filled_tokens=load.filled_tokens, extra=load.extra
        )

    def fail_load(self, request_id: str, error: KVConnectorError) -> None:
        self._outbox.load_ended(request_id, error)

    def note_contained(self, subject: str, error: Exception) -> None:
        self._outbox.note_contained(subject, error)


def _too_long(what: str, error: MessageTooLargeError) -> str:
    sizes = "{message_bytes} bytes, and the shorter control.max_message_bytes of both is {max_message_bytes}"
    return f"{what} has {sizes.format(**error.context)}"


def session_ports(
    links: Links, datapath: DataPath, outbox: Outbox, *, hello: m.Hello, slow_load_s: float
) -> Ports:
    """Return the sessions' ports. Immediate consequences are added to the data path's events."""
    return Ports(
        SessionLinks(links, datapath, outbox, hello),
        SessionDataPath(datapath),
        SessionReports(outbox, datapath.clock, slow_load_s),
    )


def hello_of(
    engine: EngineGeometry,
    rank: Rank,
    incarnation: Incarnation,
    config: ConnectorConfig,
    transport: UcxTransport,
) -> m.Hello:
    """Return the greeting of a consumer worker to each producer worker; the warm-up message and the inbox differ."""
    return m.Hello(
        geometry=PackedGeometry.of(engine),
        pp_rank=rank.pp_rank,
        tp_rank=rank.tp_rank,
        incarnation=incarnation,
        transport_address=transport.address,
        warm_up_tag=0,
        warm_up_bytes=0,
        library_version=__version__,
        timeout_ms=m.stated_timeout_ms(config.peer.timeout_s),
        max_message_bytes=config.control.max_message_bytes,
    )


def hello_reply(
    config: ConnectorConfig,
    pools: Pools,
    transport: UcxTransport,
    datapath: DataPath,
    incarnation: Incarnation,
) -> m.HelloReply:
    """Return a producer worker's answer to the consumers that it accepts."""
    export, why_packed = _export_that_fits(config, datapath)
    return m.HelloReply(
        incarnation=incarnation,
        text=why_packed[: m.MAX_TEXT],
        transport_address=transport.address,
        max_chunk_bytes=config.chunk_bytes(pools.device, pools.largest_row_bytes),
        export=export,
        timeout_ms=m.stated_timeout_ms(config.peer.timeout_s),
        lease_ms=m.stated_timeout_ms(config.lease.duration_s),
        max_message_bytes=config.control.max_message_bytes,
    )


def _export_that_fits(config: ConnectorConfig, datapath: DataPath) -> tuple[PoolExport | None, str]:
    """Return the export with which consumers map the pools, or why there is none: no greeting could carry it, or the
    data path's reason.
    """
    export = datapath.export
    if export is None:
        return None, datapath.why_packed
    nbytes = len(msgspec.msgpack.encode(export))
    # the other half is for the rest of the greeting
    if nbytes > config.control.max_message_bytes // 2:
        reason = (
            f"its description has {nbytes} bytes, and control.max_message_bytes is"
            f" {config.control.max_message_bytes}"
        )
        logger.warning("no consumer can read these pools directly: %s", reason)
        return None, reason
    return export, ""
