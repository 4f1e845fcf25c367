"""Direct reads in host memory: a compiled copy from the producer's pools, mapped here, to ours."""

from __future__ import annotations

from kvconnector.datapath.base import DirectRead
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import Jobs
from kvconnector.datapath.pump.pool_reads import PoolReads, sides_of
from kvconnector_kernels.pump import read_cpu


class CpuReads(PoolReads):
    """See `PoolReads`."""

    means = "shared memory"
    context = 0

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._compiled = read_cpu.compile_read()
        self.function = int(self._compiled.address)

    def make_jobs(self, read: DirectRead, remote: RemotePools) -> Jobs:
        ids = (
            [group.block_ids for group in read.their_blocks],
            [group.block_ids for group in read.blocks],
        )
        copies = [
            sides_of(index, read, (self._pools, remote), ids)
            for index, members in enumerate(read.members)
            if members
        ]
        return Jobs(read_cpu.make_read(copies), (ids, remote, copies))
