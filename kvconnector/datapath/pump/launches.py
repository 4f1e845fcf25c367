"""Launches on a GPU as jobs of the pump: prepared once for all copies that are alike, and filled in for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.pump.copies import Span, words_of
from kvconnector_kernels.pump.copy_cuda import JOB, fill_jobs
from kvconnector_kernels.relayout import PackedSide, PagedSide, PartTable, Side
from kvconnector_kernels.relayout.runs import ADJACENT
from kvconnector_kernels.relayout.sides import CopyGeometry

if TYPE_CHECKING:
    from kvconnector_kernels.relayout.launch import PreparedLaunch

_MAX_LAUNCHES = 1 << 10
_SLOT_PARAM, _PARAMS = map(JOB.names.index, ("slot_param", "params"))  # type: ignore[union-attr]  # a record


class _Job(NamedTuple):
    """A launch of one part, as `fill_jobs` takes it, and the tokens that it is for."""

    terms: npt.NDArray[np.int64]
    launch: tuple[int, ...]
    starts: tuple[int, int]
    num_tokens: int


class Launches:
    """The jobs of spans. A launch that `prepare` has made stands for all spans without runs between the same pools, or
    one and a slot, whose tokens begin at the same place in a block and are as even in number: kernels and tiles depend
    on no more.
    """

    def __init__(self, prepare: Callable[[Span], PreparedLaunch], max_programs: int) -> None:
        self._prepare = prepare
        self._max_programs = max_programs
        self._jobs: dict[tuple[object, ...], _Job] = {}

    def fill(
        self, words: npt.NDArray[np.int64], span: Span, stream: int, *, max_uncapped_bytes: int
    ) -> None:
        """Write the jobs of a span's chunks.

        Args:
            words: of all chunks of a program, `[chunk, word]`.
            span: what is copied.
            stream: the handle that it is copied on.
            max_uncapped_bytes: a job of at most this size may have any number of programs.

        Raises:
            RelayoutError: see `prepare_launch`.
        """
        job = self._job(span)
        src, dst = map(_position, (span.src, span.dst))
        further = src[2] - job.starts[0], dst[2] - job.starts[1], span.num_tokens - job.num_tokens
        where = (span.num_tokens, src[0], dst[0], src[1], dst[1], stream, span.part_bytes)
        rows, fields = words[span.chunks], np.asarray(span.fields, np.int32)
        limits = self._max_programs, max_uncapped_bytes
        fill_jobs(rows, job.terms, fields, job.launch, (*further, *where, *limits))
        words[span.chunks] = rows

    def _job(self, span: Span) -> _Job:
        num_tokens = span.num_tokens
        key = (span.num_heads, num_tokens & -num_tokens, _kind(span.src), _kind(span.dst))
        is_usual = _holds(span.src, num_tokens) and _holds(span.dst, num_tokens)
        job = self._jobs.get(key) if is_usual else None
        if job is None:
            job = _job_for(span, self._prepare(span))
            if is_usual:
                if len(self._jobs) >= _MAX_LAUNCHES:
                    del self._jobs[next(iter(self._jobs))]
                self._jobs[key] = job
        return job


def _position(side: Side) -> tuple[int, int, int]:
    """The address of its block ids, its first row and its first token; a slot has none of them."""
    if isinstance(side, PackedSide):
        return 0, 0, 0
    address: int = side.block_ids.address  # type: ignore[union-attr]  # of a GPU's copies
    return address, side.part_start, side.token_start


def _kind(side: Side) -> tuple[object, ...]:
    """What a launch that stands for others depends on."""
    if isinstance(side, PackedSide):
        return (side.order,)
    return side.table, side.head_start, side.token_start % side.table.block_size


def _holds(side: Side, num_tokens: int) -> bool:
    """Returns True for a slot, and for adjacent tokens of blocks that are there."""
    if isinstance(side, PackedSide):
        return True
    room = side.num_ids * side.table.block_size
    is_adjacent = side.runs is ADJACENT or side.runs == ADJACENT
    return is_adjacent and side.token_start <= room - num_tokens


def _job_for(span: Span, launch: PreparedLaunch) -> _Job:
    terms = np.zeros((4, JOB.itemsize // 8), np.int64)
    terms[0] = words_of(gpu_job_of(launch))[0]
    terms[3, _word(launch, "num_tokens")] = 1
    ids, parts = [-1, -1], [-1, -1]
    for side, (name, place) in enumerate((("src", span.src), ("dst", span.dst))):
        if isinstance(place, PagedSide):
            ids[side] = _word(launch, f"{name}_ids")
            parts[side] = _word(launch, f"{name}_part_start")
            terms[1 + side, _word(launch, f"{name}_origin")] = 1
        else:
            terms[0, _SLOT_PARAM] = launch.index(f"{name}_address")
            strides = [f"{name}_{axis}_stride" for axis in ("part", "head", "token", "dim")]
            terms[3, [_word(launch, each) for each in strides]] = _strides_of_a_token(span, place)
    lead, count = (launch.values[launch.index(name)] for name in ("lead_tokens", "num_token_tiles"))
    tiles = _word(launch, "num_tiles"), _word(launch, "num_token_tiles")
    shape = lead, launch.tile_tokens, launch.tiles_per_part // count
    starts = _position(span.src)[2], _position(span.dst)[2]
    return _Job(terms, (*ids, *parts, *tiles, *shape), starts, span.num_tokens)


def _word(launch: PreparedLaunch, name: str) -> int:
    """Which word of a job is this parameter of the kernel."""
    word: int = _PARAMS + launch.index(name)
    return word


def _strides_of_a_token(span: Span, slot: PackedSide) -> npt.NDArray[np.int64]:
    """What a token more adds to the strides of a slot."""
    paged = span.src if isinstance(span.src, PagedSide) else span.dst
    assert isinstance(paged, PagedSide)  # no copy is between two slots
    shape = paged.table.head_dim, paged.table.item_size_bytes
    none, one = (
        slot.strides_bytes(CopyGeometry(1, span.num_heads, count, *shape)) for count in (0, 1)
    )
    return np.subtract(one, none)


def windows_of(block_size: int) -> list[tuple[int, int]]:
    """First tokens and numbers of tokens for which kernels may differ: whole tiles and others, aligned and not. But for
    chunks in the order HDN, whose rows are as well aligned as their number of tokens is, there are no others.
    """
    return [(0, block_size), (1, block_size), (0, 1)]


def shares_of(table: PartTable) -> list[int]:
    """All heads of a table, and the shares of them that a peer with more ranks has."""
    return sorted({table.num_heads >> shift for shift in range(table.num_heads.bit_length())})


def gpu_job_of(launch: PreparedLaunch) -> npt.NDArray[np.void]:
    """A launch as one job: all parts, one program for each tile, and 0 bytes."""
    job = np.zeros(1, JOB)
    job["function"] = launch.function
    job["num_programs"] = launch.values[launch.index("num_tiles")]
    job["num_threads"] = launch.num_threads
    job["shared_bytes"] = launch.shared_bytes
    job["num_params"] = len(launch.values) + launch.num_scratch_params
    job["params"][0, : len(launch.values)] = launch.values
    return job
