"""The pump's copies on a GPU: launches prepared once a program, fences in pinned host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program
from kvconnector.datapath.direct.board import ReadyWriter
from kvconnector.datapath.direct.cuda_driver import StreamWriter, load_libcuda
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copying import Fences, Jobs, Span, spans_of
from kvconnector.datapath.pump.ucp import function_address
from kvconnector.errors import TransportError
from kvconnector_kernels.pump import copy_cuda as job
from kvconnector_kernels.relayout import Order, PackedSide, PagedSide, RelayoutError
from kvconnector_kernels.relayout.sides import check_ids_in_pool

if TYPE_CHECKING:
    from kvconnector_kernels.relayout.launch import PreparedLaunch

_FENCE_STRIDE = 16


class CudaCopies:
    """See `ChunkCopies`. All copies run in order on `stream`, and behind what it was ordered after.

    `slot_address` stands for the alignment of all slots.

    Raises:
        TransportError: the driver lacks what the pump needs, or a kernel takes other parameters than it was given.
    """

    def __init__(
        self, pools: Pools, *, slot_address: int, slot_bytes: int, max_programs: int
    ) -> None:
        import torch

        self._pools = pools
        self._slot_address = slot_address
        self._slot_bytes = slot_bytes
        self.max_programs = max_programs or np.iinfo(np.int32).max
        self._checked: set[int] = set()
        self._cuda = load_libcuda("cuFuncGetParamInfo", "cuStreamWriteValue32_v2")
        with torch.cuda.device(pools.device):
            self.stream: Any = torch.cuda.Stream()
            context = ctypes.c_void_p()
            if self._cuda.cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
                raise TransportError("no CUDA context is current", device=pools.device)
        self._compiled = job.compile_copy()
        self.function = int(self._compiled.address)
        self._context_row = np.zeros(job.CONTEXT_FIELDS, np.int64)
        self._context_row[job.LAUNCH_KERNEL] = function_address(self._cuda, "cuLaunchKernel")
        self._context_row[job.WRITE_VALUE] = function_address(self._cuda, "cuStreamWriteValue32_v2")
        self._context_row[job.MEMCPY_TO_DEVICE] = function_address(
            self._cuda, "cuMemcpyHtoDAsync_v2"
        )
        self._context_row[job.STREAM] = self.stream.cuda_stream
        self.context = self._context_row.ctypes.data
        self.begin = (function_address(self._cuda, "cuCtxSetCurrent"), context.value)

    @property
    def job_bytes(self) -> int:
        """See `ChunkCopies`."""
        return job.JOB_FIELDS * 8

    def order_after(self, event: object) -> None:
        """See `ChunkCopies`."""
        # unlike torch's own call this one keeps the GIL
        status = self._cuda.cuStreamWaitEvent(
            ctypes.c_void_p(self.stream.cuda_stream),
            ctypes.c_void_p(event.cuda_event),  # type: ignore[attr-defined]  # a torch.cuda.Event
            ctypes.c_uint(0),
        )
        if status:
            raise TransportError("the GPU does not wait for the engine", status=status)

    @property
    def open_writer(self) -> Callable[[int, int], ReadyWriter]:
        """See `ChunkCopies`: behind all that `order_after` was told of."""
        return partial(StreamWriter, self.stream.cuda_stream, self.begin[1])

    def make_fences(self, count: int) -> Fences:
        """See `ChunkCopies`."""
        import torch

        shape = (max(count, 1), _FENCE_STRIDE)
        memory = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        step = np.arange(count, dtype=np.int64) * (_FENCE_STRIDE * 4)
        return Fences(memory.data_ptr() + step, memory)

    def make_jobs(self, program: Program, *, packing: bool) -> Jobs:
        """See `ChunkCopies`."""
        import torch

        # memory that was freed on the caller's stream may still be used there, by the model's kernels
        with torch.cuda.stream(self.stream):
            kept = [
                self._upload(blocks.block_ids, limit)
                for blocks, limit in zip(program.blocks, self._pools.num_blocks, strict=True)
            ]
        ids = [device_ids for device_ids, _ in kept]
        spans, first_rows = spans_of(
            program, self._pools, ids, self._slot_address, self._slot_bytes
        )
        rows = np.zeros((len(program.chunks), job.JOB_FIELDS), np.int64)
        for span in spans:
            launch = self._prepare(span, packing=packing)
            common = job_of(launch)
            common[job.SLOT_PARAM] = launch.index("dst_address" if packing else "src_address")
            rows[span.chunks] = common
            num_tiles = span.num_parts * launch.tiles_per_part
            rows[span.chunks, job.NBYTES] = span.num_parts * span.part_bytes
            rows[span.chunks, job.NUM_PROGRAMS] = np.minimum(num_tiles, self.max_programs)
            first_part = launch.index("src_part_start" if packing else "dst_part_start")
            rows[span.chunks, job.PARAMS + first_part] = first_rows[span.chunks]
            rows[span.chunks, job.PARAMS + launch.index("num_tiles")] = num_tiles
        return Jobs(rows, tuple(kept))

    def warm_up(self, *, packing: bool, unpacking: bool) -> None:
        """See `ChunkCopies`: all heads of every part, and the shares that peers with more ranks ask for."""
        import torch

        directions = [value for value, wanted in ((True, packing), (False, unpacking)) if wanted]
        ids = torch.zeros(1, dtype=torch.int32, device=self._pools.device)
        for table in self._pools.tables.values():
            orders: set[Order] = {"HND", "NHD"}
            if not table.is_dim_contiguous:
                orders.add("HDN")
            heads = table.num_heads
            shares = {heads >> shift for shift in range(heads.bit_length())}
            for order, num_heads, is_pack in product(orders, shares, directions):
                packed = PackedSide(self._slot_address, self._slot_bytes, order, self._pools.device)
                paged = PagedSide(table, ids)
                none = np.zeros(0, np.int64)
                span = Span(table, paged, packed, num_heads, table.block_size, 0, none, none)
                self._prepare(span, packing=is_pack)

    def check_device(self) -> None:
        """See `ChunkCopies`."""
        try:
            self.stream.query()
        except RuntimeError as exc:
            raise TransportError("the GPU failed", device=self._pools.device) from exc

    def _upload(self, block_ids: npt.NDArray[np.int32], num_blocks: int) -> tuple[Any, Any]:
        """Block ids on the device, and the pinned memory that they come from: both live as long as the jobs."""
        import torch

        check_ids_in_pool("the", block_ids, num_blocks)
        count = max(1, len(block_ids))
        pinned = torch.empty(count, dtype=torch.int32, pin_memory=True)
        pinned.numpy()[: len(block_ids)] = block_ids
        ids = torch.empty(count, dtype=torch.int32, device=self._pools.device)
        self._cuda.cuCtxSetCurrent(ctypes.c_void_p(self.begin[1]))
        status = self._cuda.cuMemcpyHtoDAsync_v2(
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_void_p(pinned.data_ptr()),
            ctypes.c_size_t(4 * count),
            ctypes.c_void_p(self.stream.cuda_stream),
        )
        if status:
            raise TransportError("block ids cannot be sent to the GPU", status=status)
        return ids, pinned

    def _prepare(self, span: Span, *, packing: bool) -> PreparedLaunch:
        sides = (span.paged, span.packed) if packing else (span.packed, span.paged)
        return self.prepare(*sides, num_heads=span.num_heads, num_tokens=span.num_tokens)

    def prepare(
        self,
        src: PagedSide | PackedSide,
        dst: PagedSide | PackedSide,
        *,
        num_heads: int,
        num_tokens: int,
        num_parts: int = 1,
    ) -> PreparedLaunch:
        """See `prepare_launch`.

        Raises:
            RelayoutError: the sides do not hold the copy; a kernel that takes other parameters than it is given.
        """
        from kvconnector_kernels.relayout.launch import prepare_launch

        launch = prepare_launch(
            src, dst, num_heads=num_heads, num_tokens=num_tokens, num_parts=num_parts
        )
        if launch.function not in self._checked:
            self._check_parameters(launch)
            self._checked.add(launch.function)
        return launch

    def _check_parameters(self, launch: PreparedLaunch) -> None:
        """Compare what a kernel takes with what it will be given: the wrong number would crash the GPU's context."""
        expected = [*launch.param_bytes, *[8] * launch.num_scratch_params]
        found: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        function = ctypes.c_void_p(launch.function)
        while len(found) <= job.MAX_PARAMS and not self._cuda.cuFuncGetParamInfo(
            function, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
        ):
            found.append(size.value)
        if found != expected or len(found) > job.MAX_PARAMS:
            raise RelayoutError(f"the kernel takes parameters of {found} bytes, not {expected}")


def job_of(launch: PreparedLaunch) -> npt.NDArray[np.int64]:
    """A launch as a job's row: all parts, one program for each tile, and 0 bytes."""
    row = np.zeros(job.JOB_FIELDS, np.int64)
    row[job.FUNCTION] = launch.function
    row[job.NUM_PROGRAMS] = launch.values[launch.index("num_tiles")]
    row[job.NUM_THREADS] = launch.num_threads
    row[job.SHARED_BYTES] = launch.shared_bytes
    row[job.NUM_PARAMS] = len(launch.values) + launch.num_scratch_params
    row[job.PARAMS : job.PARAMS + len(launch.values)] = launch.values
    return row
