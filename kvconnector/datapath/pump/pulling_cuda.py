"""Pulls on a GPU: a kernel a rectangle reads the producer's mapped pools, and re-lays them out into ours."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program, ReadOrigin
from kvconnector.datapath.device_memory import kept_unless_through
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copying_cuda import CudaCopies, job_of
from kvconnector.datapath.pump.id_ring import Ring
from kvconnector.datapath.pump.probing import TestCopy, probe_cost
from kvconnector.datapath.pump.pulling import End, Pull, ends_of
from kvconnector.datapath.rectangles import Rectangle
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.planning import GroupBlocks
from kvconnector.planning.cost import PACKED_ON_CUDA, PathCost
from kvconnector_kernels.pump import copy_cuda, read_cuda
from kvconnector_kernels.relayout import BlockIdsError, PagedSide, RelayoutError, relayout
from kvconnector_kernels.relayout.checks import check_ids_in_pool

PROBE_BYTES = 16 << 20
MAX_UNCAPPED_BYTES = 64 << 20
"""A read of no more is over in a fifth of a millisecond, too short to take anything from a model beside it."""
RING_IDS = 1 << 18
"""Block ids of all reads under way: a MiB on the GPU, and one of pinned memory."""
_ALIGN_IDS = 4
_MAX_GEOMETRIES = 1 << 10


@dataclass(frozen=True, slots=True)
class _Job:
    """A job's row but for the block ids, whose addresses go to two of its fields."""

    row: npt.NDArray[np.int64]
    src_ids: int
    dst_ids: int


