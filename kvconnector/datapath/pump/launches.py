"""Kernel launches as jobs of the loop: each is prepared once for all similar copies, and filled in for each copy."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.lanes import Lane, Span, Tokens, Window
from kvconnector.datapath.pump.copies import address_of
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.copy_cuda import fill_jobs
from kvconnector_kernels.relayout import Conversion, PackedSide, PartTable, Side
from kvconnector_kernels.relayout.sides import CopyGeometry

if TYPE_CHECKING:
    from kvconnector_kernels.relayout.launch import PreparedLaunch

_MAX_LAUNCHES = 1 << 10
_JOB_WORDS = r.num_words(r.CudaJob)
_SLOT_PARAM, _PARAMS = (r.word_of(r.CudaJob, name) for name in ("slot_param", "params"))


class _Job(NamedTuple):
    """A launch of one part, as `fill_jobs` takes it by addresses of `memory`, and where its tokens start and how many
    it has.
    """

    terms: int
    launch: int
    memory: tuple[npt.NDArray[np.int64], r.LaunchRecord]
    starts: tuple[int, int]
    num_tokens: int


class Launches:
    """Makes the jobs of spans. `prepare` makes a launch for two sides and numbers of heads and tokens. That launch
    stands for all spans without runs between the same two pools, or a pool and a slot, whose tokens begin at the same
    place in a block and whose number of tokens has the same power of two: kernels and tiles depend on nothing else.
    """

    def __init__(
        self,
        prepare: Callable[[Side, Side, int, int, Conversion | None], PreparedLaunch],
        max_programs: int,
    ) -> None:
        self._prepare = prepare
        self._max_programs = max_programs
        self._jobs: dict[tuple[object, ...], _Job] = {}

    def fill(self, address: int, span: Span, stream: int, max_uncapped_bytes: int) -> None:
        """Write the jobs of a span's chunks.

        Args:
            address: Where the jobs of all chunks of a read are, contiguous.
            span: The copies.
            stream: The handle of the stream on which they run.
            max_uncapped_bytes: A job of at most this size may have any number of programs.

        Raises:
            RelayoutError: See `prepare_launch`.
        """
        job, lane = self._job(span), span.lane
        further = span.src.token_start - job.starts[0], span.dst.token_start - job.starts[1]
        counts = span.num_tokens - job.num_tokens, span.num_tokens
        ids, parts = (span.src.ids, span.dst.ids), (_first_part(lane.src), _first_part(lane.dst))
        part_bytes = span.num_tokens * lane.token_bytes
        limits = self._max_programs, max_uncapped_bytes
        # numpy takes several times as long to make an array and to give its address
        edges, chunks = array("q", span.rows), span.chunks
        numbers = r.SpanRecord(*further, *counts, *ids, *parts, stream, part_bytes, *limits)
        fill_jobs(
            address + 8 * _JOB_WORDS * chunks.start,
            _JOB_WORDS * (chunks.step or 1),
            len(edges) - 1,
            job.terms,
            edges.buffer_info()[0],
            job.launch,
            ctypes.byref(numbers),
        )

    def _job(self, span: Span) -> _Job:
        num_tokens, lane = span.num_tokens, span.lane
        kinds = _kind(lane.src, span.src), _kind(lane.dst, span.dst)
        if None in kinds:
            return self._prepared(span)
        key = (lane.num_heads, num_tokens & -num_tokens, *kinds, lane.conversion)
        job = self._jobs.get(key)
        if job is None:
            job = self._prepared(span)
            if len(self._jobs) >= _MAX_LAUNCHES:
                del self._jobs[next(iter(self._jobs))]
            self._jobs[key] = job
        return job

    def _prepared(self, span: Span) -> _Job:
        lane = span.lane
        sides = _side(lane.src, span.src), _side(lane.dst, span.dst)
        launch = self._prepare(*sides, lane.num_heads, span.num_tokens, lane.conversion)
        return _job_for(span, launch)


def _first_part(end: Window | PackedSide) -> int:
    return end.segment.first_row if isinstance(end, Window) else 0


def _kind(end: Window | PackedSide, tokens: Tokens) -> tuple[object, ...] | None:
    """Return the properties of one end on which a launch depends; None if there are runs."""
    if isinstance(end, PackedSide):
        return (end.order,)
    if not end.segment.stripe.is_dense:
        return None
    return end.table, end.segment.head_start, tokens.token_start % end.table.block_size


def _side(end: Window | PackedSide, tokens: Tokens) -> Side:
    return end.side(tokens) if isinstance(end, Window) else end


def _job_for(span: Span, launch: PreparedLaunch) -> _Job:
    kernel, terms = launch.kernel, np.zeros((4, _JOB_WORDS), np.int64)
    job = r.CudaJob.from_buffer(terms[0])
    job.function, job.num_threads = kernel.function, kernel.num_threads
    job.shared_bytes, job.num_params = kernel.shared_bytes, len(kernel.param_bytes)
    job.params[: len(launch.values)] = launch.values
    terms[3, _word(launch, "num_tokens")] = 1
    ids, parts = [-1, -1], [-1, -1]
    for side, (name, end) in enumerate((("src", span.lane.src), ("dst", span.lane.dst))):
        if isinstance(end, Window):
            ids[side] = _word(launch, f"{name}_ids")
            parts[side] = _word(launch, f"{name}_part_start")
            terms[1 + side, _word(launch, f"{name}_origin")] = 1
        else:
            terms[0, _SLOT_PARAM] = launch.index(f"{name}_address")
            strides = [f"{name}_{axis}_stride" for axis in ("part", "head", "token", "dim")]
            more = _strides_of_a_token(span.lane, end)
            terms[3, [_word(launch, each) for each in strides]] = more
    lead, count = (launch.values[launch.index(name)] for name in ("lead_tokens", "num_token_tiles"))
    tiles = _word(launch, "num_tiles"), _word(launch, "num_token_tiles")
    shape = lead, launch.tile_tokens, launch.tiles_per_part // count
    starts = span.src.token_start, span.dst.token_start
    record = r.LaunchRecord(*ids, *parts, *tiles, *shape)
    places = address_of(terms), ctypes.addressof(record)
    return _Job(*places, (terms, record), starts, span.num_tokens)


def _word(launch: PreparedLaunch, name: str) -> int:
    """Return the index of a kernel's parameter among the words of a job."""
    return _PARAMS + launch.index(name)


def _strides_of_a_token(lane: Lane, slot: PackedSide) -> npt.NDArray[np.int64]:
    """Return the amounts that each further token adds to the strides of a slot."""
    paged = lane.src if isinstance(lane.src, Window) else lane.dst
    assert isinstance(paged, Window)  # no copy is between two slots
    item = paged.table.item_size_bytes
    if (conversion := lane.conversion) is not None:
        is_read = slot is lane.src
        item = conversion.src_item_bytes if is_read else conversion.dst_item_bytes
    shape = paged.table.head_dim, item
    none, one = (
        slot.strides_bytes(CopyGeometry(1, lane.num_heads, count, *shape)) for count in (0, 1)
    )
    return np.subtract(one, none)


def windows_of(block_size: int) -> list[tuple[int, int]]:
    """Return pairs of a first token and a number of tokens that together need all kernels: for whole and partial tiles,
    aligned and not. Chunks in the order HDN may need more, since their rows are only aligned as their number of tokens
    is.
    """
    return [(0, block_size), (1, block_size), (0, 1)]


def shares_of(table: PartTable) -> list[int]:
    """Return the number of heads of a table, and the shares of them that a peer with more ranks has."""
    return sorted({table.num_heads >> shift for shift in range(table.num_heads.bit_length())})
