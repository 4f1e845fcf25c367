"""Launches on a GPU as jobs of the loop: prepared once for all similar copies, and filled in for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.pump.copies import Lane, Span, Tokens, Window, words_of
from kvconnector_kernels.pump.copy_cuda import JOB
from kvconnector_kernels.pump.records import index_of
from kvconnector_kernels.relayout import PackedSide, PartTable, Side
from kvconnector_kernels.relayout.sides import CopyGeometry

if TYPE_CHECKING:
    from kvconnector_kernels.relayout.launch import PreparedLaunch

_MAX_LAUNCHES = 1 << 10
_NBYTES, _NUM_PROGRAMS, _STREAM, _SLOT_PARAM, _PARAMS = (
    index_of(JOB, name) for name in ("nbytes", "num_programs", "stream", "slot_param", "params")
)
_COUNTS = ("num_tokens", "num_token_tiles", "num_tiles")
_STRIDES = ("part_stride", "head_stride", "token_stride", "dim_stride")


class _Job(NamedTuple):
    """The `words` of a launch of one part, for `num_tokens` tokens from `starts` of the source and the destination on.

    `windows`: for an end that is a window, 0 or 1 for source or destination, and the words of its block ids, first part
    and origin. `strides`: the words of a slot's strides, and what a further token adds to each. `counts`: the words of
    the tokens, the tiles along them, and all tiles. `shape`: the tokens before the copy in the first tile, those of a
    tile, and the tiles that share their tokens.
    """

    words: list[int]
    num_tokens: int
    starts: tuple[int, int]
    windows: list[tuple[int, ...]]
    strides: list[tuple[int, int]]
    counts: tuple[int, ...]
    shape: tuple[int, int, int]


class Launches:
    """Makes the jobs of spans. `prepare` makes a launch for two sides and numbers of heads and tokens. That launch
    stands for all spans without runs between the same two pools, or a pool and a slot, whose tokens begin at the same
    place in a block and whose number of tokens has the same power of two: kernels and tiles depend on nothing else.
    """

    def __init__(
        self, prepare: Callable[[Side, Side, int, int], PreparedLaunch], max_programs: int
    ) -> None:
        self._prepare = prepare
        self._max_programs = max_programs
        self._jobs: dict[tuple[object, ...], _Job] = {}

    def fill(
        self, jobs: npt.NDArray[np.int64], span: Span, stream: int, max_uncapped_bytes: int
    ) -> None:
        """Write the jobs of a span's chunks.

        Args:
            jobs: The words of each of these jobs, `[chunk, word]`.
            span: The copies.
            stream: The handle of the stream on which they run.
            max_uncapped_bytes: A job of at most this size may have any number of programs.

        Raises:
            RelayoutError: See `prepare_launch`.
        """
        job, words = self._part_of(span, stream)
        edges, num_tiles = np.array(span.rows, np.int64), job.counts[2]
        num_parts = edges[1:] - edges[:-1]
        jobs[:] = words
        jobs[:, _NBYTES] *= num_parts
        jobs[:, num_tiles] = tiles = words[num_tiles] * num_parts
        for _, _, part, _ in job.windows:
            jobs[:, part] += edges[:-1]
        capped = np.minimum(tiles, self._max_programs)
        jobs[:, _NUM_PROGRAMS] = np.where(jobs[:, _NBYTES] > max_uncapped_bytes, capped, tiles)

    def job_of_read(self, span: Span, stream: int, max_uncapped_bytes: int) -> list[int]:
        """Return the words of a direct read's one job, as `fill` writes them: for one, numpy takes longer than Python.
        Raises RelayoutError: See `prepare_launch`.
        """
        job, words = self._part_of(span, stream)
        (first, stop), num_tiles = span.rows, job.counts[2]
        words[_NBYTES] *= stop - first
        words[num_tiles] *= stop - first
        for _, _, part, _ in job.windows:
            words[part] += first
        words[_NUM_PROGRAMS] = words[num_tiles]
        if words[_NBYTES] > max_uncapped_bytes:
            words[_NUM_PROGRAMS] = min(words[num_tiles], self._max_programs)
        return words

    def _part_of(self, span: Span, stream: int) -> tuple[_Job, list[int]]:
        """Return a job that stands for a span's, and the words of a launch of the span's first part."""
        job, lane, num_tokens = self._job(span), span.lane, span.num_tokens
        words, ends = job.words.copy(), ((lane.src, span.src), (lane.dst, span.dst))
        for side, ids, part, origin in job.windows:
            window, tokens = ends[side]
            words[ids], words[part] = tokens[0], window.segment.first_row  # type: ignore[union-attr]  # a window
            words[origin] += tokens[2] - job.starts[side]
        for stride, more in job.strides:
            words[stride] += more * (num_tokens - job.num_tokens)
        lead, tile_tokens, tiles_beside = job.shape
        token_tiles = -(-(num_tokens + lead) // tile_tokens)
        at_tokens, at_token_tiles, at_tiles = job.counts
        words[at_tokens], words[at_token_tiles] = num_tokens, token_tiles
        words[at_tiles] = token_tiles * tiles_beside
        words[_NBYTES], words[_STREAM] = num_tokens * lane.token_bytes, stream
        return job, words

    def _job(self, span: Span) -> _Job:
        num_tokens, lane = span.num_tokens, span.lane
        kinds = _kind(lane.src, span.src), _kind(lane.dst, span.dst)
        if None in kinds:
            return self._prepared(span)
        key = (lane.num_heads, num_tokens & -num_tokens, *kinds)
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
        return _job_for(span, self._prepare(*sides, lane.num_heads, span.num_tokens))


def _kind(end: Window | PackedSide, tokens: Tokens) -> tuple[object, ...] | None:
    """Return the properties of one end on which a launch depends; None if there are runs."""
    if isinstance(end, PackedSide):
        return (end.order,)
    if not end.segment.stripe.is_dense:
        return None
    return end.table, end.segment.head_start, tokens[2] % end.table.block_size


def _side(end: Window | PackedSide, tokens: Tokens) -> Side:
    return end.side(tokens) if isinstance(end, Window) else end


def _job_for(span: Span, launch: PreparedLaunch) -> _Job:
    kernel, record = launch.kernel, np.zeros(1, JOB)
    record["function"], record["num_threads"] = kernel.function, kernel.num_threads
    record["shared_bytes"] = kernel.shared_bytes
    record["num_params"] = len(kernel.param_bytes)
    record["params"][0, : len(launch.values)] = launch.values
    words: list[int] = words_of(record)[0].tolist()
    windows, strides = list[tuple[int, ...]](), list[tuple[int, int]]()
    for side, (name, end) in enumerate((("src", span.lane.src), ("dst", span.lane.dst))):
        if isinstance(end, Window):
            at = [_word(launch, f"{name}_{each}") for each in ("ids", "part_start", "origin")]
            windows.append((side, *at))
        else:
            words[_SLOT_PARAM] = launch.index(f"{name}_address")
            at = [_word(launch, f"{name}_{each}") for each in _STRIDES]
            strides = list(zip(at, _strides_of_a_token(span.lane, end), strict=True))
    counts = tuple([_word(launch, name) for name in _COUNTS])
    lead, count = (launch.values[launch.index(name)] for name in ("lead_tokens", "num_token_tiles"))
    shape = lead, launch.tile_tokens, launch.tiles_per_part // count
    starts = span.src[2], span.dst[2]
    return _Job(words, span.num_tokens, starts, windows, strides, counts, shape)


def _word(launch: PreparedLaunch, name: str) -> int:
    """Return the index of a kernel's parameter among the words of a job."""
    return _PARAMS + launch.index(name)


def _strides_of_a_token(lane: Lane, slot: PackedSide) -> list[int]:
    """Return the amounts that each further token adds to the strides of a slot."""
    paged = lane.src if isinstance(lane.src, Window) else lane.dst
    assert isinstance(paged, Window)  # no copy is between two slots
    shape = paged.table.head_dim, paged.table.item_size_bytes
    none, one = (
        slot.strides_bytes(CopyGeometry(1, lane.num_heads, count, *shape)) for count in (0, 1)
    )
    return [after - before for before, after in zip(none, one, strict=True)]


def windows_of(block_size: int) -> list[tuple[int, int]]:
    """Return first tokens and numbers of tokens that together need all kernels: whole tiles and others, aligned and
    not. Chunks in the order HDN may need more, since their rows are only aligned as their number of tokens is.
    """
    return [(0, block_size), (1, block_size), (0, 1)]


def shares_of(table: PartTable) -> list[int]:
    """Return the number of heads of a table, and the shares of them that a peer with more ranks has."""
    return sorted({table.num_heads >> shift for shift in range(table.num_heads.bit_length())})
