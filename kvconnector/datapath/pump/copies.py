"""What the pump's copies need, whatever the device: spans of what is copied, jobs for them, fences, compiled functions.

A chunk is a copy between our pools and a slot, a direct read one from a peer's pools to ours. Both are spans, and a
device makes the jobs of both in the same way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program, paged_tokens
from kvconnector.datapath.direct.board import ReadyWriter
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.digests import Digests
from kvconnector.datapath.pump.id_buffers import IdBuffer, IdBuffers
from kvconnector.datapath.pump.marks import Requests
from kvconnector.planning import GroupBlocks, SegmentWindow
from kvconnector.session.commands import StartReceive
from kvconnector_kernels.pump.chunks import measure_chunks
from kvconnector_kernels.pump.digests import DIGEST_BYTES
from kvconnector_kernels.relayout import (
    Order,
    PackedSide,
    PagedSide,
    PartTable,
    RelayoutError,
    Side,
)
from kvconnector_kernels.relayout.block_ids import BlockIds
from kvconnector_kernels.relayout.checks import check_ids_in_pool

# fields of `planning.CHUNK_DTYPE`
PART_START, NUM_PARTS, _SPAN_KEY, _NUM_FIELDS = 1, 2, [0, 3, 4], 5
Fields: TypeAlias = npt.NDArray[np.int32]
"""Of chunks, `[chunk, field]`."""


_NO_WORDS = np.zeros((0, 1), np.int64)


class Jobs(msgspec.Struct, frozen=True, eq=False):
    """What a compiled function is to copy for a program, from `address` on, and what that refers to: the buffer that
    it was lent comes first.

    Of chunks it is a row of `words` for each, which begins with the chunk's `nbytes`.
    """

    address: int
    kept: tuple[object, ...]
    words: npt.NDArray[np.int64] = _NO_WORDS


def address_of(words: npt.NDArray[np.int64]) -> int:
    """Where the first word is."""
    address: int = words.__array_interface__["data"][0]  # `ctypes` is Python
    return address


def words_of(rows: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """The same memory as rows of numbers: numpy copies records field by field, which takes longer than a small read."""
    return rows.view(np.int64).reshape(len(rows), rows.dtype.itemsize // 8)


SHARE_OF_MULTIPROCESSORS = 2
"""Half of them reach what NVLink brings, within 2 %, and leave decode kernels three times the steps that copies on all
of them do; fewer make transfers slower and kernels beside them hardly faster. ARCHITECTURE has the figures.
"""


def program_cap(max_programs: int, device: str) -> int:
    """The cap for copies on `device` ("cpu" or "cuda:N"), 0 for none; below 0 is for the device's default."""
    if max_programs >= 0 or device == "cpu":
        return max(max_programs, 0)
    import torch

    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, count // SHARE_OF_MULTIPROCESSORS)


Fences: TypeAlias = npt.NDArray[np.int32]
"""Flags that copies set."""
FENCE_WORDS = 16
"""From one to the next: no two share a cache line."""


def addresses_of(fences: Fences) -> npt.NDArray[np.int64]:
    """Where each flag is."""
    step = fences.strides[0]
    return fences.ctypes.data + np.arange(len(fences), dtype=np.int64) * step


