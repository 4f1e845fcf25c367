"""The pump's copies on a GPU: launches prepared once a program, a few streams, fences in pinned host memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program
from kvconnector.datapath.device_memory import await_device
from kvconnector.datapath.direct.cuda_driver import StreamWriter, load_libcuda
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import (
    FENCE_WORDS,
    ChunkCopies,
    Fences,
    Jobs,
    Span,
    addresses_of,
    slots_of,
    spans_of,
    words_of,
)
from kvconnector.datapath.pump.id_buffers import IdBuffer, IdBuffers
from kvconnector.datapath.pump.marks import FREE_STREAM, Marks, Requests
from kvconnector.datapath.pump.network import function_address
from kvconnector.errors import TransportError
from kvconnector.planning import GroupBlocks
from kvconnector_kernels.pump.copy_cuda import CONTEXT, JOB, MAX_PARAMS, compile_copy, fill_jobs
from kvconnector_kernels.relayout import BlockIdsAt, PackedSide, PagedSide, PartTable, RelayoutError
from kvconnector_kernels.relayout.checks import check_ids_in_pool
from kvconnector_kernels.relayout.runs import ADJACENT
from kvconnector_kernels.relayout.sides import CopyGeometry

if TYPE_CHECKING:
    from kvconnector_kernels.relayout.launch import PreparedLaunch

NUM_STREAMS = 4
_NON_BLOCKING = 1
_free_streams: dict[int, list[Any]] = {}
"""Of each device: those of copies that are gone."""
_MAX_WINDOW_BLOCKS = 2
"""Blocks of the longest of `windows_of`."""
_MAX_GEOMETRIES = 1 << 10
_MAX_EXPECTED = 64
"""Reads whose block ids are on the GPU before they are asked for."""
_SLOT_PARAM, _PARAMS = map(JOB.names.index, ("slot_param", "params"))  # type: ignore[union-attr]  # a record


class CudaCopies(ChunkCopies):
    """See `ChunkCopies`. The copies of a program run in order on one of `streams`, which `Marks` chooses. Writes of the
    lease board run on a stream of their own, behind all marks so far.

    `slot_address` stands for the alignment of all slots. `ids` are the block ids of all reads, direct ones as well.

    Raises:
        TransportError: the driver lacks what the pump needs, or a kernel takes other parameters than it was given.
    """

    job = JOB

    def __init__(
        self, pools: Pools, *, slot_address: int, slot_bytes: int, max_programs: int
    ) -> None:
        import torch

        self._pools = pools
        self._slots = slots_of(slot_address, slot_bytes, pools.device)
        self.max_programs = max_programs or np.iinfo(np.int32).max
        self._checked: set[int] = set()
        # kept with their blocks, so that no others have their identity
        self._expected: dict[int, tuple[Sequence[GroupBlocks], IdBuffer, list[BlockIdsAt]]] = {}
        self._jobs = SpanJobs(self._prepare, self.max_programs)
        self._cuda = load_libcuda("cuFuncGetParamInfo", "cuStreamWriteValue32_v2")
        # declared, so that numbers need no wrapping
        pointer = ctypes.c_void_p
        self._cuda.cuCtxSetCurrent.argtypes = (pointer,)
        self._cuda.cuMemcpyHtoDAsync_v2.argtypes = (pointer, pointer, ctypes.c_size_t, pointer)
        self._cuda.cuStreamWaitEvent.argtypes = (pointer, pointer, ctypes.c_uint)
        write = self._cuda.cuStreamWriteValue32_v2
        write.argtypes = (pointer, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        with torch.cuda.device(pools.device):
            context = ctypes.c_void_p()
            if self._cuda.cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
                raise TransportError("no CUDA context is current", device=pools.device)
            self.streams = CopyStreams(self._cuda, self.make_fences(NUM_STREAMS))
        self.ids = IdBuffers(partial(_allocate_ids, self.streams.copies, pools.device))
        self._compiled = compile_copy()
        self.function = int(self._compiled.address)
        self._context = np.zeros((), CONTEXT)
        for field, name in (
            ("launch_kernel", "cuLaunchKernel"),
            ("write_value", "cuStreamWriteValue32_v2"),
            ("memcpy_to_device", "cuMemcpyHtoDAsync_v2"),
        ):
            self._context[field] = function_address(self._cuda, name)
        self.context = self._context.ctypes.data
        self.begin = (function_address(self._cuda, "cuCtxSetCurrent"), context.value)
        # behind all that `order_after` was told of
        self.open_writer = partial(StreamWriter, self.streams.board.cuda_stream, context.value)

    def order_after(self, event: object, requests: Requests | None) -> None:
        self._cuda.cuCtxSetCurrent(self.begin[1])
        self.streams.order_after(event, requests)

    def make_fences(self, count: int) -> Fences:
        import torch

        memory = torch.zeros((count, FENCE_WORDS), dtype=torch.int32, pin_memory=True)
        fences: Fences = memory.numpy()[:, 0]
        return fences

    def make_jobs(self, program: Program, *, packing: bool) -> Jobs:
        stream = self.streams.marks.stream_of(program.blocks)
        sent = self._expected.pop(id(program.blocks), None) if stream == FREE_STREAM else None
        buffer, ids = sent[1:] if sent else self._send_ids(program.blocks, stream)
        try:
            words = np.empty((len(program.chunks), JOB.itemsize // 8), np.int64)
            handle = self.streams.handles[stream]
            for span in spans_of(program, self._pools, ids, self._slots):
                self._jobs.fill(words, span, handle, packing=packing)
        except BaseException:
            self.ids.give_back(buffer)
            raise
        return Jobs(words, (buffer,))

    def end_jobs(self, jobs: Jobs) -> None:
        """See `ChunkCopies`: the buffer of their block ids."""
        for buffer in jobs.kept:
            assert isinstance(buffer, IdBuffer)  # put there by `make_jobs`
            self.ids.give_back(buffer)

    def some_ids(self) -> BlockIdsAt:
        """For launches that are prepared and not made: a block id where those of reads will be, or aligned as they are.
        Raises TransportError: no memory for block ids.
        """
        # the first read finds a buffer that is there already
        buffer = self.ids.lend([], FREE_STREAM)
        self.ids.give_back(buffer)
        return BlockIdsAt(buffer.there_address, _MAX_WINDOW_BLOCKS, self._pools.device)

    def warm_up(self, *, packing: bool, unpacking: bool) -> None:
        """See `ChunkCopies`: all heads of every part, and the shares that peers with more ranks ask for."""
        directions = [value for value, wanted in ((True, packing), (False, unpacking)) if wanted]
        ids = self.some_ids()
        none = np.zeros((0, 5), np.int32)
        for table in self._pools.tables.values():
            orders = {"HND", "NHD"}
            if not table.is_dim_contiguous:
                orders.add("HDN")
            for order, heads, is_pack in product(orders, shares_of(table), directions):
                for start, count in windows_of(table.block_size):
                    where = (table, ids, 0, start, ADJACENT, self._slots[order])
                    span = Span(*where, heads, count, 0, slice(0), 0, none)
                    self._prepare(span, packing=is_pack)

    def finish(self) -> None:
        try:
            for stream in self.streams.copies:
                await_device(stream.query, "copies on the GPU do not end")
        except RuntimeError as exc:
            raise TransportError("the GPU failed", device=self._pools.device) from exc

    def check_device(self) -> None:
        try:
            self.streams.copies[FREE_STREAM].query()
        except RuntimeError as exc:
            raise TransportError("the GPU failed", device=self._pools.device) from exc

    def expect(self, blocks: Sequence[GroupBlocks]) -> None:
        """See `ChunkCopies`: the block ids of the newest are on the GPU already."""
        if id(blocks) in self._expected:
            return
        try:
            self._expected[id(blocks)] = (blocks, *self._send_ids(blocks, FREE_STREAM))
        except (RelayoutError, TransportError):
            return  # the read meets the same, and says so
        if len(self._expected) > _MAX_EXPECTED:
            self.ids.give_back(self._expected.pop(next(iter(self._expected)))[1])

    def _send_ids(
        self, blocks: Sequence[GroupBlocks], stream: int
    ) -> tuple[IdBuffer, list[BlockIdsAt]]:
        """Block ids on their way to the GPU, in front of all copies that are made on this stream from now on.

        What a read before this one sent and never used comes in front of it, whatever it brings.
        """
        vectors = [group.block_ids for group in blocks]
        for ids, limit in zip(vectors, self._pools.num_blocks, strict=True):
            check_ids_in_pool("the", ids, limit)
        buffer = self.ids.lend(vectors, stream)
        places, nbytes = buffer.write(vectors, self._pools.device)
        if not nbytes:
            return buffer, places
        self._cuda.cuCtxSetCurrent(self.begin[1])
        status = self._cuda.cuMemcpyHtoDAsync_v2(
            buffer.there_address, buffer.here_address, nbytes, self.streams.handles[stream]
        )
        if status:
            self.ids.give_back(buffer)
            raise TransportError("block ids cannot be sent to the GPU", status=status)
        return buffer, places

    def _prepare(self, span: Span, *, packing: bool) -> PreparedLaunch:
        sides = span.sides(packing=packing)
        return self.prepare(*sides, num_heads=span.num_heads, num_tokens=span.num_tokens)

    def prepare(
        self, src: PagedSide | PackedSide, dst: PagedSide | PackedSide, **counts: int
    ) -> PreparedLaunch:
        """See `prepare_launch`. Raises RelayoutError: the sides do not fit, or the kernel takes other parameters."""
        from kvconnector_kernels.relayout.launch import prepare_launch

        launch = prepare_launch(src, dst, **counts)
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
        while len(found) <= MAX_PARAMS and not self._cuda.cuFuncGetParamInfo(
            function, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
        ):
            found.append(size.value)
        if found != expected or len(found) > MAX_PARAMS:
            raise RelayoutError(f"the kernel takes parameters of {found} bytes, not {expected}")


class _Job(NamedTuple):
    """A launch of one part, from `token_start` on, as `fill_jobs` takes it."""

    terms: npt.NDArray[np.int64]
    launch: tuple[int, ...]
    token_start: int
    num_tokens: int


class SpanJobs:
    """The jobs of spans. A launch that `prepare` has made stands for all spans without runs whose tokens begin at the
    same place in a block and are as even in number: kernels and tiles depend on no more.
    """

    def __init__(self, prepare: Callable[..., PreparedLaunch], max_programs: int) -> None:
        self._prepare = prepare
        self._max_programs = max_programs
        self._jobs: dict[tuple[object, ...], _Job] = {}

    def fill(self, words: npt.NDArray[np.int64], span: Span, stream: int, *, packing: bool) -> None:
        """Write the jobs of a span's chunks, as words. Raises RelayoutError: see `prepare_launch`."""
        job, start, num_tokens = self._job(span, packing=packing), span.token_start, span.num_tokens
        address: int = span.ids.address  # type: ignore[union-attr]  # of a GPU's copies
        tokens = start - job.token_start, num_tokens - job.num_tokens, num_tokens
        others = address, stream, span.first_row, span.part_bytes, self._max_programs
        rows = words[span.chunks]
        fill_jobs(rows, job.terms, span.fields, job.launch, (*tokens, *others))
        words[span.chunks] = rows

    def _job(self, span: Span, *, packing: bool) -> _Job:
        table, start, num_tokens = span.table, span.token_start, span.num_tokens
        place = start % table.block_size, num_tokens & -num_tokens
        key = (packing, table, span.packed.order, span.head_start, span.num_heads, *place)
        room = span.ids.count * table.block_size  # type: ignore[union-attr]  # of a GPU's copies
        is_usual = span.runs is ADJACENT and 0 <= start <= room - num_tokens
        job = self._jobs.get(key) if is_usual else None
        if job is None:
            job = _job_for(span, self._prepare(span, packing=packing), packing=packing)
            if is_usual:
                keep_newest(self._jobs, key, job)
        return job


