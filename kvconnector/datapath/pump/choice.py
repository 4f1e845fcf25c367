"""The choice between the pump and the plain data path: by what works here, told once in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copying import ChunkCopies
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import KVConnectorError

if TYPE_CHECKING:
    from kvconnector.datapath.direct.share import PoolShare
    from kvconnector.datapath.pump.datapath import PumpDataPath
    from kvconnector.datapath.pump.pulling import PoolReads
    from kvconnector.transport.ucx import UcxTransport

Direct: TypeAlias = Literal["auto", "always", "never"]

logger = logging.getLogger(__name__)

SELF_TEST_TIMEOUT_S = 10.0
# Seconds between two looks at descriptors, and at what is under way. A GPU's chunk takes tens of microseconds, and
# every look at it may take the driver's locks from the engine's thread.
CPU_LOOKS_S = (50e-6, 0.0)
CUDA_LOOKS_S = (10e-6, 5e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class PumpOptions:
    """Settings of a worker, see `StagingConfig` and `PathsConfig`. `quarantine_s`: see `PumpSends`."""

    window: int
    quarantine_s: float
    max_programs: int
    spin_s: float
    direct: Direct


def open_pump(
    pools: Pools,
    transport: UcxTransport,
    *,
    send_slots: SlotPool | None,
    recv_slots: SlotPool | None,
    options: PumpOptions,
    clock: Callable[[], float],
) -> PumpDataPath | None:
    """The pump, if it can be used and has shown that it works; else None, and the log says why."""
    try:
        path = _open(pools, transport, send_slots, recv_slots, options, clock=clock)
    except (KVConnectorError, ImportError, RuntimeError, ValueError) as error:
        logger.warning("transfers take the GIL for every chunk: no pump, because %s", error)
        return None
    logger.info("transfers are pumped without the GIL on %s", pools.device)
    return path


def _open(
    pools: Pools,
    transport: UcxTransport,
    send_slots: SlotPool | None,
    recv_slots: SlotPool | None,
    options: PumpOptions,
    *,
    clock: Callable[[], float],
) -> PumpDataPath:
    from kvconnector.datapath.pump import selftest
    from kvconnector.datapath.pump.datapath import PumpDataPath
    from kvconnector.datapath.pump.machine import Pace

    pace = Pace(options.spin_s, *(CPU_LOOKS_S if pools.device == "cpu" else CUDA_LOOKS_S))
    caches = selftest.TestCaches(pools.device)
    small = tuple(SlotPool(selftest.NUM_SLOTS, selftest.SLOT_BYTES, pools.device) for _ in range(2))
    selftest.check_pump(
        transport,
        caches,
        _copies(caches.pools, small[0], options.max_programs),
        (small[0], small[1]),
        pace=pace,
        deadline_s=SELF_TEST_TIMEOUT_S,
    )
    slots = send_slots or recv_slots
    assert slots is not None  # a worker has a role
    copies = _copies(pools, slots, options.max_programs)
    copies.warm_up(packing=send_slots is not None, unpacking=recv_slots is not None)
    is_direct = options.direct != "never"
    return PumpDataPath(
        transport,
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
    from kvconnector.datapath.pump.copying_cuda import CudaCopies

    try:
        if isinstance(copies, CudaCopies):
            from kvconnector.datapath.pump.pulling_cuda import CudaReads

            return CudaReads(pools, copies)
        from kvconnector.datapath.pump.pulling_cpu import CpuReads

        return CpuReads(pools)
    except KVConnectorError as error:
        logger.info("no producer's pools can be read directly: %s", error)
        return None


def _copies(pools: Pools, slots: SlotPool, max_programs: int) -> ChunkCopies:
    if pools.device == "cpu":
        from kvconnector.datapath.pump.copying_cpu import CpuCopies

        return CpuCopies(pools, slots.slot_bytes)
    from kvconnector.datapath.pump.copying_cuda import CudaCopies

    return CudaCopies(
        pools,
        # as badly aligned as any slot
        slot_address=slots.address(0) | slots.slot_bytes,
        slot_bytes=slots.slot_bytes,
        max_programs=max_programs,
    )
