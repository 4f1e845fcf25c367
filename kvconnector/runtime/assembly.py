"""Putting a worker's driver together: the sessions of its roles, and what executes their commands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvconnector.config import ConnectorConfig
from kvconnector.control.base import ControlChannel
from kvconnector.datapath.pools import Pools
from kvconnector.ids import Incarnation, Rank
from kvconnector.runtime.channels import security_of
from kvconnector.runtime.driver import Driver
from kvconnector.runtime.executor import Executor, hello_of
from kvconnector.runtime.links import Links
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.topology import EngineGeometry
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire import messages as m
from kvconnector.wire.export import PoolExport

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath

logger = logging.getLogger(__name__)


def build_driver(
    config: ConnectorConfig,
    *,
    engine: EngineGeometry,
    rank: Rank,
    incarnation: Incarnation,
    pools: Pools,
    control: ControlChannel,
    transport: UcxTransport,
    datapath: DataPath,
    outbox: Outbox,
    intake: Callable[[Driver], None] = lambda driver: None,
    clock: Callable[[], float] = time.monotonic,
) -> Driver:
    """A driver with the sessions that the engine's role asks for. `intake`: see `Driver`."""
    producer = consumer = None
    if config.role != "consumer":
        reply = hello_reply(config, pools, transport, datapath, incarnation)
        producer = ProducerSession(engine, rank, reply, config.lease, config.peer.timeout_s)
    if config.role != "producer":
        consumer = ConsumerSession(
            engine,
            rank,
            config.peer,
            chunk_bytes=config.chunk_bytes(pools.device),
            orders=pools.orders(),
            stream=config.stream,
        )

    events = datapath.events
    links = Links(
        control,
        transport,
        max_message_bytes=config.control.max_message_bytes,
        over_ucx=config.control.over_ucx,
        report=events.append,
    )
    executor = Executor(
        links,
        datapath,
        outbox=outbox,
        hello=hello_of(engine, rank, incarnation, config, transport),
        transport=transport,
        security=security_of(config),
        slow_load_s=config.slow_load_s,
        report=events.append,
        clock=clock,
    )
    return Driver(
        links=links,
        datapath=datapath,
        actions=executor.actions(),
        events=events,
        producer=producer,
        consumer=consumer,
        intake=intake,
        clock=clock,
    )


def hello_reply(
    config: ConnectorConfig,
    pools: Pools,
    transport: UcxTransport,
    datapath: DataPath,
    incarnation: Incarnation,
) -> m.HelloReply:
    """Return what a producer worker answers the consumers that it takes."""
    return m.HelloReply(
        incarnation=incarnation,
        transport_address=transport.address,
        max_chunk_bytes=config.chunk_bytes(pools.device),
        export=_export_that_fits(config, datapath),
        timeout_ms=m.stated_timeout_ms(config.peer.timeout_s),
        lease_ms=m.stated_timeout_ms(config.lease.duration_s),
    )


def _export_that_fits(config: ConnectorConfig, datapath: DataPath) -> PoolExport | None:
    """Return what consumers need to map the pools, unless no greeting could carry it."""
    export = None if datapath.share is None else datapath.share.message
    nbytes = 0 if export is None else len(msgspec.msgpack.encode(export))
    # the other half is for the rest of the greeting
    if nbytes > config.control.max_message_bytes // 2:
        logger.warning(
            "no consumer can read these pools directly: its description has %s bytes, and"
            " control.max_message_bytes is %s",
            nbytes,
            config.control.max_message_bytes,
        )
        return None
    return export
