"""Pulls on a GPU: a kernel a rectangle reads the producer's mapped pools, and re-lays them out into ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program, ReadOrigin
from kvconnector.datapath.device_memory import kept_unless_through
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copying_cuda import CudaCopies, job_of
from kvconnector.datapath.pump.id_buffers import IdBuffer
from kvconnector.datapath.pump.pulling import End, Pull, ends_of
from kvconnector.datapath.rectangles import Rectangle
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector_kernels.pump import copy_cuda, read_cuda
from kvconnector_kernels.relayout import (
    BlockIdsAt,
    BlockIdsError,
    PagedSide,
    RelayoutError,
)
from kvconnector_kernels.relayout.checks import check_ids_in_pool

MAX_UNCAPPED_BYTES = 64 << 20
"""A read of no more is over in a fifth of a millisecond, too short to take anything from a model beside it."""
_MIN_IDS_BYTES = 16  # the driver refuses to copy nothing
_MAX_GEOMETRIES = 1 << 10


@dataclass(frozen=True, slots=True)
class _Job:
    """A job's row but for the block ids, whose addresses go to two of its fields."""

    row: npt.NDArray[np.int64]
    src_ids: int
    dst_ids: int


class CudaReads:
    """See `PoolReads`. Its kernels run on the stream of `copies`, so after what that was ordered after."""

    path_name: ClassVar[str] = "peer"

    def __init__(self, pools: Pools, copies: CudaCopies) -> None:
        self._pools = pools
        self._copies = copies
        self._jobs: dict[tuple[object, ...], _Job] = {}
        self._compiled = read_cuda.compile_read()
        self.function = int(self._compiled.address)
        self.context = copies.context

    def prepare(self, remote: RemotePools) -> None:
        """See `PoolReads`: kernels for all heads that both sides have."""
        ids = self._copies.some_ids()
        try:
            for key in remote.tables.keys() & self._pools.tables.keys():
                src, dst = remote.tables[key], self._pools.tables[key]
                self._copies.prepare(
                    PagedSide(src, ids),
                    PagedSide(dst, ids),
                    num_heads=min(src.num_heads, dst.num_heads),
                    num_tokens=min(src.block_size, dst.block_size),
                )
        except (RelayoutError, RuntimeError) as exc:
            raise TransportError(f"the producer's pools cannot be read: {exc}") from exc

    def make_pull(self, program: Program, origin: ReadOrigin, remote: RemotePools) -> Pull:
        """See `PoolReads`."""
        rectangles = program.rectangles
        vectors = [group.block_ids for group in (*origin.blocks, *program.blocks)]
        buffer = self._copies.ids.lend(vectors)
        try:
            places, nbytes_of_ids = buffer.write(vectors, self._pools.device)
            rows = np.zeros(
                read_cuda.PULL_FIELDS + len(rectangles) * copy_cuda.JOB_FIELDS, np.int64
            )
            jobs = rows[read_cuda.PULL_FIELDS :].reshape(-1, copy_cuda.JOB_FIELDS)
            for row, rectangle in zip(jobs, rectangles, strict=True):
                self._fill(row, rectangle, (program, origin, remote), places)
        except BaseException:
            self._copies.ids.give_back(buffer)
            raise
        rows[read_cuda.NUM_JOBS] = len(rectangles)
        rows[read_cuda.IDS_THERE] = buffer.there_address
        rows[read_cuda.IDS_HERE] = buffer.here_address
        rows[read_cuda.IDS_BYTES] = max(nbytes_of_ids, _MIN_IDS_BYTES)
        nbytes = sum(
            rectangle.num_parts
            * rectangle.num_tokens
            * program.segments[rectangle.segment].part_token_bytes
            for rectangle in rectangles
        )
        return Pull(rows, (buffer, remote), nbytes)

    def end_pull(self, pull: Pull) -> None:
        """See `PoolReads`: the buffer of its block ids."""
        buffer = pull.kept[0]
        assert isinstance(buffer, IdBuffer)  # put there by `make_pull`
        self._copies.ids.give_back(buffer)

    def error_of(self, status: int, remote: RemotePools) -> KVConnectorError:
        """See `PoolReads`. Statuses are of the CUDA driver."""
        return TransportError(
            "the GPU does not take a read of the producer's pools", status=status, pid=remote.pid
        )

    def finish(self) -> None:
        """See `PoolReads`. The block ids of copies that do not end stay where they are."""
        with kept_unless_through(self, "the block ids of direct reads"):
            self._copies.finish()

    def _fill(
        self,
        row: npt.NDArray[np.int64],
        rectangle: Rectangle,
        read: tuple[Program, ReadOrigin, RemotePools],
        places: list[BlockIdsAt],
    ) -> None:
        """One job. Each group's ids, the producer's first, will be at one of `places`."""
        program, origin, remote = read
        ends = ends_of(rectangle, program, origin, self._pools, remote)
        segment = program.segments[rectangle.segment]
        group = origin.segments[rectangle.segment].group
        _check_ids(ends[0], rectangle.num_tokens, origin.blocks[group].block_ids)
        _check_ids(ends[1], rectangle.num_tokens, program.blocks[segment.group].block_ids)
        ids = (places[group], places[len(origin.blocks) + segment.group])
        key = (*ends, segment.num_heads, rectangle.num_parts, rectangle.num_tokens)
        job = self._jobs.get(key) or self._prepare(key, ends, ids)
        row[:] = job.row
        row[job.src_ids], row[job.dst_ids] = ids[0].address, ids[1].address

    def _prepare(
        self, key: tuple[Any, ...], ends: tuple[End, End], places: tuple[BlockIdsAt, BlockIdsAt]
    ) -> _Job:
        *_, num_heads, num_parts, num_tokens = key
        src, dst = (
            PagedSide(
                end.table,
                place,
                end.part_start,
                end.head_start,
                end.token_start,
                end.runs,
            )
            for end, place in zip(ends, places, strict=True)
        )
        launch = self._copies.prepare(
            src, dst, num_heads=num_heads, num_tokens=num_tokens, num_parts=num_parts
        )
        row = job_of(launch)
        nbytes = num_parts * num_tokens * num_heads * src.table.head_dim * src.table.item_size_bytes
        if nbytes > MAX_UNCAPPED_BYTES:
            row[copy_cuda.NUM_PROGRAMS] = min(
                row[copy_cuda.NUM_PROGRAMS], self._copies.max_programs
            )
        src_ids, dst_ids = (
            copy_cuda.PARAMS + launch.index(f"{side}_ids") for side in ("src", "dst")
        )
        if len(self._jobs) >= _MAX_GEOMETRIES:
            self._jobs.clear()
        return self._jobs.setdefault(key, _Job(row, src_ids, dst_ids))


def _check_ids(end: End, num_tokens: int, ids: npt.NDArray[np.int32]) -> None:
    last = end.token_start + end.runs.offset(num_tokens - 1)
    needed = last // end.table.block_size + 1
    if needed > len(ids):
        raise BlockIdsError(
            f"{len(ids)} block ids of {end.table.block_size} tokens, the read needs {needed}"
        )
    check_ids_in_pool("the read's", ids, end.table.num_blocks)
