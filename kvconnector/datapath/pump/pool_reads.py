"""What direct reads need on any device: jobs that copy from a peer's pools to ours, and a function that does them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from kvconnector.datapath.base import Program, ReadOrigin, SegmentWindow
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import Jobs
from kvconnector.datapath.rectangles import Rectangle
from kvconnector.errors import KVConnectorError
from kvconnector.planning import GroupBlocks
from kvconnector_kernels.relayout import PagedSide, PartTable, RelayoutError, TokenRuns
from kvconnector_kernels.relayout.block_ids import BlockIds


class PoolTables(Protocol):
    """A producer's pools: its part tables by group and family."""

    @property
    def tables(self) -> Mapping[tuple[int, int], PartTable]:
        """With addresses that mean something to who reads them."""


class PoolReads(Protocol):
    """The copies of one worker from the pools of its peers on this host."""

    function: int
    """See `READ` of the pump's records."""
    context: int

    @property
    def path_name(self) -> str:
        """What a transfer's record calls this path."""

    def prepare(self, remote: RemotePools) -> None:
        """Compile what the first read of these pools would have to wait for.

        Raises:
            TransportError: they cannot be read on this path.
        """

    def make_jobs(self, program: Program, origin: ReadOrigin, remote: RemotePools) -> Jobs:
        """The copies of a read.

        Raises:
            RelayoutError: blocks, heads or rows outside the pools, or a read that this path cannot do.
        """

    def end_jobs(self, jobs: Jobs) -> None:
        """Take back what the jobs of a read that is over were lent."""

    def error_of(self, status: int, remote: RemotePools) -> KVConnectorError:
        """What the status of a failed read means."""

    def finish(self) -> None:
        """Begin nothing more, and wait for copies that are under way.

        Raises:
            TransportError: the device has failed, or a copy does not end.
        """


class End(msgspec.Struct, frozen=True):
    """A rectangle as one side has it: the arguments of its `PagedSide` but the block ids."""

    table: PartTable
    part_start: int
    head_start: int
    token_start: int
    runs: TokenRuns

    def side(self, ids: BlockIds) -> PagedSide:
        """With the block ids, as the device reads them."""
        return PagedSide(
            self.table, ids, self.part_start, self.head_start, self.token_start, self.runs
        )


def ends_of(
    rectangle: Rectangle, program: Program, origin: ReadOrigin, pools: Pools, remote: PoolTables
) -> tuple[End, End]:
    """A rectangle at the producer and here.

    Raises:
        RelayoutError: the producer exported no such table.
    """
    ours, theirs = program.segments[rectangle.segment], origin.segments[rectangle.segment]
    table = remote.tables.get((theirs.group, theirs.family))
    if table is None:
        raise RelayoutError(f"no part table of group {theirs.group}, family {theirs.family}")
    source = _end(rectangle, theirs, table, origin.blocks[theirs.group])
    here = pools.tables[ours.group, ours.family]
    return source, _end(rectangle, ours, here, program.blocks[ours.group])


def _end(
    rectangle: Rectangle, segment: SegmentWindow, table: PartTable, blocks: GroupBlocks
) -> End:
    tokens = segment.paged_tokens(rectangle.token_start, blocks, table.block_size)
    return End(
        table, segment.first_row + rectangle.part_start, segment.head_start, tokens[0], tokens[1]
    )