def keep_newest(jobs: dict[Any, Any], key: object, job: object) -> None:
    """Add a job to those that are known; the oldest goes if they are many."""
    if len(jobs) >= _MAX_GEOMETRIES:
        del jobs[next(iter(jobs))]
    jobs[key] = job


def _job_for(span: Span, launch: PreparedLaunch, *, packing: bool) -> _Job:
    paged, packed = ("src", "dst") if packing else ("dst", "src")
    words = words_of(job_of(launch))[0]
    words[_SLOT_PARAM] = launch.index(f"{packed}_address")
    terms = np.array([words, 0 * words, 0 * words])
    strides = [f"{packed}_{axis}_stride" for axis in ("part", "head", "token", "dim")]
    at = [_PARAMS + launch.index(name) for name in (f"{paged}_origin", "num_tokens", *strides)]
    shape = span.table.head_dim, span.table.item_size_bytes
    none, one = (
        span.packed.strides_bytes(CopyGeometry(1, span.num_heads, count, *shape))
        for count in (0, 1)
    )
    terms[1, at[0]] = terms[2, at[1]] = 1
    terms[2, at[2:]] = np.subtract(one, none)
    names = (f"{paged}_ids", f"{paged}_part_start", "num_tiles", "num_token_tiles")
    lead, count = (launch.values[launch.index(name)] for name in ("lead_tokens", "num_token_tiles"))
    places = [_PARAMS + launch.index(name) for name in names]
    tiles = lead, launch.tile_tokens, launch.tiles_per_part // count
    return _Job(terms, (*places, *tiles), span.token_start, span.num_tokens)


