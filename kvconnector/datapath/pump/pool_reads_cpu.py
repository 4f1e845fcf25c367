"""Direct reads in host memory: process_vm_readv, straight to their place or through a slot of our own."""

from __future__ import annotations

import mmap
from functools import lru_cache

import numpy as np

from kvconnector.datapath.base import DirectRead
from kvconnector.datapath.direct.process_memory import read_error
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import Jobs
from kvconnector.datapath.pump.pool_reads import PoolReads, sides_of
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector_kernels.pump import read_cpu
from kvconnector_kernels.relayout import PartTable, RelayoutError

SLOT_BYTES = 2 << 20
"""A block's span must fit; most batches use the first eighth of it, which stays in the cache."""
_MAX_GEOMETRIES = 1 << 10


class CpuReads(PoolReads):
    """See `PoolReads`. Raises TransportError: this platform has no process_vm_readv."""

    means = "cross-memory attach"

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        # once for each combination; those of lost producers are forgotten some time
        self._check_slot = lru_cache(_MAX_GEOMETRIES)(_check_slot)
        self._slot = mmap.mmap(-1, SLOT_BYTES)
        slot_address = np.frombuffer(self._slot, np.uint8).ctypes.data
        try:
            self._context = read_cpu.make_context(slot_address, SLOT_BYTES)
        except OSError as exc:
            raise TransportError(f"no direct reads: {exc}") from exc
        self._compiled = read_cpu.compile_read()
        self.function = int(self._compiled.address)
        self.context = self._context.ctypes.data

    def make_jobs(self, read: DirectRead, remote: RemotePools) -> Jobs:
        ids = (
            [group.block_ids for group in read.their_blocks],
            [group.block_ids for group in read.blocks],
        )
        copies = []
        for index, members in enumerate(read.members):
            if members:
                src, dst, geometry = sides_of(index, read, (self._pools, remote), ids)
                self._check_slot(src.table, dst.table, geometry.num_heads)
                copies.append((src, dst, geometry))
        return Jobs(read_cpu.make_read(remote.pid, copies), (ids, remote, copies))

    def error_of(self, status: int, remote: RemotePools) -> KVConnectorError:
        """See `PoolReads`. Statuses are values of `errno`."""
        return read_error(remote.pid, status)


def _check_slot(src: PartTable, dst: PartTable, num_heads: int) -> None:
    """One token of a part must fit the slot, unless it is read to its place: dense, and stored alike on both sides."""
    strides = src.rows[:, [2, 4]]
    counts = np.array([num_heads - 1, src.head_dim - 1])
    span_bytes = int((strides * counts).sum(axis=1).max()) + src.item_size_bytes
    row_bytes = src.head_dim * src.item_size_bytes
    is_row_wise = all(
        table.is_dim_contiguous and (num_heads == 1 or bool((table.rows[:, 2] == row_bytes).all()))
        for table in (src, dst)
    )
    if span_bytes > SLOT_BYTES and not is_row_wise:
        raise RelayoutError(
            f"a token of a part has {span_bytes} bytes at the producer, the slot for re-layout {SLOT_BYTES}"
        )
