"""The device-independent part of the compiled loop's copies.

A chunk is a copy between our pools and a slot; a direct read is a copy from a peer's pools to ours. A *lane* has what
all copies of a route's segment have in common; it is made and checked for the first read. Each read adds the tokens and
parts that it copies: a *span* is the copies of a lane that differ in their parts only. `CpuCopies` and `CudaCopies`
turn spans into jobs, which compiled functions carry out.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import sub
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.device_memory import FENCE_WORDS, Fences
from kvconnector.datapath.direct.cuda_driver import StreamWriter
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.lanes import IN_SLOT, Lane, Span, Window
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.digests import Digests
from kvconnector.datapath.pump.id_buffers import IdBuffer
from kvconnector.datapath.pump.marks import RequestBlocks
from kvconnector.planning import GroupBlocks, Route, SegmentWindow, SourceRead
from kvconnector.session.load import RankRead
from kvconnector_kernels.pump.records import DIGEST_BYTES, num_words
from kvconnector_kernels.relayout import (
    Conversion,
    ElementOrder,
    PackedSide,
    RelayoutError,
    Side,
)
from kvconnector_kernels.relayout.checks import check_ids_in_pool
from kvconnector_kernels.relayout.sides import CopyGeometry, check_copy

if TYPE_CHECKING:
    import torch

Words: TypeAlias = npt.NDArray[np.int64]


class Jobs(NamedTuple):
    """A read's copies: the `address` at which a compiled function finds them; a `buffer` that was lent for the read, to
    be given back once no copy is under way or will be; and the `memory` to keep until then. At the address there is a
    row of words for each chunk, which begins with the chunk's `nbytes`, or the record of a direct read.
    """

    address: int
    buffer: IdBuffer | None
    memory: object


_MAX_ROUTES = 1 << 10


def address_of(words: Words) -> int:
    """Return the address of the first word."""
    address: int = words.__array_interface__["data"][0]  # `ctypes` is Python
    return address


SHARE_OF_MULTIPROCESSORS = 2
"""Copies on half of the multiprocessors reach 98 % of NVLink's speed, and decode kernels then make three times as many
steps as with copies on all of them. With fewer multiprocessors, transfers are slower and kernels hardly faster.
"""


def program_cap(max_programs: int, device: str) -> int:
    """Return the cap for copies on `device` ("cpu" or "cuda:N"), 0 for none. Below 0 asks for the device's default."""
    if max_programs >= 0 or device == "cpu":
        return max(max_programs, 0)
    import torch

    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, count // SHARE_OF_MULTIPROCESSORS)


