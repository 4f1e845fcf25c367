"""Carries out the sessions' commands, and collects what the engine waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvconnector.config import ConnectorConfig
from kvconnector.control.security import check_server
from kvconnector.errors import KVConnectorError, PeerLostError
from kvconnector.runtime.channels import security_of
from kvconnector.runtime.links import Link, Links
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import Phase, RequestTrace, TransferStats
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.events import DIRECT_PATH
from kvconnector.session.export_check import check_export
from kvconnector.session.lease import lease_key
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire import messages as m
from kvconnector.wire.export import PoolExport
from kvconnector.wire.messages import Refusal

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath

logger = logging.getLogger(__name__)

TCP_FALLBACK = "-tcp-fallback"
"""Ends the path of what came by TCP although RDMA ports are active on this host."""


def _of_fields(act: Callable[..., object]) -> Callable[[Any], None]:
    """Return what calls `act` with a command's fields, in order."""

    def carry_out(command: Any) -> None:
        act(*msgspec.structs.astuple(command))

    return carry_out


def _ignore(*fields: object) -> None:
    """Carry out what this worker has nothing for."""


class Executor:
    """Carries commands out on a worker's links and data path. What follows at once goes to the data path's events."""

    def __init__(
        self,
        config: ConnectorConfig,
        links: Links,
        datapath: DataPath,
        *,
        outbox: Outbox,
        hello: m.Hello,
        transport: UcxTransport,
        clock: Callable[[], float],
    ) -> None:
        self._links = links
        self._datapath = datapath
        self._outbox = outbox
        self._hello = hello
        self._transport = transport
        self._security = security_of(config)
        self._slow_load_s = config.slow_load_s
        self._clock = clock

    def actions(self) -> Mapping[type, Callable[[Any], None]]:
        """Return what carries out each kind of command. Failures come back to the sessions as events."""
        datapath, share = self._datapath, self._datapath.share
        # without a share nobody reads these pools
        publish = _ignore if share is None else share.board.publish
        retract = _ignore if share is None else share.board.retract
        return {
            cmd.SendMessage: self._send,
            cmd.OpenLink: self._open_link,
            cmd.CloseLink: self._close_link,
            cmd.OpenEndpoint: _of_fields(datapath.sends.open_endpoint),
            cmd.TakeReply: self._take_reply,
            cmd.ExpectWarmUp: self._expect_warm_up,
            cmd.StartSend: datapath.sends.submit,
            cmd.ExpectReads: _of_fields(datapath.sends.expect),
            cmd.SendProbe: _of_fields(datapath.sends.probe),
            cmd.StopSend: _of_fields(datapath.sends.stop),
            cmd.StartReceive: self._start_receive,
            cmd.StopReceive: _of_fields(datapath.reads.stop),
            cmd.DrainReceive: _of_fields(datapath.receives.drain),
            cmd.LogEngine: _of_fields(
                partial(logger.info, "engine %s is met; here over there: %s")
            ),
            cmd.PublishLease: _of_fields(publish),
            cmd.RetractLease: _of_fields(retract),
            cmd.ReleaseBlocks: self._release,
            cmd.NotifyPrefillStarted: _of_fields(self._outbox.begun),
            cmd.FinishLoad: self._finish_load,
        }

    def _send(self, command: cmd.SendMessage) -> None:
        link, message = self._links.get(command.link), command.message
        if link is None:
            return  # it was lost: the sessions know, or will
        if isinstance(message, m.HelloReply | m.Progress | m.ReadRefused) and message.refusal:
            if isinstance(message, m.HelloReply) or message.refusal is Refusal.UNKNOWN_TRANSFER:
                peer = f"consumer {self._links.peer_of(command.link)}"
                self._links.refusals.note(peer, message.refusal, message.text)
        elif isinstance(message, m.HelloReply):
            # to a consumer that was just connected to: the way for its further messages
            inbox = self._links.answer(link, self._datapath.sends.endpoints.get(link.number))
            message = msgspec.structs.replace(message, control=inbox)
        elif isinstance(message, m.Bye):
            self._links.change_back(link)  # over ZMQ, which outlives what was lost
        elif isinstance(message, m.Heartbeat) and link.export is not None:
            message = msgspec.structs.replace(message, maps_pools=True)
        self._links.send(link, message)

    def _open_link(self, command: cmd.OpenLink) -> None:
        try:
            check_server(self._security, command.address, command.public_key)
            self._links.open(command.link, command.address, command.public_key, command.version)
        except KVConnectorError as error:
            self._datapath.events.append(ev.LinkLost(command.link, error))

    def _take_reply(self, command: cmd.TakeReply) -> None:
        link, reply = self._links.get(command.link), command.reply
        if link is None:
            return
        if reply.transport_address:
            try:
                endpoint = self._transport.connect(reply.transport_address)
            except KVConnectorError as error:
                self._links.lose(link, error)
                return
            link.is_tcp_fallback = self._transport.falls_back_to_tcp(endpoint)
            self._links.change_over(link, endpoint)
        if reply.export is not None:
            self._open_export(link, command, reply.export)

    def _close_link(self, command: cmd.CloseLink) -> None:
        link = self._links.get(command.link)
        if command.link < 0:
            self._datapath.sends.close_endpoint(command.link)
        if link is None:
            return  # it could not be opened, or the peer has left
        if link.number > 0:
            self._datapath.receives.warm_ups.forget(link.number)
        self._links.leave_transport(link)
        if link.export is None:
            self._links.close(link)
        else:
            # last: a producer that closes frees its pools once we have disconnected
            link.export = None
            self._datapath.reads.close(link.number, partial(self._links.close, link))

    def _expect_warm_up(self, command: cmd.ExpectWarmUp) -> None:
        link = self._links.get(command.link)
        if link is None:
            return
        tag, nbytes = self._datapath.receives.expect_warm_up(link.number)
        hello = msgspec.structs.replace(
            self._hello,
            warm_up_tag=tag,
            warm_up_bytes=nbytes,
            control=self._links.open_inbox(link),
            segments=command.segments,
        )
        self._links.send(link, hello)

    def _start_receive(self, command: cmd.StartReceive) -> None:
        link = self._links.get(command.link)
        if link is None:
            lost = PeerLostError("the link to the producer rank is closed")
            self._datapath.events.failed(command.read_id, lost)
        elif link.export is None:
            self._datapath.receives.submit(command)
        else:
            load = command.load
            known_blocks = () if load.is_followed else command.remote_blocks
            key = lease_key(load.key.transfer_id, load.key.secret, known_blocks)
            self._datapath.reads.submit(command, key)

    def _open_export(self, link: Link, command: cmd.TakeReply, export: PoolExport) -> None:
        producer = (command.engine_id, command.theirs.rank)
        try:
            check_export(export, command.theirs)
            how = self._datapath.reads.open(command.link, export)
        except KVConnectorError as error:
            logger.info("reads from %s rank %s are packed: %s", *producer, error)
            self._outbox.read_packed(error.message)
            return
        link.export = command.theirs
        logger.info(
            "reads from %s rank %s are direct (%s): its pools can be read from here", *producer, how
        )

    def _release(self, command: cmd.ReleaseBlocks) -> None:
        trace = RequestTrace(
            request_id=command.request_id,
            kind="hold",
            outcome=command.outcome,
            phases=_dated(command.trace.phases(self._clock())),
        )
        self._outbox.released(command.request_id, command.outcome, trace)

    def _finish_load(self, command: cmd.FinishLoad) -> None:
        if command.error is not None:
            # the scheduler half warns, once for all ranks
            logger.debug("load of request %s failed: %s", command.request_id, command.error)
        trace = self._trace_of(command)
        moved = None
        if trace is not None and command.trace is not None and trace.path:
            moved = TransferStats(
                request_id=command.request_id,
                nbytes=trace.nbytes,
                seconds=command.trace.seconds,
                path=trace.path,
            )
        self._outbox.load_ended(
            command.request_id,
            command.error,
            trace,
            moved,
            filled_tokens=command.filled_tokens,
            extra=command.extra,
        )

    def _trace_of(self, command: cmd.FinishLoad) -> RequestTrace | None:
        """Return when the parts of a load happened. Log it if its blocks waited for long."""
        load, now = command.trace, self._clock()
        if load is None:
            return None
        paths = set()
        for path, number in load.paths:
            link = self._links.get(cmd.LinkId(number))
            is_fallback = path != DIRECT_PATH and link is not None and link.is_tcp_fallback
            paths.add(path + TCP_FALLBACK * is_fallback)
        waited_s = load.waited_s(now)
        trace = RequestTrace(
            request_id=command.request_id,
            kind="load",
            peer=load.peer,
            nbytes=load.nbytes,
            path="+".join(sorted(paths)),
            outcome="done" if command.error is None else type(command.error).__name__,
            phases=_dated(load.phases(now)),
            waited_s=waited_s,
        )
        if 0.0 < self._slow_load_s < waited_s:
            logger.warning("a load took %.3f s: %s", waited_s, trace)
        return trace


def _dated(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Return the phases in seconds since 1970, which the hosts of an engine share."""
    offset_s = time.time() - time.monotonic()
    return tuple([Phase(p.name, p.start_s + offset_s, p.end_s + offset_s) for p in phases])