class CudaReads:
    """See `PoolReads`. Its kernels run on the stream of `copies`, so after what that was ordered after.

    Raises:
        TransportError: no memory for block ids.
    """

    path_name: ClassVar[str] = "peer"
    wakes: ClassVar[bool] = False

    def __init__(self, pools: Pools, copies: CudaCopies) -> None:
        import torch

        self._pools = pools
        self._copies = copies
        try:
            pinned = torch.empty(RING_IDS, dtype=torch.int32, pin_memory=True)
            self._device_ids: Any = torch.empty(RING_IDS, dtype=torch.int32, device=pools.device)
        except RuntimeError as exc:
            raise TransportError(f"no memory for block ids: {exc}", device=pools.device) from exc
        # asked once: the first call into torch after a while takes as long as a small copy
        self._device_address = int(self._device_ids.data_ptr())
        self._pinned_address = pinned.data_ptr()
        self._host_ids = pinned.numpy()
        self._ring = Ring(RING_IDS)
        self._jobs: dict[tuple[object, ...], _Job] = {}
        self._compiled = read_cuda.compile_read()
        self.function = int(self._compiled.address)
        self.stop_function = 0
        self.context = copies.context

    def sending_cost(self, reading: PathCost) -> PathCost:
        """See `PoolReads`. Copy engines may be faster than a kernel that reads over a bus."""
        return PACKED_ON_CUDA

    def prepare(self, remote: RemotePools) -> PathCost:
        """See `PoolReads`: kernels for all heads that both sides have."""
        import torch

        ids = self._device_ids[:1]
        try:
            for key in remote.tables.keys() & self._pools.tables.keys():
                src, dst = remote.tables[key], self._pools.tables[key]
                self._copies.prepare(
                    PagedSide(src, ids),
                    PagedSide(dst, ids),
                    num_heads=min(src.num_heads, dst.num_heads),
                    num_tokens=min(src.block_size, dst.block_size),
                )
            with torch.cuda.device(self._pools.device), torch.cuda.stream(self._copies.stream):
                return probe_cost(
                    remote,
                    self._pools,
                    max_bytes=PROBE_BYTES,
                    allocate=self._allocate,
                    seconds_of=self._time,
                )
        except (RelayoutError, RuntimeError) as exc:
            raise TransportError(f"the producer's pools cannot be read: {exc}") from exc

    def make_pull(self, program: Program, origin: ReadOrigin, remote: RemotePools) -> Pull:
        """See `PoolReads`."""
        rectangles = program.rectangles
        ids = _Ids((*origin.blocks, *program.blocks))
        start = self._ring.take(ids.count)
        if start is None:
            raise RelayoutError(f"no room for {ids.count} block ids beside those of other reads")
        try:
            rows = np.zeros(
                read_cuda.PULL_FIELDS + len(rectangles) * copy_cuda.JOB_FIELDS, np.int64
            )
            jobs = rows[read_cuda.PULL_FIELDS :].reshape(-1, copy_cuda.JOB_FIELDS)
            for row, rectangle in zip(jobs, rectangles, strict=True):
                self._fill(row, rectangle, (program, origin, remote), ids, start)
        except BaseException:
            self._ring.give_back(start)
            raise
        ids.copy_to(self._host_ids[start : start + ids.count])
        rows[read_cuda.NUM_JOBS] = len(rectangles)
        rows[read_cuda.IDS_THERE] = self._device_address + 4 * start
        rows[read_cuda.IDS_HERE] = self._pinned_address + 4 * start
        rows[read_cuda.IDS_BYTES] = 4 * ids.count
        nbytes = sum(
            rectangle.num_parts
            * rectangle.num_tokens
            * program.segments[rectangle.segment].part_token_bytes
            for rectangle in rectangles
        )
        return Pull(rows, (start, remote), nbytes, nbytes, len(rectangles))

    def end_pull(self, pull: Pull) -> None:
        """See `PoolReads`: its block ids."""
        start = pull.kept[0]
        assert isinstance(start, int)  # put there by `make_pull`
        self._ring.give_back(start)

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
        ids: _Ids,
        start: int,
    ) -> None:
        """One job. `ids` will be at `start` of the ring."""
        program, origin, remote = read
        ends = ends_of(rectangle, program, origin, self._pools, remote)
        segment = program.segments[rectangle.segment]
        groups = (
            origin.segments[rectangle.segment].group,
            len(origin.blocks) + segment.group,
        )
        for end, group in zip(ends, groups, strict=True):
            _check_ids(end, rectangle.num_tokens, ids.vectors[group])
        key = (*ends, segment.num_heads, rectangle.num_parts, rectangle.num_tokens)
        places = [start + ids.offsets[group] for group in groups]
        job = self._jobs.get(key) or self._prepare(key, ends, places)
        row[:] = job.row
        row[job.src_ids] = self._device_address + 4 * places[0]
        row[job.dst_ids] = self._device_address + 4 * places[1]

    def _prepare(self, key: tuple[Any, ...], ends: tuple[End, End], places: list[int]) -> _Job:
        *_, num_heads, num_parts, num_tokens = key
        src, dst = (
            PagedSide(
                end.table,
                self._device_ids[place:],
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

    def _allocate(self, nbytes: int) -> tuple[int, object]:
        import torch

        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._pools.device)
        return memory.data_ptr(), memory

    def _time(self, copy: TestCopy) -> float:
        import torch

        src, dst = (
            PagedSide(table, torch.from_numpy(ids).to(self._pools.device))
            for table, ids in ((copy.src, copy.src_ids), (copy.dst, copy.dst_ids))
        )
        self._copies.finish(look_s=0.0)
        started_s = time.perf_counter()
        relayout(
            src,
            dst,
            num_parts=1,
            num_heads=copy.num_heads,
            num_tokens=copy.num_tokens,
            max_programs=self._copies.max_programs,
        )
        self._copies.finish(look_s=0.0)
        return time.perf_counter() - started_s


class _Ids:
    """The block ids of a read, one vector after the other, each where the kernel's pointers are aligned."""

    def __init__(self, blocks: tuple[GroupBlocks, ...]) -> None:
        self.vectors = [group.block_ids for group in blocks]
        self.offsets: list[int] = []
        at = 0
        for vector in self.vectors:
            self.offsets.append(at)
            at += len(vector) + -len(vector) % _ALIGN_IDS
        self.count = max(at, _ALIGN_IDS)

    def copy_to(self, memory: npt.NDArray[np.int32]) -> None:
        """Write them to `count` ids of memory."""
        for vector, offset in zip(self.vectors, self.offsets, strict=True):
            memory[offset : offset + len(vector)] = vector


def _check_ids(end: End, num_tokens: int, ids: npt.NDArray[np.int32]) -> None:
    last = end.token_start + end.runs.offset(num_tokens - 1)
    needed = last // end.table.block_size + 1
    if needed > len(ids):
        raise BlockIdsError(
            f"{len(ids)} block ids of {end.table.block_size} tokens, the read needs {needed}"
        )
    check_ids_in_pool("the read's", ids, end.table.num_blocks)