class CopyStreams:
    """Streams of `copies`, each with a flag of `passed`, and the `board`'s, which waits for every mark."""

    def __init__(self, cuda: Any, passed: Fences) -> None:
        import torch

        self._cuda = cuda
        self._passed = addresses_of(passed).tolist()
        self.marks = Marks(passed)
        # torch's own streams are 32 in turn: one of them may be the engine's as well
        free = _free_streams.setdefault(torch.cuda.current_device(), [])
        streams: list[Any] = [free.pop() if free else _open_stream(cuda) for _ in (0, *passed)]
        weakref.finalize(self, free.extend, streams)
        self.board, *self.copies = streams
        self.handles: list[int] = [stream.cuda_stream for stream in self.copies]

    def order_after(self, event: object, requests: Requests | None) -> None:
        # unlike torch's own calls these keep the GIL
        mark: int = event.cuda_event  # type: ignore[attr-defined]  # a torch.cuda.Event
        index, number = self.marks.add(requests)
        stream, passed = self.handles[index], self._passed[index]
        status = (
            self._cuda.cuStreamWaitEvent(self.board.cuda_stream, mark, 0)
            or self._cuda.cuStreamWaitEvent(stream, mark, 0)
            or self._cuda.cuStreamWriteValue32_v2(stream, passed, number, 0)
        )
        if status:
            raise TransportError("the GPU does not wait for the engine", status=status)


