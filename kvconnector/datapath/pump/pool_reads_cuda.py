"""Direct reads on a GPU: a kernel a segment reads the producer's mapped pools, and re-lays them out into ours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from kvconnector.datapath.base import DirectRead
from kvconnector.datapath.device_memory import kept_unless_idle
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import Jobs, words_of
from kvconnector.datapath.pump.copies_cuda import (
    CudaCopies,
    job_of,
    keep_newest,
    shares_of,
    windows_of,
)
from kvconnector.datapath.pump.id_buffers import IdBuffer
from kvconnector.datapath.pump.pool_reads import PoolReads, sides_of
from kvconnector.errors import TransportError
from kvconnector_kernels.pump import read_cuda
from kvconnector_kernels.pump.copy_cuda import JOB
from kvconnector_kernels.relayout import (
    BlockIdsAt,
    PagedSide,
    PartTable,
    RelayoutError,
)
from kvconnector_kernels.relayout.checks import check_ids_in_pool
from kvconnector_kernels.relayout.launch import MOVED, PreparedLaunch
from kvconnector_kernels.relayout.runs import ADJACENT

MAX_UNCAPPED_BYTES = 64 << 20
"""A read of no more is over in a fifth of a millisecond, too short to take anything from a model beside it."""
_USUAL_BLOCK_TOKENS = 16
_MIN_IDS_BYTES = 16  # the driver refuses to copy nothing


@dataclass(frozen=True, slots=True)
class _Job:
    """The words of a job but for what differs from read to read: `patched` are those of `_PATCHED`."""

    launch: PreparedLaunch
    words: list[int]
    patched: list[int]


_PATCHED = ("src_ids", "dst_ids", "src_part_start", "dst_part_start", *MOVED)
_NUM_TILES = _PATCHED.index("num_tiles")
_NUM_PROGRAMS, _STREAM, _PARAMS = map(JOB.names.index, ("num_programs", "stream", "params"))  # type: ignore[union-attr]  # a record


class CudaReads(PoolReads):
    """See `PoolReads`. Its kernels run on the streams of `copies`, so behind the same marks."""

    means = "CUDA IPC"

    def __init__(self, pools: Pools, copies: CudaCopies) -> None:
        self._pools = pools
        self._copies = copies
        self._jobs: dict[tuple[object, ...], _Job] = {}
        self._compiled = read_cuda.compile_read()
        self.function = int(self._compiled.address)
        self.context = copies.context
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile what reads of pools like ours need, with blocks as ours or of the usual size."""
        for table in self._pools.tables.values():
            usual = PartTable(
                table.rows,
                num_blocks=table.num_blocks,
                block_size=_USUAL_BLOCK_TOKENS,
                num_heads=table.num_heads,
                head_dim=table.head_dim,
                item_size_bytes=table.item_size_bytes,
                device=table.device,
            )
            for num_heads in shares_of(table):
                self._compile(table, table, num_heads)
                self._compile(usual, table, num_heads)

    def _compile(self, src: PartTable, dst: PartTable, num_heads: int) -> None:
        """The kernels for reads of so many heads."""
        ids = self._copies.some_ids()
        windows = windows_of(min(src.block_size, dst.block_size))
        for (there, count), (here, _) in product(windows, windows):
            self._copies.prepare(
                PagedSide(src, ids, token_start=there),
                PagedSide(dst, ids, token_start=here),
                num_heads=num_heads,
                num_tokens=count,
            )

    def prepare(self, remote: RemotePools) -> None:
        """See `PoolReads`: kernels for all heads that both sides have."""
        try:
            for key in remote.tables.keys() & self._pools.tables.keys():
                src, dst = remote.tables[key], self._pools.tables[key]
                self._compile(src, dst, min(src.num_heads, dst.num_heads))
        except (RelayoutError, RuntimeError) as exc:
            raise TransportError(f"the producer's pools cannot be read: {exc}") from exc

    def make_jobs(self, read: DirectRead, remote: RemotePools) -> Jobs:
        segments = [index for index, members in enumerate(read.members) if members]
        vectors = [group.block_ids for group in (*read.their_blocks, *read.blocks)]
        stream = self._copies.streams.marks.stream_of(read.blocks)
        buffer = self._copies.ids.lend(vectors, stream)
        try:
            places, nbytes_of_ids = buffer.write(vectors, self._pools.device)
            handle = self._copies.streams.handles[stream]
            ids = buffer.there_address, buffer.here_address, max(nbytes_of_ids, _MIN_IDS_BYTES)
            words = [len(segments), *ids, handle]
            for index in segments:
                words += self._words(read, index, (remote, places), handle)
        except BaseException:
            self._copies.ids.give_back(buffer)
            raise
        # numpy fills records field by field, which takes longer than to launch them
        return Jobs(np.array(words, np.int64), (buffer, remote))

    def end_jobs(self, jobs: Jobs) -> None:
        """See `PoolReads`: the buffer of its block ids."""
        buffer = jobs.kept[0]
        assert isinstance(buffer, IdBuffer)  # put there by `make_jobs`
        self._copies.ids.give_back(buffer)

    def finish(self) -> None:
        """See `PoolReads`. The block ids of copies that do not end stay where they are."""
        with kept_unless_idle(self, "the block ids of direct reads"):
            self._copies.finish()

    def _words(
        self,
        read: DirectRead,
        index: int,
        there: tuple[RemotePools, list[BlockIdsAt]],
        stream: int,
    ) -> list[int]:
        """The job for a segment. Each group's ids, the producer's first, have a place."""
        remote, places = there
        num_groups = len(read.their_blocks)
        ids = places[:num_groups], places[num_groups:]
        src, dst, geometry = sides_of(index, read, (self._pools, remote), ids)
        sides, counts = (src, dst), geometry[:3]
        # ours were checked when the engine named them
        theirs = read.their_blocks[read.their_segments[index].group]
        check_ids_in_pool("the read's", theirs.block_ids, src.table.num_blocks)
        job = self._job(sides, counts)
        words = job.words.copy()
        if not _has_runs(sides):
            values = (
                *(side.block_ids.address for side in sides),  # type: ignore[union-attr]  # from `places`
                *(src.part_start, dst.part_start),
                *job.launch.moved((src.token_start, dst.token_start), counts[2], counts[0]),
            )
            for at, value in zip(job.patched, values, strict=True):
                words[at] = value
        words[_STREAM] = stream
        words[_NUM_PROGRAMS] = words[job.patched[_NUM_TILES]]
        if geometry.nbytes > MAX_UNCAPPED_BYTES:
            words[_NUM_PROGRAMS] = min(words[_NUM_PROGRAMS], self._copies.max_programs)
        return words

    def _job(self, sides: tuple[PagedSide, PagedSide], counts: tuple[int, int, int]) -> _Job:
        """A job that stands for this read's: prepared once for reads alike, but each time for tokens in runs."""
        num_parts, num_heads, num_tokens = counts
        key = (num_heads, num_tokens & -num_tokens, *map(_place, sides))
        has_runs = _has_runs(sides)
        job = None if has_runs else self._jobs.get(key)
        if job is None:
            launch = self._copies.prepare(
                *sides, num_heads=num_heads, num_tokens=num_tokens, num_parts=num_parts
            )
            patched = [_PARAMS + launch.index(name) for name in _PATCHED]
            job = _Job(launch, words_of(job_of(launch))[0].tolist(), patched)
            if not has_runs:
                keep_newest(self._jobs, key, job)
        return job


def _place(side: PagedSide) -> tuple[PartTable, int, int]:
    """What a launch that stands for others depends on, see `SpanJobs`."""
    return side.table, side.head_start, side.token_start % side.table.block_size


def _has_runs(sides: tuple[PagedSide, PagedSide]) -> bool:
    return any(side.runs is not ADJACENT and side.runs != ADJACENT for side in sides)
