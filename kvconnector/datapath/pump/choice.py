"""The data path of a worker: without the GIL if that works here, which it has to show, else through Python."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump import selftest
from kvconnector.datapath.pump.copies import ChunkCopies, program_cap
from kvconnector.datapath.pump.copies_cpu import CpuCopies
from kvconnector.datapath.pump.copies_cuda import CudaCopies
from kvconnector.datapath.pump.copies_plain import ROOM_BYTES, Digests, PlainCopies
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.datapath.pump.machine import Pace
from kvconnector.datapath.pump.network import Network, UcxNetwork
from kvconnector.datapath.pump.plain import PlainNetwork
from kvconnector.datapath.pump.pool_reads import PoolReads
from kvconnector.datapath.pump.pool_reads_cpu import CpuReads
from kvconnector.datapath.staging import SlotPool, slots_within
from kvconnector.errors import ConfigError, KVConnectorError
from kvconnector.transport import Transport
from kvconnector.transport.ucx import UcxTransport

logger = logging.getLogger(__name__)

# Seconds between two looks at descriptors, and at what is under way. A GPU's chunk takes tens of microseconds, and
# every look at it may take the driver's locks from the engine's thread.
CPU_LOOKS_S = (50e-6, 0.0)
CUDA_LOOKS_S = (10e-6, 5e-6)
PLAIN_LOOKS_S = (1.0, 0.0)
"""Through Python a look at a descriptor is no cheaper than what it is to save."""


def open_datapath(
    config: ConnectorConfig,
    pools: Pools,
    transport: Transport,
    clock: Callable[[], float] = time.monotonic,
) -> DataPath:
    """A worker's data path, with as many slots as the staging budget pays for; the log says which and why. Raises
    ConfigError: one token of one part of some layer does not fit a chunk, or what checks chunks is not installed.
    """
    send_slots, recv_slots = _open_slots(config, pools)
    slots = send_slots or recv_slots
    assert slots is not None  # a worker has a role
    is_verified, device = config.verify == "checksum", pools.device
    max_programs = program_cap(config.staging.max_programs, device)

    def path_of(network: Network, copies: ChunkCopies, pace: Pace, *, may_read: bool) -> DataPath:
        is_direct = may_read and config.paths.direct != "never"
        return DataPath(
            transport,
            network,
            copies,
            share=_share(pools, copies) if is_direct and send_slots else None,
            reads=_reads(pools, copies) if is_direct and recv_slots else None,
            always_direct=config.paths.direct == "always",
            device=device,
            send_slots=send_slots,
            recv_slots=recv_slots,
            window=config.staging.window,
            quarantine_s=config.peer.timeout_s,
            pace=pace,
            clock=clock,
        )

    if is_verified:
        logger.info("verify=checksum: reads are packed by Python, and each chunk is checked")
    elif config.staging.pump and isinstance(transport, UcxTransport):
        looks_s = CPU_LOOKS_S if device == "cpu" else CUDA_LOOKS_S
        pace = Pace(config.spin_s(device), *looks_s)
        try:
            network = UcxNetwork(transport)
            make_copies = partial(_copies, max_programs=max_programs)
            selftest.check_pump(transport, network, device, make_copies, pace)
            copies = make_copies(pools, slots)
            copies.warm_up(packing=send_slots is not None, unpacking=recv_slots is not None)
            path = path_of(network, copies, pace, may_read=True)
        except (KVConnectorError, ImportError, RuntimeError, ValueError) as error:
            logger.warning("transfers take the GIL for every chunk: no pump, because %s", error)
        else:
            logger.info("transfers are pumped without the GIL on %s", device)
            return path
    digests = Digests(device) if is_verified else None
    plain = PlainNetwork(transport, device, (send_slots, recv_slots), clock)
    copies = PlainCopies(pools, **_slot_options(slots, max_programs), digests=digests)
    return path_of(plain, copies, Pace(0.0, *PLAIN_LOOKS_S), may_read=False)


def _open_slots(config: ConnectorConfig, pools: Pools) -> tuple[SlotPool | None, SlotPool | None]:
    """For sending and for receiving, as the role asks for."""
    slot_bytes = config.chunk_bytes(pools.device)
    for group in pools.groups:
        for part in group.geometry.parts:
            if part.token_bytes > slot_bytes:
                raise ConfigError(
                    "staging.chunk_bytes is smaller than one token of one part",
                    chunk_bytes=slot_bytes,
                    part=part.name,
                    token_bytes=part.token_bytes,
                )
    slot_bytes += ROOM_BYTES if config.verify == "checksum" else 0
    wanted = config.role != "consumer", config.role != "producer"
    num_slots = slots_within(config.staging.budget_bytes, slot_bytes, sum(wanted))
    send, recv = (
        SlotPool(num_slots, slot_bytes, pools.device) if each else None for each in wanted
    )
    return send, recv


def _slot_options(slots: SlotPool, max_programs: int) -> dict[str, int]:
    return {
        # an address as badly aligned as any slot's
        "slot_address": slots.address(0) | slots.slot_bytes,
        "slot_bytes": slots.slot_bytes,
        "max_programs": max_programs,
    }


def _copies(pools: Pools, slots: SlotPool, max_programs: int) -> ChunkCopies:
    """Copies that need no GIL."""
    if pools.device == "cpu":
        return CpuCopies(pools, slots.slot_bytes)
    return CudaCopies(pools, **_slot_options(slots, max_programs))


def _share(pools: Pools, copies: ChunkCopies) -> PoolExporter | None:
    """This worker's pools for consumers, or None; the log says why not."""
    try:
        with ExitStack() as stack:
            board = LeaseBoard(copies.open_writer)
            stack.callback(board.close)
            share = PoolExporter(pools, board)
            stack.pop_all()
            return share
    except KVConnectorError as error:
        logger.info("no consumer can read these pools directly: %s", error)
        return None


def _reads(pools: Pools, copies: ChunkCopies) -> PoolReads | None:
    """What reads other workers' pools on the host, or None; the log says why not."""
    try:
        if isinstance(copies, CudaCopies):
            # not before: it loads Triton
            from kvconnector.datapath.pump.pool_reads_cuda import CudaReads

            return CudaReads(pools, copies)
        return CpuReads(pools)
    except KVConnectorError as error:
        logger.info("no producer's pools can be read directly: %s", error)
        return None
