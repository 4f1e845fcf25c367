"""The data path of a worker: without the GIL if that works here, which it has to show, else through Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import ChunkCopies
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import KVConnectorError
from kvconnector.transport import Transport
from kvconnector.transport.ucx import UcxTransport

if TYPE_CHECKING:
    from kvconnector.datapath.direct.share import PoolShare
    from kvconnector.datapath.pump.datapath import DataPath
    from kvconnector.datapath.pump.pool_reads import PoolReads

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
    both = (send_slots, recv_slots)
    if options.verify:
        logger.info("verify=checksum: reads are packed by Python, and each chunk is checked")
    elif options.pump and isinstance(transport, UcxTransport):
        try:
            path = _open_pump(pools, transport, *both, options, clock=clock)
        except (KVConnectorError, ImportError, RuntimeError, ValueError) as error:
            logger.warning("transfers take the GIL for every chunk: no pump, because %s", error)
        else:
            logger.info("transfers are pumped without the GIL on %s", pools.device)
            return path
    return _open_plain(pools, transport, *both, options, clock=clock)


def _open_plain(
    pools: Pools,
    transport: Transport,
    send_slots: SlotPool | None,
    recv_slots: SlotPool | None,
    options: PathOptions,
    *,
    clock: Callable[[], float],
) -> DataPath:
    from kvconnector.datapath.digests import Digests
    from kvconnector.datapath.pump.copies_plain import PlainCopies
    from kvconnector.datapath.pump.datapath import DataPath
    from kvconnector.datapath.pump.machine import Pace
    from kvconnector.datapath.pump.plain import PlainNetwork

    slots = _any(send_slots, recv_slots)
    copies = PlainCopies(
        pools,
        slot_address=_alignment(slots),
        slot_bytes=slots.slot_bytes,
        max_programs=options.max_programs,
        digests=Digests(pools.device) if options.verify else None,
    )
    return DataPath(
        transport,
        PlainNetwork(transport, pools.device, (send_slots, recv_slots), clock),
        copies,
        device=pools.device,
        send_slots=send_slots,
        recv_slots=recv_slots,
        window=options.window,
        quarantine_s=options.quarantine_s,
        pace=Pace(0.0, *PLAIN_LOOKS_S),
        clock=clock,
    )


def _open_pump(
    pools: Pools,
    transport: UcxTransport,
    send_slots: SlotPool | None,
    recv_slots: SlotPool | None,
    options: PathOptions,
    *,
    clock: Callable[[], float],
) -> DataPath:
    from kvconnector.datapath.pump import selftest
    from kvconnector.datapath.pump.datapath import DataPath
    from kvconnector.datapath.pump.machine import Pace
    from kvconnector.datapath.pump.ucp import UcxNetwork

    network = UcxNetwork(transport)
    pace = Pace(options.spin_s, *(CPU_LOOKS_S if pools.device == "cpu" else CUDA_LOOKS_S))
    caches = selftest.TestCaches(pools.device)
    small = tuple(SlotPool(selftest.NUM_SLOTS, selftest.SLOT_BYTES, pools.device) for _ in range(2))
    selftest.check_pump(
        transport,
        network,
        caches,
        _copies(caches.pools, small[0], options.max_programs),
        (small[0], small[1]),
        pace=pace,
        deadline_s=SELF_TEST_TIMEOUT_S,
    )
    copies = _copies(pools, _any(send_slots, recv_slots), options.max_programs)
    copies.warm_up(packing=send_slots is not None, unpacking=recv_slots is not None)
    is_direct = options.direct != "never"
    return DataPath(
        transport,
        network,
        copies,
        share=_share(pools, copies) if is_direct and send_slots is not None else None,
        reads=_reads(pools, copies) if is_direct and recv_slots is not None else None,
        always_direct=options.direct == "always",
        device=pools.device,
        send_slots=send_slots,
        recv_slots=recv_slots,
        window=options.window,
        quarantine_s=options.quarantine_s,
        pace=pace,
        clock=clock,
    )


def _any(send_slots: SlotPool | None, recv_slots: SlotPool | None) -> SlotPool:
    slots = send_slots or recv_slots
    assert slots is not None  # a worker has a role
    return slots


def _alignment(slots: SlotPool) -> int:
    """An address as badly aligned as any slot's."""
    return slots.address(0) | slots.slot_bytes


def _share(pools: Pools, copies: ChunkCopies) -> PoolShare | None:
    """This worker's pools for consumers, or None; the log says why not."""
    from kvconnector.datapath.direct.share import PoolShare

    try:
        return PoolShare(pools, copies.open_writer)
    except KVConnectorError as error:
        logger.info("no consumer can read these pools directly: %s", error)
        return None


def _reads(pools: Pools, copies: ChunkCopies) -> PoolReads | None:
    """What reads other workers' pools on the host, or None; the log says why not."""
    from kvconnector.datapath.pump.copies_cuda import CudaCopies

    try:
        if isinstance(copies, CudaCopies):
            from kvconnector.datapath.pump.pool_reads_cuda import CudaReads

            return CudaReads(pools, copies)
        from kvconnector.datapath.pump.pool_reads_cpu import CpuReads

        return CpuReads(pools)
    except KVConnectorError as error:
        logger.info("no producer's pools can be read directly: %s", error)
        return None


def _copies(pools: Pools, slots: SlotPool, max_programs: int) -> ChunkCopies:
    if pools.device == "cpu":
        from kvconnector.datapath.pump.copies_cpu import CpuCopies

        return CpuCopies(pools, slots.slot_bytes)
    from kvconnector.datapath.pump.copies_cuda import CudaCopies

    return CudaCopies(
        pools,
        slot_address=_alignment(slots),
        slot_bytes=slots.slot_bytes,
        max_programs=max_programs,
    )
