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
    from kvconnector.datapath.pump.machine import Pace
    from kvconnector.datapath.pump.network import Network
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
    choice = _Choice(pools, transport, send_slots, recv_slots, options, clock)
    if options.verify:
        logger.info("verify=checksum: reads are packed by Python, and each chunk is checked")
    elif options.pump and isinstance(transport, UcxTransport):
        try:
            path = choice.open_pump(transport)
        except (KVConnectorError, ImportError, RuntimeError, ValueError) as error:
            logger.warning("transfers take the GIL for every chunk: no pump, because %s", error)
        else:
            logger.info("transfers are pumped without the GIL on %s", pools.device)
            return path
    return choice.open_plain()


@dataclass(frozen=True, slots=True)
class _Choice:
    """What either data path of a worker is made of."""

    pools: Pools
    transport: Transport
    send_slots: SlotPool | None
    recv_slots: SlotPool | None
    options: PathOptions
    clock: Callable[[], float]

    def open_plain(self) -> DataPath:
        """Through Python, over any transport."""
        from kvconnector.datapath.digests import Digests
        from kvconnector.datapath.pump.copies_plain import PlainCopies
        from kvconnector.datapath.pump.machine import Pace
        from kvconnector.datapath.pump.plain import PlainNetwork

        device = self.pools.device
        digests = Digests(device) if self.options.verify else None
        copies = PlainCopies(self.pools, **self._slot_options(self._slots), digests=digests)
        owners = (self.send_slots, self.recv_slots)
        network = PlainNetwork(self.transport, device, owners, self.clock)
        return self._open(network, copies, Pace(0.0, *PLAIN_LOOKS_S))

    def open_pump(self, transport: UcxTransport) -> DataPath:
        """Without the GIL, which a small read by the worker of itself has to show."""
        from kvconnector.datapath.pump import selftest
        from kvconnector.datapath.pump.machine import Pace
        from kvconnector.datapath.pump.ucp import UcxNetwork

        device, options = self.pools.device, self.options
        network = UcxNetwork(transport)
        pace = Pace(options.spin_s, *(CPU_LOOKS_S if device == "cpu" else CUDA_LOOKS_S))
        caches = selftest.TestCaches(device)
        small = [SlotPool(selftest.NUM_SLOTS, selftest.SLOT_BYTES, device) for _ in range(2)]
        selftest.check_pump(
            transport,
            network,
            caches,
            self._copies(caches.pools, small[0]),
            (small[0], small[1]),
            pace=pace,
            deadline_s=SELF_TEST_TIMEOUT_S,
        )
        copies = self._copies(self.pools, self._slots)
        sends, receives = self.send_slots is not None, self.recv_slots is not None
        copies.warm_up(packing=sends, unpacking=receives)
        is_direct = options.direct != "never"
        return self._open(
            network,
            copies,
            pace,
            share=_share(self.pools, copies) if is_direct and sends else None,
            reads=_reads(self.pools, copies) if is_direct and receives else None,
        )

    def _open(
        self,
        network: Network,
        copies: ChunkCopies,
        pace: Pace,
        *,
        share: PoolShare | None = None,
        reads: PoolReads | None = None,
    ) -> DataPath:
        from kvconnector.datapath.pump.datapath import DataPath

        return DataPath(
            self.transport,
            network,
            copies,
            share=share,
            reads=reads,
            always_direct=self.options.direct == "always",
            device=self.pools.device,
            send_slots=self.send_slots,
            recv_slots=self.recv_slots,
            window=self.options.window,
            quarantine_s=self.options.quarantine_s,
            pace=pace,
            clock=self.clock,
        )

    @property
    def _slots(self) -> SlotPool:
        slots = self.send_slots or self.recv_slots
        assert slots is not None  # a worker has a role
        return slots

    def _slot_options(self, slots: SlotPool) -> dict[str, int]:
        return {
            # an address as badly aligned as any slot's
            "slot_address": slots.address(0) | slots.slot_bytes,
            "slot_bytes": slots.slot_bytes,
            "max_programs": self.options.max_programs,
        }

    def _copies(self, pools: Pools, slots: SlotPool) -> ChunkCopies:
        if pools.device == "cpu":
            from kvconnector.datapath.pump.copies_cpu import CpuCopies

            return CpuCopies(pools, slots.slot_bytes)
        from kvconnector.datapath.pump.copies_cuda import CudaCopies

        return CudaCopies(pools, **self._slot_options(slots))


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
