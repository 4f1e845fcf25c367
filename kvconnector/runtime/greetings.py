"""What workers greet each other with: a consumer's hello, and a producer's answer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from kvconnector import __version__
from kvconnector.config import ConnectorConfig
from kvconnector.datapath.pools import Pools
from kvconnector.ids import Incarnation, Rank
from kvconnector.topology import EngineGeometry
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire import messages as m
from kvconnector.wire.export import PoolExport
from kvconnector.wire.packed_geometry import PackedGeometry

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath

logger = logging.getLogger(__name__)


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