class Copies:
    """The copies of one worker on its device: between its pools and slots, and from the pools of peers on its host.
    What is not overridden is right for host memory, where copies and an engine's kernels have finished when they
    return, and jobs own all they need.
    """

    function: int
    """See `copy` of the pump's `STATE`."""
    read_function: int
    """See `READ` of the pump's records."""
    context: int = 0
    """Of both."""
    begin: tuple[int, int] = (0, 0)
    job: np.dtype[np.void]
    """Of a chunk's record in `Jobs`."""
    means: ClassVar[str]
    """How a peer's pools are reached, in words for the log."""
    ids: IdBuffers
    """The block ids of all programs and reads."""
    open_writer: Callable[[int, int], ReadyWriter] | None = None
    """What makes a lease board's writer, see `LeaseBoard`."""
    digests: Digests | None = None
    """Each chunk in a slot has its digest after it, which its job's bytes count."""

    def order_after(self, event: object, requests: Requests | None) -> None:
        """Copy blocks of these requests (of each, by cache group) from now on only after a CUDA event that the engine
        recorded; None stands for all blocks. Other copies may wait as well.
        """

    def make_fences(self, count: int) -> Fences:
        """Flags at zero."""
        return np.zeros((count, FENCE_WORDS), np.int32)[:, 0]

    @abstractmethod
    def make_jobs(self, program: Program, *, packing: bool) -> Jobs:
        """The copies of a program's chunks between the pools and slots. Raises RelayoutError: a chunk outside its pool
        or its slot. TransportError: the device takes no block ids.
        """

    @abstractmethod
    def make_read(self, read: StartReceive, remote: RemotePools) -> Jobs:
        """The copies of a read from a peer's pools. Its windows there and its blocks there are what a peer stated and a
        router passed on, so they are checked here. Raises RelayoutError: what is outside the pools, or cannot be
        copied. TransportError: the device takes no block ids.
        """

    def jobs_of(self, program: Program, *, packing: bool) -> Jobs:
        """`make_jobs`, with room for digests."""
        jobs = self.make_jobs(program, packing=packing)
        if self.digests is not None:
            jobs.words[:, 0] += DIGEST_BYTES
        return jobs

    def unread_jobs_of(self, program: Program, slot_bytes: int) -> Jobs:
        """Jobs of a program that copies nothing, but awaits what its producer was allowed to send."""
        rows = np.zeros(len(program.chunks), self.job)
        nbytes = program.chunks_nbytes + (0 if self.digests is None else DIGEST_BYTES)
        rows["nbytes"] = np.minimum(nbytes, slot_bytes)
        words = words_of(rows)
        return Jobs(address_of(words), (), words)

    def expect(self, blocks: Sequence[GroupBlocks]) -> None:
        """Jobs that pack these very blocks are made soon, or never."""

    def end_jobs(self, jobs: Jobs) -> None:
        """Take back what jobs were lent, of which no copy is under way or will be: once."""
        for buffer in jobs.kept[:1]:
            if isinstance(buffer, IdBuffer):
                self.ids.give_back(buffer)

    def warm_up(self, *, packing: bool, unpacking: bool) -> None:
        """Compile what the first programs would have to wait for."""

    def warm_up_reads(self) -> None:
        """Compile what reads of pools like ours would have to wait for."""

    def prepare(self, remote: RemotePools) -> None:
        """Compile what the first read of these pools would wait for. Raises TransportError: they cannot be read."""

    def finish(self) -> None:
        """Wait for copies that are under way. Raises TransportError: the device has failed, or a copy does not end."""

    def check_device(self) -> None:
        """Raise `TransportError` if the device has failed, so that no fence will ever be reached."""


Members: TypeAlias = "slice | npt.NDArray[np.int64]"


class Span(NamedTuple):
    """Copies that differ in their parts only. A paged side begins with the segment's first part, and `fields` are those
    of the `chunks` of a program, in `planning.CHUNK_DTYPE`; a read of a peer's pools has one for each segment.
    """

    src: Side
    dst: Side
    num_heads: int
    num_tokens: int
    part_bytes: int
    chunks: Members
    fields: Fields | tuple[tuple[int, ...], ...]


def packed_sides(address: int, nbytes: int, device: str) -> Mapping[str, PackedSide]:
    """Slots of `nbytes` as sides of a copy, by the order of a chunk's elements. `address` stands for all of them."""
    return {order: PackedSide(address, nbytes, order, device) for order in get_args(Order)}


