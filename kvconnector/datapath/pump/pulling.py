"""What pulls need, whatever the device: jobs that copy from a peer's pools to ours, and a function that does them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program, ReadOrigin, SegmentWindow
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.errors import KVConnectorError
from kvconnector.planning import GroupBlocks
from kvconnector.planning.cost import PathCost
from kvconnector_kernels.relayout import PartTable, RelayoutError, TokenRuns

# columns of `CHUNK_DTYPE`: the first part and token, and how many of each
_STARTS, _COUNTS, _NUM_COLUMNS = [1, 3], [2, 4], 5


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """A read's jobs, as the device's compiled function takes them, and what they refer to.

    `nbytes` are those of the read. `read_bytes` also has what is between them and is read with them, and `num_runs` are
    the pieces of memory, as far as they count for how long it takes.
    """

    rows: npt.NDArray[np.int64]
    kept: tuple[object, ...]
    nbytes: int
    read_bytes: int
    num_runs: int

    @property
    def address(self) -> int:
        """Where the rows are."""
        return self.rows.ctypes.data


class PoolReads(Protocol):
    """The copies of one worker from the pools of its peers on this host."""

    function: int
    stop_function: int
    """See `PULL` and `PULL_STOP` of the pump's records; 0 if a call leaves nothing to be stopped."""
    context: int

    @property
    def path_name(self) -> str:
        """What a transfer's record calls this path."""

    def prepare(self, remote: RemotePools) -> PathCost:
        """Compile what the first read of these pools would have to wait for, and time a few copies of some blocks.

        Raises:
            TransportError: they cannot be read on this path. PeerLostError: the producer is gone.
        """

    def sending_cost(self, reading: PathCost) -> PathCost:
        """What the same bytes cost if the producer sends them, where reading them costs `reading`."""

    def make_pull(self, program: Program, origin: ReadOrigin, remote: RemotePools) -> Pull:
        """The copies of a read.

        Raises:
            RelayoutError: blocks, heads or rows outside the pools, or a read that this path cannot do.
        """

    def end_pull(self, pull: Pull) -> None:
        """Take back what a pull that is over was lent."""

    def error_of(self, status: int, remote: RemotePools) -> KVConnectorError:
        """What the status of a failed pull means."""

    def finish(self) -> None:
        """Begin nothing more, and wait for copies that are under way.

        Raises:
            TransportError: the device has failed, or a copy does not end.
        """


@dataclass(frozen=True, slots=True)
class Rectangle:
    """What a segment of a read brings: rows of its window from `part_start`, of its stripe from `token_start`."""

    segment: int
    part_start: int
    num_parts: int
    token_start: int
    num_tokens: int


def rectangles_of(program: Program) -> list[Rectangle]:
    """The chunks of each segment, put together.

    Raises:
        RelayoutError: those of a segment are no rectangle of rows and tokens.
    """
    chunks = program.chunks
    rectangles = []
    for index in range(len(program.segments)):
        mine = chunks if len(program.segments) == 1 else chunks[chunks["segment"] == index]
        if len(mine):
            rectangles.append(_rectangle_of(index, mine))
    return rectangles


def _rectangle_of(index: int, chunks: npt.NDArray[np.void]) -> Rectangle:
    # one array instead of a structured one: a read of 2 MiB takes less time than ten more calls of numpy
    numbers = np.ascontiguousarray(chunks).view(np.int32).reshape(-1, _NUM_COLUMNS).astype(np.int64)
    starts, counts = numbers[:, _STARTS], numbers[:, _COUNTS]
    part_start, token_start = starts.min(axis=0).tolist()
    part_stop, token_stop = (starts + counts).max(axis=0).tolist()
    num_parts, num_tokens = part_stop - part_start, token_stop - token_start
    # chunks never overlap, so as much area is the same area
    if int(counts.prod(axis=1).sum()) != num_parts * num_tokens:
        raise RelayoutError(f"the chunks of segment {index} are no rectangle of rows and tokens")
    return Rectangle(index, part_start, num_parts, token_start, num_tokens)


@dataclass(frozen=True, slots=True)
class End:
    """A rectangle as one side has it: the arguments of its `PagedSide` but the block ids."""

    table: PartTable
    part_start: int
    head_start: int
    token_start: int
    runs: TokenRuns


def ends_of(
    rectangle: Rectangle, program: Program, origin: ReadOrigin, pools: Pools, remote: RemotePools
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
