"""What direct reads need on any device: jobs that copy from a peer's pools to ours, and a function that does them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvconnector.datapath.base import DirectRead, SegmentWindow
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import Jobs
from kvconnector.planning import GroupBlocks
from kvconnector_kernels.relayout import PagedSide, PartTable, RelayoutError
from kvconnector_kernels.relayout.block_ids import BlockIds
from kvconnector_kernels.relayout.sides import CopyGeometry, check_copy


class PoolReads:
    """The copies of one worker from the pools of its peers on this host. What is not overridden is right where nothing
    is to be compiled, lent or waited for.
    """

    function: int
    """See `READ` of the pump's records."""
    context: int
    means: ClassVar[str]
    """How the pools are reached, in words for the log."""

    def prepare(self, remote: RemotePools) -> None:
        """Compile what the first read would wait for. Raises TransportError: this path cannot read these pools."""

    @abstractmethod
    def make_jobs(self, read: DirectRead, remote: RemotePools) -> Jobs:
        """The copies of a read. Raises RelayoutError: what is outside the pools, or cannot be read on this path."""

    def end_jobs(self, jobs: Jobs) -> None:
        """Take back what the jobs of a read that is over were lent."""

    def finish(self) -> None:
        """Wait for copies, and begin none. Raises TransportError: the device has failed, or a copy does not end."""


def sides_of(
    index: int,
    read: DirectRead,
    tables: tuple[Pools, RemotePools],
    ids: tuple[Sequence[BlockIds], Sequence[BlockIds]],
) -> tuple[PagedSide, PagedSide, CopyGeometry]:
    """What is read of a segment, at the producer and here. `tables` are ours and theirs; `ids` the block ids of each
    group, theirs and ours, as the device reads them. Raises RelayoutError: see `check_copy`; or the producer exported
    no such table, or the tokens begin in front of the blocks.
    """
    ours, theirs = read.segments[index], read.their_segments[index]
    members, rows = read.members[index], read.rows[index]
    table = tables[1].tables.get((theirs.group, theirs.family))
    if table is None:
        raise RelayoutError(f"no part table of group {theirs.group}, family {theirs.family}")
    here = tables[0].tables[ours.group, ours.family]
    sides = (
        _side(
            (rows.start, members.start),
            theirs,
            table,
            read.their_blocks[theirs.group],
            ids[0][theirs.group],
        ),
        _side((rows.start, members.start), ours, here, read.blocks[ours.group], ids[1][ours.group]),
    )
    geometry = check_copy(
        *sides, num_parts=len(rows), num_heads=ours.num_heads, num_tokens=len(members)
    )
    return *sides, geometry


def _side(
    first: tuple[int, int],
    segment: SegmentWindow,
    table: PartTable,
    blocks: GroupBlocks,
    ids: BlockIds,
) -> PagedSide:
    """A side from a row and a member of the segment on."""
    row, member = first
    start, runs = segment.paged_tokens(member, blocks, table.block_size)
    return PagedSide(table, ids, segment.first_row + row, segment.head_start, start, runs)