def _open_stream(cuda: Any) -> Any:
    import torch

    handle = ctypes.c_void_p()
    status = cuda.cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING))
    if status or not handle.value:
        raise TransportError("the GPU gives no stream for copies", status=status)
    return torch.cuda.ExternalStream(handle.value)


def windows_of(block_size: int) -> list[tuple[int, int]]:
    """First tokens and numbers of tokens for which kernels may differ: whole tiles and others, aligned and not. But for
    chunks in the order HDN, whose rows are as well aligned as their number of tokens is, there are no others.
    """
    return [(0, block_size), (1, block_size), (0, 1)]


def shares_of(table: PartTable) -> list[int]:
    """All heads of a table, and the shares of them that a peer with more ranks has."""
    return sorted({table.num_heads >> shift for shift in range(table.num_heads.bit_length())})


def job_of(launch: PreparedLaunch) -> npt.NDArray[np.void]:
    """A launch as one job: all parts, one program for each tile, and 0 bytes."""
    job = np.zeros(1, JOB)
    job["function"] = launch.function
    job["num_programs"] = launch.values[launch.index("num_tiles")]
    job["num_threads"] = launch.num_threads
    job["shared_bytes"] = launch.shared_bytes
    job["num_params"] = len(launch.values) + launch.num_scratch_params
    job["params"][0, : len(launch.values)] = launch.values
    return job


def _allocate_ids(streams: Sequence[Any], device: str, num_ids: int, stream: int) -> IdBuffer:
    import torch

    try:
        # memory that was freed on the caller's stream may still be used there, by the model's kernels
        with torch.cuda.stream(streams[stream]):
            pinned = torch.empty(num_ids, dtype=torch.int32, pin_memory=True)
            ids = torch.empty(num_ids, dtype=torch.int32, device=device)
    except RuntimeError as exc:
        raise TransportError(f"no memory for block ids: {exc}", device=device) from exc
    return IdBuffer(pinned.numpy(), pinned.data_ptr(), ids.data_ptr(), (pinned, ids), stream)
