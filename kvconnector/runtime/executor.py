"""Carrying out the sessions' commands, and collecting what the engine is to be told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvconnector import __version__
from kvconnector.config import ConnectorConfig
from kvconnector.control.security import Security, check_server
from kvconnector.datapath.base import DirectRead, Program, SegmentWindow
from kvconnector.datapath.pools import Pools, window_in
from kvconnector.errors import KVConnectorError
from kvconnector.ids import Incarnation, Rank
from kvconnector.runtime.outbox import Outbox
from kvconnector.runtime.traces import Traces
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.session.export_check import check_export
from kvconnector.session.lease import lease_key
from kvconnector.topology import EngineGeometry, RankGeometry
from kvconnector.transport import Transport
from kvconnector.wire import encode
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from kvconnector.wire.packed_geometry import PackedGeometry

if TYPE_CHECKING:
    from kvconnector.runtime.driver import Driver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Route:
    """What all reads of one producer worker share: windows of their segments here and, if reachable, there."""

    segments: tuple[m.ReadSegment, ...]
    ours: tuple[SegmentWindow, ...]
    theirs: tuple[SegmentWindow, ...] | None


def hello_of(
    engine: EngineGeometry,
    rank: Rank,
    incarnation: Incarnation,
    config: ConnectorConfig,
    transport: Transport,
) -> m.Hello:
    """What a consumer worker says to each producer worker; the warm-up message and the inbox differ."""
    return m.Hello(
        geometry=PackedGeometry.of(engine),
        pp_rank=rank.pp_rank,
        tp_rank=rank.tp_rank,
        incarnation=incarnation,
        transport_address=transport.address,
        warm_up_tag=0,
        warm_up_bytes=0,
        library_version=__version__,
        timeout_ms=m.milliseconds(config.peer.timeout_s),
    )


class Executor:
    """Carries commands out on a driver's channel, links and data path."""

    def __init__(
        self,
        driver: Driver,
        *,
        outbox: Outbox,
        pools: Pools,
        hello: m.Hello,
        transport: Transport,
        security: Security,
        traces: Traces,
    ) -> None:
        self._driver = driver
        self._outbox = outbox
        self._pools = pools
        self._hello = hello
        self._transport = transport
        self._control_endpoints: dict[LinkId, int] = {}
        self._exports: dict[LinkId, RankGeometry] = {}
        self._routes: dict[LinkId, _Route] = {}
        self._security = security
        self._traces = traces

    def actions(self) -> Mapping[type, Callable[[Any], None]]:
        """What carries out each kind of command. Failures come back to the sessions as events."""
        datapath = self._driver.datapath
        return {
            cmd.SendMessage: self._send,
            cmd.OpenLink: self._open_link,
            cmd.CloseLink: self._close_link,
            cmd.OpenEndpoint: lambda c: datapath.open_endpoint(
                c.link, c.transport_address, c.warm_up_tag, c.warm_up_bytes
            ),
            cmd.ConnectBack: self._connect_back,
            cmd.CloseEndpoint: self._close_endpoint,
            cmd.ExpectWarmUp: self._expect_warm_up,
            cmd.StartSend: self._start_send,
            cmd.ExpectReads: lambda c: datapath.expect_send(c.blocks),
            cmd.SendProbe: lambda c: datapath.send_probe(c.link, c.probe),
            cmd.StopSend: lambda c: datapath.stop_send(c.link, c.read_id),
            cmd.StartReceive: self._start_receive,
            cmd.StopReceive: lambda c: datapath.stop_receive(c.read_id),
            cmd.DrainReceive: lambda c: datapath.drain_receive(c.read_id, c.sent_chunks),
            cmd.OpenExport: self._open_export,
            cmd.PublishLease: lambda c: datapath.publish_lease(c.key, *c.watermark),
            cmd.RetractLease: lambda c: datapath.retract_lease(c.key),
            cmd.ReleaseBlocks: self._release,
            cmd.NotifyPrefillStarted: lambda c: self._outbox.begun(c.request_id),
            cmd.FinishLoad: self._finish_load,
        }

    def _send(self, command: cmd.SendMessage) -> None:
        message = command.message
        if isinstance(message, m.HelloReply | m.Progress | m.ReadRefused) and message.refusal:
            if isinstance(message, m.HelloReply) or message.refusal is Refusal.UNKNOWN_TRANSFER:
                peer = f"consumer {self._driver.peer_of(command.link)}"
                self._driver.refusals.note(peer, message.refusal, message.text)
        elif isinstance(message, m.HelloReply):
            message = self._with_inbox(command.link, message)
        elif isinstance(message, m.Heartbeat) and command.link in self._exports:
            message = msgspec.structs.replace(message, maps_pools=True)
        self._driver.links.outgoing.add(command.link, encode(message))

    def _with_inbox(self, link: LinkId, reply: m.HelloReply) -> m.HelloReply:
        """The reply to a consumer that was just connected to, with the way for its further messages."""
        endpoint = self._driver.datapath.endpoint(link)
        inbox = self._driver.tagged.answer(link, endpoint) if endpoint is not None else None
        return msgspec.structs.replace(reply, control=inbox)

    def _open_link(self, command: cmd.OpenLink) -> None:
        try:
            check_server(self._security, command.address, command.public_key)
            handle = self._driver.control.connect(command.address, command.public_key)
        except KVConnectorError as error:
            self._driver.submit(ev.LinkLost(command.link, error))
            return
        self._driver.links.add(command.link, handle)

    def _connect_back(self, command: cmd.ConnectBack) -> None:
        try:
            endpoint = self._transport.connect(command.transport_address)
        except KVConnectorError as error:
            self._driver.drop_link(command.link, error)
            return
        self._control_endpoints[command.link] = endpoint
        if self._transport.falls_back_to_tcp(endpoint):
            self._traces.tcp_fallbacks.add(command.link)
        self._driver.links.outgoing.flush_link(command.link)
        self._driver.tagged.open(command.link, endpoint)

    def _close_link(self, command: cmd.CloseLink) -> None:
        self._routes.pop(command.link, None)
        self._traces.tcp_fallbacks.discard(command.link)
        if command.link > 0:
            self._driver.datapath.forget_warm_up(command.link)
        self._driver.links.outgoing.flush_link(command.link)
        self._driver.tagged.remove(command.link)
        endpoint = self._control_endpoints.pop(command.link, None)
        if endpoint is not None:
            self._transport.disconnect(endpoint)
        disconnect = partial(self._driver.disconnect, command.link)
        if self._exports.pop(command.link, None) is None:
            disconnect()
        else:
            # last: a producer that closes frees its pools once we have disconnected
            self._driver.datapath.close_export(command.link, disconnect)

    def _close_endpoint(self, command: cmd.CloseEndpoint) -> None:
        self._driver.links.outgoing.flush_link(command.link)
        self._driver.tagged.close_endpoint(command.link)
        self._driver.datapath.close_endpoint(command.link)

    def _expect_warm_up(self, command: cmd.ExpectWarmUp) -> None:
        tag, nbytes = self._driver.datapath.expect_warm_up(command.link)
        hello = msgspec.structs.replace(
            self._hello,
            warm_up_tag=tag,
            warm_up_bytes=nbytes,
            control=self._driver.tagged.open_inbox(command.link),
        )
        self._send(cmd.SendMessage(command.link, hello))

    def _start_send(self, command: cmd.StartSend) -> None:
        read = command.read
        program = Program(
            segments=tuple(self._pools.window(segment) for segment in read.segments),
            chunks=command.chunks,
            blocks=command.blocks,
        )
        self._driver.datapath.submit_send(
            command.link, read.read_id, program, first_tag=read.first_tag, window=read.window
        )

    def _start_receive(self, command: cmd.StartReceive) -> None:
        source, transfer = command.source, command.transfer
        route = self._route(command.link, command.segments)
        if route.theirs is None:
            program = Program(route.ours, source.chunks, command.blocks)
            self._driver.datapath.submit_receive(command.read_id, program)
            for event in self._driver.datapath.reported():
                self._driver.submit(event)
            return
        known_blocks = () if command.is_followed else command.remote_blocks
        self._driver.datapath.submit_direct(
            DirectRead(
                read_id=command.read_id,
                link=command.link,
                segments=route.ours,
                their_segments=route.theirs,
                members=source.members,
                rows=source.rows,
                blocks=command.blocks,
                their_blocks=command.remote_blocks,
                lease_key=lease_key(transfer.transfer_id, transfer.secret, known_blocks),
                cut=lambda: source.chunks,
                token_stop=source.token_stop,
                layer_stop=source.layer_stop,
            )
        )

    def _route(self, link: LinkId, segments: tuple[m.ReadSegment, ...]) -> _Route:
        route = self._routes.get(link)
        if route is None or route.segments is not segments:
            theirs = self._exports.get(link)
            route = _Route(
                segments,
                ours=tuple(self._pools.window(s) for s in segments),
                theirs=None
                if theirs is None
                else tuple(window_in(s, theirs.groups[s.group]) for s in segments),
            )
            self._routes[link] = route
        return route

    def _open_export(self, command: cmd.OpenExport) -> None:
        producer = (command.engine_id, command.theirs.rank)
        try:
            check_export(command.export, command.theirs)
            how = self._driver.datapath.open_export(command.link, command.export)
        except KVConnectorError as error:
            logger.info("reads from %s rank %s are packed: %s", *producer, error)
            return
        self._exports[command.link] = command.theirs
        self._routes.pop(command.link, None)
        logger.info(
            "reads from %s rank %s are direct (%s): its pools can be read from here", *producer, how
        )

    def _release(self, command: cmd.ReleaseBlocks) -> None:
        stats = self._traces.release(command, self._driver.clock())
        self._outbox.released(command.request_id, command.outcome, stats)

    def _finish_load(self, command: cmd.FinishLoad) -> None:
        stats = self._traces.finish_load(command, self._driver.clock())
        if command.error is not None:
            # the scheduler half warns, once for all ranks
            logger.debug("load of request %s failed: %s", command.request_id, command.error)
            self._outbox.failed(command.request_id, command.error, stats)
            return
        self._outbox.loaded(command.request_id, stats)
