"""What the pump's copies need, whatever the device: jobs for a program's chunks, fences, a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program
from kvconnector.datapath.direct.board import ReadyWriter
from kvconnector.datapath.pools import Pools
from kvconnector_kernels.relayout import PackedSide, PagedSide, PartTable, RelayoutError


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """One row for each chunk of a program, and what the rows refer to. The rows begin with the chunk's bytes.

    `places` are the addresses of chunks that need no copy, 0 for the others; None where all are copied.
    """

    rows: npt.NDArray[np.int64]
    kept: tuple[object, ...]
    places: npt.NDArray[np.int64] | None = None

    @property
    def address(self) -> int:
        """Where the first row is."""
        return self.rows.ctypes.data


def unread_jobs(program: Program, *, job_bytes: int, slot_bytes: int) -> Jobs:
    """Jobs of a program that copies nothing, but awaits what its producer was allowed to send."""
    rows = np.zeros((len(program.chunks), job_bytes // 8), np.int64)
    np.minimum(program.chunks_nbytes, slot_bytes, out=rows[:, 0])
    return Jobs(rows, ())


@dataclass(frozen=True, slots=True, eq=False)
class Fences:
    """32-bit flags that copies set, and their memory."""

    addresses: npt.NDArray[np.int64]
    memory: object


class ChunkCopies(Protocol):
    """The copies of one worker on its device."""

    function: int
    context: int
    begin: tuple[int, int]

    @property
    def job_bytes(self) -> int:
        """Bytes of one row of `Jobs`."""

    def order_after(self, event: object) -> None:
        """Begin no copy before a CUDA event that the engine recorded."""

    @property
    def open_writer(self) -> Callable[[int, int], ReadyWriter] | None:
        """What makes a lease board's writer, see `LeaseBoard`."""

    def make_fences(self, count: int) -> Fences:
        """Flags at zero."""

    def make_jobs(self, program: Program, *, packing: bool) -> Jobs:
        """The copies of a program's chunks between the pools and slots.

        Raises:
            RelayoutError: a chunk outside its pool or its slot.
        """

    def warm_up(self, *, packing: bool, unpacking: bool) -> None:
        """Compile what the first programs would have to wait for."""

    def check_device(self) -> None:
        """Raise `TransportError` if the device has failed, so that no fence will ever be reached."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The chunks of a program that differ in their parts only."""

    table: PartTable
    paged: PagedSide
    packed: PackedSide
    num_heads: int
    num_tokens: int
    part_bytes: int
    chunks: npt.NDArray[np.int64]
    num_parts: npt.NDArray[np.int64]


def spans_of(
    program: Program, pools: Pools, ids: Sequence[Any], slot_address: int, slot_bytes: int
) -> tuple[list[Span], npt.NDArray[np.int64]]:
    """The spans of a program, and every chunk's first row in its table. `ids` are the block ids of each group as the
    device reads them.

    Raises:
        RelayoutError: a chunk outside its pool or its slot.
    """
    chunks = program.chunks
    all_parts = chunks["num_parts"].astype(np.int64)
    first_rows = chunks["part_start"].astype(np.int64)
    found: list[Span] = []
    for (segment_index, token_start, num_tokens), members in _groups(chunks):
        segment = program.segments[segment_index]
        table = pools.tables[segment.group, segment.family]
        first_rows[members] += segment.first_row
        part_bytes = segment.part_token_bytes * num_tokens
        num_parts = all_parts[members]
        last_row = int((first_rows[members] + num_parts).max())
        if last_row > table.num_parts or int(num_parts.max()) * part_bytes > slot_bytes:
            raise RelayoutError(
                f"a chunk ends at row {last_row} of {table.num_parts}, or has more than {slot_bytes} bytes"
            )
        blocks = program.blocks[segment.group]
        position, runs = segment.paged_tokens(token_start, blocks, table.block_size)
        paged = PagedSide(
            table=table,
            block_ids=ids[segment.group],
            head_start=segment.head_start,
            token_start=position,
            runs=runs,
        )
        packed = PackedSide(
            address=slot_address,
            nbytes=slot_bytes,
            order=segment.order,  # type: ignore[arg-type]  # the wire admits the three orders only
            device=pools.device,
        )
        found.append(
            Span(
                table, paged, packed, segment.num_heads, num_tokens, part_bytes, members, num_parts
            )
        )
    return found, first_rows


def _groups(
    chunks: npt.NDArray[np.void],
) -> list[tuple[tuple[int, int, int], npt.NDArray[np.int64]]]:
    """The chunks that differ in their parts only, as (segment, first token, tokens) and their indices."""
    members: dict[tuple[int, int, int], list[int]] = {}
    for index, (segment, _, _, token_start, num_tokens) in enumerate(chunks.tolist()):
        members.setdefault((segment, token_start, num_tokens), []).append(index)
    return [(key, np.array(indices, np.int64)) for key, indices in members.items()]
