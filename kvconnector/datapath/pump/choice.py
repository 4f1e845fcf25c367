"""The data path of a worker: without the GIL if that works here, which it has to show, else through Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvconnector.datapath.digests import Digests
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump import selftest
from kvconnector.datapath.pump.copies import ChunkCopies
from kvconnector.datapath.pump.copies_cpu import CpuCopies
from kvconnector.datapath.pump.copies_cuda import CudaCopies
from kvconnector.datapath.pump.copies_plain import PlainCopies
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.datapath.pump.machine import Pace
from kvconnector.datapath.pump.network import Network
from kvconnector.datapath.pump.plain import PlainNetwork
from kvconnector.datapath.pump.pool_reads import PoolReads
from kvconnector.datapath.pump.pool_reads_cpu import CpuReads
from kvconnector.datapath.pump.ucp import UcxNetwork
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import KVConnectorError
from kvconnector.transport import Transport
from kvconnector.transport.ucx import UcxTransport

Direct: TypeAlias = Literal["auto", "always", "never"]

logger = logging.getLogger(__name__)

SELF_TEST_TIMEOUT_S = 10.0
# Seconds between two looks at descriptors, and at what is under way. A GPU's chunk takes tens of microseconds, and
# every look at it may take the driver's locks from the engine's thread.
CPU_LOOKS_S = (50e-6, 0.0)
CUDA_LOOKS_S = (10e-6, 5e-6)
PLAIN_LOOKS_S = (1.0, 0.0)
"""Through Python a look at a descriptor is no cheaper than what it is to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """Settings of a worker, see `StagingConfig` and `PathsConfig`. `quarantine_s`: see `Sends`. Without `pump`
    nothing is tried that does without the GIL, nor with `verify`.
    """

    window: int
    quarantine_s: float
    max_programs: int
    spin_s: float
    direct: Direct
    pump: bool = True
    verify: bool = False


def open_datapath(
    pools: Pools,
    transport: Transport,
    *,
    send_slots: SlotPool | None,
    recv_slots: SlotPool | None,
    options: PathOptions,
    clock: Callable[[], float],
) -> DataPath:
    """A worker's data path; the log says which and why. The worker sends, receives or both."""

    def path_of(network: Network, copies: ChunkCopies, pace: Pace, *, may_read: bool) -> DataPath:
        is_direct = may_read and options.direct != "never"
        return DataPath(
            transport,
            network,
            copies,
            share=_share(pools, copies) if is_direct and send_slots else None,
            reads=_reads(pools, copies) if is_direct and recv_slots else None,
            always_direct=options.direct == "always",
            device=pools.device,
            send_slots=send_slots,
            recv_slots=recv_slots,
            window=options.window,
            quarantine_s=options.quarantine_s,
            pace=pace,
            clock=clock,
        )

    slots = send_slots or recv_slots
    assert slots is not None  # a worker has a role
    if options.verify:
        logger.info("verify=checksum: reads are packed by Python, and each chunk is checked")
    elif options.pump and isinstance(transport, UcxTransport):
        looks_s = CPU_LOOKS_S if pools.device == "cpu" else CUDA_LOOKS_S
        pace = Pace(options.spin_s, *looks_s)
        try:
            network = UcxNetwork(transport)
            _check_pump(transport, network, pools.device, options, pace)
            copies = _copies(pools, slots, options)
            copies.warm_up(packing=send_slots is not None, unpacking=recv_slots is not None)
            path = path_of(network, copies, pace, may_read=True)
        except (KVConnectorError, ImportError, RuntimeError, ValueError) as error:
            logger.warning("transfers take the GIL for every chunk: no pump, because %s", error)
        else:
            logger.info("transfers are pumped without the GIL on %s", pools.device)
            return path
    digests = Digests(pools.device) if options.verify else None
    plain = PlainNetwork(transport, pools.device, (send_slots, recv_slots), clock)
    copies = PlainCopies(pools, **_slot_options(slots, options), digests=digests)
    return path_of(plain, copies, Pace(0.0, *PLAIN_LOOKS_S), may_read=False)


def _check_pump(
    transport: UcxTransport, network: UcxNetwork, device: str, options: PathOptions, pace: Pace
) -> None:
    """Raise `TransportError` unless a worker can send a small read to itself."""
    cache = selftest.TestCache(device)
    slots = SlotPool(selftest.NUM_SLOTS, selftest.SLOT_BYTES, device)
    selftest.check_pump(
        transport,
        network,
        cache,
        _copies(cache.pools, slots, options),
        (slots, SlotPool(selftest.NUM_SLOTS, selftest.SLOT_BYTES, device)),
        pace=pace,
        deadline_s=SELF_TEST_TIMEOUT_S,
    )


def _slot_options(slots: SlotPool, options: PathOptions) -> dict[str, int]:
    return {
        # an address as badly aligned as any slot's
        "slot_address": slots.address(0) | slots.slot_bytes,
        "slot_bytes": slots.slot_bytes,
        "max_programs": options.max_programs,
    }


def _copies(pools: Pools, slots: SlotPool, options: PathOptions) -> ChunkCopies:
    """Copies that need no GIL."""
    if pools.device == "cpu":
        return CpuCopies(pools, slots.slot_bytes)
    return CudaCopies(pools, **_slot_options(slots, options))


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
