"""Pulls in host memory: process_vm_readv, straight to their place or through a slot of our own."""

from __future__ import annotations

import ctypes
import os
import time
from typing import ClassVar

import numpy as np

from kvconnector.datapath.base import Program, ReadOrigin
from kvconnector.datapath.direct.process_memory import read_error
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.probing import TestCopy, probe_like_cost
from kvconnector.datapath.pump.pulling import Pull, ends_of
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.planning.cost import PathCost, packed_on_cpu
from kvconnector_kernels.pump import read_cpu
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.boxes import RUN_COST_BYTES
from kvconnector_kernels.pump.read_threads import ReadThreads
from kvconnector_kernels.relayout import PagedSide, PartTable, RelayoutError
from kvconnector_kernels.relayout.sides import check_copy

SLOT_BYTES = 2 << 20
"""A block's span must fit; most batches use the first eighth of it, which stays in the cache."""
PROBE_BYTES = 1 << 20
_MAX_GEOMETRIES = 1 << 10
_CLOSE_TIMEOUT_S = 5.0


class CpuReads:
    """See `PoolReads`. A large read is shared by `num_threads` threads, the pump's included.

    What reading costs is probed here and now, on memory of this process's own: other processes' is read alike, and when
    a producer is met a request waits already, often beside an engine's thread that leaves little of the GIL.

    Raises:
        TransportError: this platform has no process_vm_readv or does not let it be used, or no pools like ours could be
            read.
    """

    path_name: ClassVar[str] = "rma"
    wakes: ClassVar[bool] = False

    def __init__(self, pools: Pools, *, num_threads: int = 1) -> None:
        self._pools = pools
        self._surplus: dict[tuple[PartTable, PartTable, int], float] = {}
        try:
            self._threads = ReadThreads(num_threads, SLOT_BYTES)
        except OSError as exc:
            raise TransportError(f"no direct reads: {exc}") from exc
        self.function = self._threads.function
        self.stop_function = self._threads.stop_function
        self.context = self._threads.context
        try:
            self._cost = probe_like_cost(
                pools, max_bytes=PROBE_BYTES, allocate=_allocate, seconds_of=self._time
            )
        except RelayoutError as exc:
            raise TransportError(f"no pools like ours can be read: {exc}") from exc

    def sending_cost(self, reading: PathCost) -> PathCost:
        """See `PoolReads`."""
        return packed_on_cpu(reading)

    def prepare(self, remote: RemotePools) -> PathCost:
        """See `PoolReads`. All is compiled and probed by construction."""
        return self._cost

    def make_pull(self, program: Program, origin: ReadOrigin, remote: RemotePools) -> Pull:
        """See `PoolReads`."""
        theirs, ours = (
            [np.ascontiguousarray(group.block_ids, np.int32) for group in blocks]
            for blocks in (origin.blocks, program.blocks)
        )
        copies, nbytes, read_bytes, num_runs = [], 0, 0, 0
        for rectangle in program.rectangles:
            segment = program.segments[rectangle.segment]
            source, here = ends_of(rectangle, program, origin, self._pools, remote)
            src = PagedSide(
                source.table,
                theirs[origin.segments[rectangle.segment].group],
                source.part_start,
                source.head_start,
                source.token_start,
                source.runs,
            )
            dst = PagedSide(
                here.table,
                ours[segment.group],
                here.part_start,
                here.head_start,
                here.token_start,
                here.runs,
            )
            geometry = check_copy(
                src,
                dst,
                num_parts=rectangle.num_parts,
                num_heads=segment.num_heads,
                num_tokens=rectangle.num_tokens,
                head_dim=None,
                item_size_bytes=None,
            )
            surplus = self._check_slot(source.table, here.table, segment.num_heads)
            copies.append((src, dst, geometry))
            nbytes += geometry.nbytes
            read_bytes += round(geometry.nbytes * surplus)
            run_tokens = min(source.table.block_size, source.runs.run_tokens)
            num_runs += rectangle.num_parts * -(-rectangle.num_tokens // run_tokens)
        rows = read_cpu.make_pull(remote.pid, copies, num_threads=self._threads.num_threads)
        if rows[read_cpu.OFFER] != read_cpu.ALONE:
            self._threads.start()
        return Pull(rows, (theirs, ours, remote, copies), nbytes, read_bytes, num_runs)

    def _check_slot(self, src: PartTable, dst: PartTable, num_heads: int) -> float:
        """Check each combination once, and tell its surplus; those of lost producers are forgotten some time."""
        key = (src, dst, num_heads)
        if key not in self._surplus:
            _check_slot(*key)
            if len(self._surplus) >= _MAX_GEOMETRIES:
                self._surplus.clear()
            self._surplus[key] = _surplus_of(src, num_heads)
        return self._surplus[key]

    def _time(self, copy: TestCopy) -> float:
        src, dst = PagedSide(copy.src, copy.src_ids), PagedSide(copy.dst, copy.dst_ids)
        geometry = check_copy(
            src,
            dst,
            num_parts=1,
            num_heads=copy.num_heads,
            num_tokens=copy.num_tokens,
            head_dim=None,
            item_size_bytes=None,
        )
        rows = read_cpu.make_pull(os.getpid(), [(src, dst, geometry)])
        read = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(self.function)
        fence = np.zeros(1, np.int32)
        started_s, used_s = time.perf_counter(), time.thread_time()
        status = r.MORE
        while status == r.MORE:
            status = read(self.context, rows.ctypes.data, fence.ctypes.data, 1)
        if status != r.ALL:
            raise read_error(os.getpid(), status)
        taken_s, used_s = time.perf_counter() - started_s, time.thread_time() - used_s
        # without the time in which others had the core; a clock of coarse ticks may know of none
        return min(taken_s, used_s) if used_s > 0.0 else taken_s

    def end_pull(self, pull: Pull) -> None:
        """See `PoolReads`. Nothing is lent."""

    def error_of(self, status: int, remote: RemotePools) -> KVConnectorError:
        """See `PoolReads`. Statuses are values of `errno`."""
        return read_error(remote.pid, status)

    def finish(self) -> None:
        """See `PoolReads`."""
        if not self._threads.close(_CLOSE_TIMEOUT_S):
            raise TransportError(
                "a thread still reads a producer's pools", timeout_s=_CLOSE_TIMEOUT_S
            )


def _check_slot(src: PartTable, dst: PartTable, num_heads: int) -> None:
    """One token of a part must fit the slot, unless it is read to its place: dense, and stored alike on both sides."""
    strides = src.rows[:, [2, 4]]
    counts = np.array([num_heads - 1, src.head_dim - 1])
    span_bytes = int((strides * counts).sum(axis=1).max()) + src.item_size_bytes
    row_bytes = src.head_dim * src.item_size_bytes
    is_row_wise = all(
        table.is_dim_contiguous and (num_heads == 1 or bool((table.rows[:, 2] == row_bytes).all()))
        for table in (src, dst)
    )
    if span_bytes > SLOT_BYTES and not is_row_wise:
        raise RelayoutError(
            f"a token of a part has {span_bytes} bytes at the producer, the slot for re-layout {SLOT_BYTES}"
        )


def _surplus_of(src: PartTable, num_heads: int) -> float:
    """How many bytes are read for each that is wanted: some heads of a token are read with the others between them, or
    one token at a time, which costs as much as more bytes do.
    """
    _, _, head, token, _ = src.rows[0].tolist()
    if num_heads == src.num_heads or token < head:
        return 1.0
    wanted_bytes = num_heads * src.head_dim * src.item_size_bytes
    return float(min(src.num_heads / num_heads, 1.0 + RUN_COST_BYTES / wanted_bytes))


def _allocate(nbytes: int) -> tuple[int, object]:
    """Memory whose pages are there, so that a probe does not time the kernel clearing them."""
    memory = np.ones(nbytes, np.uint8)
    return memory.ctypes.data, memory