def chunk_spans(
    program: Program,
    pools: Pools,
    ids: Sequence[BlockIds],
    slots: Mapping[str, PackedSide],
    *,
    packing: bool,
) -> list[Span]:
    """The spans of a program's chunks between the pools and slots. `ids` are the block ids of each group as the device
    reads them; `slots`: see `packed_sides`. Raises RelayoutError: a chunk outside its pool or its slot.
    """
    # a copy: compiled code tells arrays that can be written from others
    fields = np.frombuffer(program.chunks.tobytes(), np.int32).reshape(-1, _NUM_FIELDS).copy()
    found: list[Span] = []
    for members, own_fields, measured in _groups(fields, len(program.segments)):
        _, part_stop, most_parts, index, token_start, num_tokens = measured
        segment = program.segments[index]
        table, packed = pools.tables[segment.group, segment.family], slots[segment.order]
        where = (segment, table, program.blocks, ids)
        paged = _paged_side(*where, member=token_start, part_stop=part_stop)
        part_bytes = segment.part_token_bytes * num_tokens
        if most_parts * part_bytes > packed.nbytes:
            raise RelayoutError(f"a chunk has more than {packed.nbytes} bytes")
        src, dst = (paged, packed) if packing else (packed, paged)
        counts = (segment.num_heads, num_tokens, part_bytes)
        found.append(Span(src, dst, *counts, members, own_fields))
    return found


def read_spans(
    read: StartReceive,
    pools: Pools,
    remote: RemotePools,
    ids: tuple[Sequence[BlockIds], Sequence[BlockIds]],
) -> list[Span]:
    """The spans of a read from a peer's pools, one for each segment that brings something. `ids` are the block ids of
    each group as the device reads them, the peer's and ours. Raises RelayoutError: rows outside either's pools, or the
    peer exported no such table.
    """
    found: list[Span] = []
    source, route = read.source, read.source.route
    for index, members in enumerate(source.members):
        if not members:
            continue
        ours, theirs, rows = route.here[index], route.there[index], source.rows[index]
        table = remote.tables.get((theirs.group, theirs.family))
        if table is None:
            raise RelayoutError(f"no part table of group {theirs.group}, family {theirs.family}")
        # ours were checked when the engine named them
        blocks = read.remote_blocks[theirs.group]
        if blocks.highest_id() >= table.num_blocks:
            check_ids_in_pool("the read's", blocks.block_ids, table.num_blocks)
        own = pools.tables[ours.group, ours.family]
        first = {"member": members.start, "part_stop": rows.stop}
        src = _paged_side(theirs, table, read.remote_blocks, ids[0], **first)
        dst = _paged_side(ours, own, read.blocks, ids[1], **first)
        counts = (ours.num_heads, len(members), ours.part_token_bytes * len(members))
        # no array: numpy takes longer than all of this
        fields = ((index, rows.start, len(rows), members.start, len(members)),)
        found.append(Span(src, dst, *counts, slice(len(found), len(found) + 1), fields))
    return found


def _paged_side(
    segment: SegmentWindow,
    table: PartTable,
    blocks: Sequence[GroupBlocks],
    ids: Sequence[BlockIds],
    *,
    member: int,
    part_stop: int,
) -> PagedSide:
    """The tokens of a segment from a member of its stripe on, in a pool where the blocks of each group have these ids.
    Raises RelayoutError: the pool has no parts up to `part_stop`, or the tokens begin before the blocks.
    """
    last_row = segment.first_row + part_stop
    if last_row > table.num_parts:
        raise RelayoutError(f"a copy ends at row {last_row} of {table.num_parts}")
    start, runs = paged_tokens(segment, member, blocks[segment.group], table.block_size)
    where = (segment.first_row, segment.head_start, start, runs)
    return PagedSide(table, ids[segment.group], *where)


def _groups(fields: Fields, num_segments: int) -> list[tuple[Members, Fields, tuple[int, ...]]]:
    """The chunks that differ in their parts only: which they are, in their order, and what is measured of them."""
    found: list[tuple[Members, Fields, tuple[int, ...]]] = []
    at = 0
    while at < len(fields) and len(found) <= num_segments:
        measured = measure_chunks(fields[at:])
        members = slice(at, at + measured[0])
        found.append((members, fields[members], measured))
        at = members.stop
    if at == len(fields):
        return found  # one segment after the other
    order = np.lexsort(fields[:, _SPAN_KEY].T)
    keys = fields[order][:, _SPAN_KEY]
    groups = np.split(order, (keys[1:] != keys[:-1]).any(axis=1).nonzero()[0] + 1)
    return [(group, fields[group], measure_chunks(fields[group])) for group in groups]