class Copies:
    """The copies of one worker on its device: between its pools and slots, and from the pools of peers on its host. The
    methods of this class are for host memory, where copies and an engine's kernels have finished when the calls return,
    and jobs own everything that they need.
    """

    function: int
    """The `copy` of the loop's `State`."""
    read_function: int
    """The `function` of direct reads, see `records.READ`."""
    context: int = 0
    """The first argument of both functions."""
    begin: tuple[int, int] = (0, 0)
    """A function that each run calls first, and its argument; 0 for none."""
    job: type[ctypes.Structure]
    """The record of a chunk in `Jobs`, which begins with its `nbytes`."""
    on_gpu: ClassVar[bool] = False
    means: ClassVar[str]
    """How this worker reaches a peer's pools, in words for the log."""
    open_writer: Callable[[int, int], StreamWriter] | None = None
    """Makes the writer of a lease board, see `LeaseBoard`."""
    digests: Digests | None = None
    """If not None, each chunk in a slot is followed by its digest, which counts among the bytes of its job."""

    def __init__(self, pools: Pools, slots: Mapping[str, PackedSide]) -> None:
        """`slots`: see `packed_sides`."""
        self.pools = pools
        self._slots = slots
        self._lanes: dict[tuple[Route, bool], tuple[Lane, ...]] = {}

    def order_after(self, event: torch.cuda.Event, requests: RequestBlocks) -> None:
        """Order all further copies of the blocks of `requests` after a CUDA event that the engine recorded. Other
        copies may wait for it too.
        """

    def make_fences(self, count: int) -> Fences:
        """Make fences that are zero."""
        return np.zeros((count, FENCE_WORDS), np.int32)[:, 0]

    @abstractmethod
    def make_jobs(
        self, source: SourceRead, blocks: Sequence[GroupBlocks], *, packing: bool
    ) -> Jobs:
        """Make the copies of a read's chunks between slots and `blocks`, which were checked when the engine named them.

        Raises:
            RelayoutError: a chunk is outside its pool, its blocks or its slot.
            TransportError: the device takes no block ids.
        """

    @abstractmethod
    def make_read(self, read: RankRead, remote: RemotePools) -> Jobs:
        """Make the copies of a read from a peer's pools. The peer states its windows, and its block ids came through a
        router, so both are checked here.

        Raises:
            RelayoutError: the read leaves the pools, or cannot be copied.
            TransportError: the device takes no block ids.
        """

    def words_of(
        self, src: Side, dst: Side, geometry: CopyGeometry, conversion: Conversion | None = None
    ) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        """Return `words` and `words_of_a_token` of a lane between these sides, see `Lane`. `geometry` has no parts and
        no tokens.
        """
        return (), ()

    def unread_jobs_of(self, source: SourceRead, slot_bytes: int) -> Jobs:
        """Make jobs for a read that copies nothing, but receives the chunks that its producer may send."""
        words = np.zeros((source.num_chunks, num_words(self.job)), np.int64)
        nbytes = source.chunk_nbytes + (0 if self.digests is None else DIGEST_BYTES)
        words[:, 0] = np.minimum(nbytes, slot_bytes)
        return Jobs(address_of(words), None, words)

    def expect(self, blocks: Sequence[GroupBlocks]) -> None:
        """Prepare for `make_jobs` with this very sequence, which may never come."""

    def warm_up(self, *, packing: bool, unpacking: bool) -> None:
        """Compile the kernels that the first packed reads would otherwise wait for."""

    def warm_up_reads(self) -> None:
        """Compile the kernels that direct reads of pools like ours would otherwise wait for."""

    def prepare(self, remote: RemotePools, routes: Sequence[Route] = ()) -> None:
        """Compile what the first read of these pools, on these routes, would wait for. Raises TransportError: they
        cannot be read.
        """

    def prepare_chunks(self, route: Route, *, packing: bool) -> None:
        """Compile what the first chunk of a route whose elements are converted here would wait for. Raises
        TransportError: that cannot be done.
        """

    def finish(self) -> None:
        """Wait for copies under way. Raises TransportError: the device has failed, or a copy does not end."""

    def check_device(self) -> None:
        """Raise TransportError if the device has failed, so that no further fence will be set."""

    def chunk_spans(
        self,
        source: SourceRead,
        blocks: Sequence[GroupBlocks],
        ids: Sequence[int],
        *,
        packing: bool,
    ) -> Iterator[Span]:
        """Yield the spans of a read's chunks. `ids` are the addresses at which the device reads the block ids of each
        group. Raises RelayoutError: a chunk is outside its pool, its blocks or its slot.
        """
        lanes = self._lanes.get((source.route, packing)) or self._chunk_lanes(source.route, packing)
        next_chunk = 0
        for index, rows, tokens in source.cuts:
            lane, first_chunk, num_pieces = lanes[index], next_chunk, len(tokens) - 1
            next_chunk += (len(rows) - 1) * num_pieces
            window, slot = (lane.src, lane.dst) if packing else (lane.dst, lane.src)
            assert isinstance(window, Window)  # as `_chunk_lanes` makes them
            assert isinstance(slot, PackedSide)
            most_bytes = max(map(sub, rows[1:], rows)) * lane.token_bytes
            group = window.segment.group
            for piece, (first, stop) in enumerate(pairwise(tokens)):
                if most_bytes * (stop - first) > slot.nbytes:
                    raise RelayoutError(f"a chunk has more than {slot.nbytes} bytes")
                where = window.tokens(first, stop - first, rows[-1], blocks[group], ids[group])
                src, dst = (where, IN_SLOT) if packing else (IN_SLOT, where)
                chunks = slice(first_chunk + piece, next_chunk, num_pieces)
                yield Span(lane, src, dst, stop - first, chunks, rows)

    def read_spans(self, read: RankRead, remote: RemotePools, ids: Sequence[int]) -> Iterator[Span]:
        """Yield the spans of a read from a peer's pools, one for each segment that is not empty. `ids` are the
        addresses at which the device reads the block ids of each group, the peer's and then ours. Raises RelayoutError:
        the read leaves the pools or blocks of either side, or the peer exported no such table.
        """
        source, count = read.source, 0
        lanes = remote.lanes.get(source.route) or self._read_lanes(source.route, remote)
        for lane, members, rows in zip(lanes, source.members, source.rows, strict=True):
            if not members:
                continue
            there, here = lane.src, lane.dst
            assert isinstance(there, Window)  # as `_read_lanes` makes them
            assert isinstance(here, Window)
            theirs, ours = there.segment.group, here.segment.group
            blocks, num_blocks = read.remote_blocks[theirs], there.table.num_blocks
            # ours were checked when the engine named them
            if blocks.highest_id() >= num_blocks:
                check_ids_in_pool("the read's", blocks.block_ids, num_blocks)
            what = (members.start, len(members), rows.stop)
            src = there.tokens(*what, blocks, ids[theirs])
            dst = here.tokens(*what, read.blocks[ours], ids[len(read.remote_blocks) + ours])
            edges = [rows.start, rows.stop]
            yield Span(lane, src, dst, len(members), slice(count, count + 1), edges)
            count += 1

    def _chunk_lanes(self, route: Route, packing: bool) -> tuple[Lane, ...]:
        lanes = []
        for index, segment in enumerate(route.here):
            window = Window(self.pools.tables[segment.group, segment.family], segment)
            slot = self._slots[segment.order]
            src, dst = (window, slot) if packing else (slot, window)
            conversion = self._conversion(route, index, window, packing)
            lanes.append(self._lane(src, dst, segment, conversion))
        if len(self._lanes) >= _MAX_ROUTES:
            del self._lanes[next(iter(self._lanes))]
        self._lanes[route, packing] = tuple(lanes)
        return self._lanes[route, packing]

    def _read_lanes(self, route: Route, remote: RemotePools) -> tuple[Lane, ...]:
        lanes = []
        for index, (theirs, ours) in enumerate(zip(route.there, route.here, strict=True)):
            table = remote.tables.get((theirs.group, theirs.family))
            if table is None:
                where = f"group {theirs.group}, family {theirs.family}"
                raise RelayoutError(f"no part table of {where}")
            own = self.pools.tables[ours.group, ours.family]
            window = Window(own, ours)
            conversion = self._conversion(route, index, window)
            lanes.append(self._lane(Window(table, theirs), window, ours, conversion))
        found = remote.lanes[route] = tuple(lanes)
        return found

    def _conversion(
        self, route: Route, index: int, window: Window, packing: bool | None = None
    ) -> Conversion | None:
        """Return how the elements of a route's segment change type in a direct read, or when chunks are packed or
        unpacked here, with scales for all rows of a window's table.
        """
        asked = route.conversions[index] if route.conversions else None
        if asked is None or packing not in (None, asked.when_packing):
            return None
        num_rows, num_heads, _ = asked.scales.shape
        scales = np.ones((window.table.num_parts, num_heads, 2), np.float32)
        scales[window.segment.first_row : window.segment.first_row + num_rows] = asked.scales
        elements = asked.src_element, asked.dst_element
        return Conversion(*elements, scales, self.pools.device, rounding=asked.rounding)

    def _lane(
        self,
        src: Window | PackedSide,
        dst: Window | PackedSide,
        segment: SegmentWindow,
        conversion: Conversion | None,
    ) -> Lane:
        """Raises RelayoutError: the sides do not hold these heads, or differ in what a token of a head is."""
        source, target = (end if isinstance(end, PackedSide) else end.side() for end in (src, dst))
        counts = {"num_parts": 0, "num_heads": segment.num_heads, "num_tokens": 0}
        geometry = check_copy(source, target, conversion, **counts)
        words = self.words_of(source, target, geometry, conversion)
        return Lane(src, dst, segment.num_heads, segment.part_token_bytes, *words, conversion)


def packed_sides(address: int, nbytes: int, device: str) -> Mapping[str, PackedSide]:
    """Return slots of `nbytes` as sides of a copy, by the order of a chunk's elements. `address` stands for any."""
    return {order: PackedSide(address, nbytes, order, device) for order in get_args(ElementOrder)}
