"""The copies of the compiled loop on a GPU: prepared launches, a few streams, fences in pinned host memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from kvconnector.datapath.device_memory import FENCE_WORDS, Fences, addresses_of, await_device
from kvconnector.datapath.direct.cuda_driver import StreamWriter, load_libcuda
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.lanes import Lane, Span, Tokens, Window
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import (
    Copies,
    Jobs,
    address_of,
    packed_sides,
)
from kvconnector.datapath.pump.id_buffers import IdBuffer, IdBuffers
from kvconnector.datapath.pump.launches import Launches, shares_of, windows_of
from kvconnector.datapath.pump.marks import FREE_STREAM, Marks, RequestBlocks
from kvconnector.errors import TransportError
from kvconnector.planning import GroupBlocks, Route, SourceRead
from kvconnector.session.load import RankRead
from kvconnector_kernels.library import address_of_function
from kvconnector_kernels.pump.copy_cuda import COPY, READ
from kvconnector_kernels.pump.records import (
    DIGEST_BYTES,
    MAX_PARAMS,
    Cuda,
    CudaJob,
    CudaRead,
    num_words,
)
from kvconnector_kernels.relayout import (
    BlockIdsAt,
    Conversion,
    PackedSide,
    PagedSide,
    PartTable,
    RelayoutError,
    Side,
)

if TYPE_CHECKING:
    import torch

    from kvconnector_kernels.relayout.launch import Kernel, PreparedLaunch

NUM_STREAMS = 4
_NON_BLOCKING = 1
_free_streams: dict[int, list[Any]] = {}
"""For each device, the streams of data paths that are closed."""
_MAX_WINDOW_BLOCKS = 2
"""Blocks that the longest of `windows_of` needs."""
_MAX_EXPECTED = 64
"""The most leases whose block ids are on the GPU before a read asks for them. The ids of a lease that nobody reads
packed stay there until newer ones take their place.
"""
_MAX_EXPECTED_BYTES = 1 << 17
"""The most block ids of a lease that are sent early, in bytes, so that leases nobody reads hold at most 16 MiB of the
GPU's memory. Those of longer leases are sent with their reads.
"""
MAX_UNCAPPED_CHUNK_BYTES = 16 << 20
"""All multiprocessors together copy a chunk of at most this size in 20 microseconds. They do so with a read's first and
last chunks, because nothing else of the read moves at that time.
"""
MAX_UNCAPPED_READ_BYTES = 64 << 20
"""A direct read's segment of at most this size takes 0.2 ms, too short to slow down a model beside it."""
_USUAL_BLOCK_TOKENS = 16
_MIN_IDS_BYTES = 16  # the driver refuses to copy nothing
_READ_WORDS, _JOB_WORDS = num_words(CudaRead), num_words(CudaJob)


class CudaCopies(Copies):
    """See `Copies`. The copies of a read run in order on one of `streams`, which `Marks` chooses. Writes of the lease
    board run on a stream of their own, after all marks so far.

    `slot_address` is aligned as all slots are.

    Raises:
        TransportError: the driver lacks a function, no CUDA context is current, or there is no memory for block ids.
    """

    job = CudaJob
    function, read_function = COPY, READ
    on_gpu = True
    means = "CUDA IPC"

    def __init__(
        self, pools: Pools, *, slot_address: int, slot_bytes: int, max_programs: int
    ) -> None:
        import torch

        super().__init__(pools, packed_sides(slot_address, slot_bytes, pools.device))
        self.max_programs = max_programs or np.iinfo(np.int32).max
        self._checked: set[int] = set()
        # kept with their blocks, so that no other object gets their identity
        self._expected: dict[int, tuple[Sequence[GroupBlocks], IdBuffer, list[int]]] = {}
        self._launches = Launches(self._prepare, self.max_programs)
        self._cuda = load_libcuda("cuFuncGetParamInfo", "cuStreamWriteValue32_v2")
        # with declared types, so that numbers need no wrapping
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
        self._ids = IdBuffers(
            partial(_allocate_ids, self.streams.copies, pools.device), len(self.streams.copies)
        )
        self._driver = Cuda(
            launch_kernel=address_of_function("cuLaunchKernel", self._cuda),
            write_value=address_of_function("cuStreamWriteValue32_v2", self._cuda),
            memcpy_to_device=address_of_function("cuMemcpyHtoDAsync_v2", self._cuda),
        )
        self.context = ctypes.addressof(self._driver)
        self.begin = (address_of_function("cuCtxSetCurrent", self._cuda), context.value)
        # after every event given to `order_after`
        self.open_writer = partial(StreamWriter, self.streams.board.cuda_stream, context.value)

    def order_after(self, event: torch.cuda.Event, requests: RequestBlocks) -> None:
        self._cuda.cuCtxSetCurrent(self.begin[1])
        self.streams.order_after(event, requests)

    def make_fences(self, count: int) -> Fences:
        import torch

        memory = torch.zeros((count, FENCE_WORDS), dtype=torch.int32, pin_memory=True)
        fences: Fences = memory.numpy()[:, 0]
        return fences

    def make_jobs(
        self, source: SourceRead, blocks: Sequence[GroupBlocks], *, packing: bool
    ) -> Jobs:
        stream = self.streams.marks.stream_of(blocks)
        sent = self._expected.pop(id(blocks), None) if stream == FREE_STREAM else None
        buffer, ids = sent[1:] if sent else self._send_ids(blocks, stream)
        try:
            words = np.empty((source.num_chunks, _JOB_WORDS), np.int64)
            address, handle = address_of(words), self.streams.handles[stream]
            spans = list(self.chunk_spans(source, blocks, ids, packing=packing))
            for span in spans:
                self._launches.fill(address, span, handle, MAX_UNCAPPED_CHUNK_BYTES)
        except BaseException:
            buffer.give_back()
            raise
        if self.digests is not None:
            words[:, 0] += DIGEST_BYTES
        return Jobs(address, buffer, (words, _converting(spans)))

    def make_read(self, read: RankRead, remote: RemotePools) -> Jobs:
        """See `Copies`. The compiled function sends the block ids right before its launches."""
        blocks = (*read.remote_blocks, *read.blocks)
        stream = self.streams.marks.stream_of(read.blocks)
        buffer, ids, nbytes = self._ids.lend(blocks, stream)
        try:
            handle, spans = self.streams.handles[stream], list(self.read_spans(read, remote, ids))
            memory = np.empty(_READ_WORDS + len(spans) * _JOB_WORDS, np.int64)
            sent = buffer.there_address, buffer.here_address, max(nbytes, _MIN_IDS_BYTES)
            memory[:_READ_WORDS] = len(spans), *sent, handle
            address = address_of(memory)
            for span in spans:
                self._launches.fill(
                    address + 8 * _READ_WORDS, span, handle, MAX_UNCAPPED_READ_BYTES
                )
        except BaseException:
            buffer.give_back()
            raise
        return Jobs(address, buffer, (memory, _converting(spans)))

    def some_ids(self) -> BlockIdsAt:
        """Return block ids for launches that are prepared and not made, aligned as those of reads are. Raises
        TransportError: there is no memory for block ids.
        """
        buffer, *_ = self._ids.lend([], FREE_STREAM)
        buffer.give_back()
        return BlockIdsAt(buffer.there_address, _MAX_WINDOW_BLOCKS, self.pools.device)

    def warm_up(self, *, packing: bool, unpacking: bool) -> None:
        """See `Copies`. Covers all heads of every part, and the shares of them that peers with more ranks read."""
        directions = [value for value, wanted in ((True, packing), (False, unpacking)) if wanted]
        ids = self.some_ids()
        for table in self.pools.tables.values():
            orders = {"HND", "NHD"}
            if not table.is_dim_contiguous:
                orders.add("HDN")
            for order, heads, is_pack in product(orders, shares_of(table), directions):
                for start, count in windows_of(table.block_size):
                    paged, slot = PagedSide(table, ids, token_start=start), self._slots[order]
                    src, dst = (paged, slot) if is_pack else (slot, paged)
                    self._prepare(src, dst, heads, count)

    def warm_up_reads(self) -> None:
        """See `Copies`. Covers blocks like ours and of the usual size."""
        for table in self.pools.tables.values():
            sizes = table.sizes | {"block_size": _USUAL_BLOCK_TOKENS}
            usual = PartTable(table.rows, **sizes, device=table.device)
            for num_heads in shares_of(table):
                self._prepare_read(table, table, num_heads)
                self._prepare_read(usual, table, num_heads)

    def prepare(self, remote: RemotePools, routes: Sequence[Route] = ()) -> None:
        """See `Copies`. Covers all heads that both sides have, and those of segments whose elements are converted."""
        try:
            for key in remote.tables.keys() & self.pools.tables.keys():
                src, dst = remote.tables[key], self.pools.tables[key]
                if src.item_size_bytes == dst.item_size_bytes:
                    self._prepare_read(src, dst, min(src.num_heads, dst.num_heads))
            for route in routes:
                self._prepare_conversions(
                    self._read_lanes(route, remote) if route.conversions else ()
                )
        except (RelayoutError, RuntimeError) as exc:
            raise TransportError(f"the producer's pools cannot be read: {exc}") from exc

    def prepare_chunks(self, route: Route, *, packing: bool) -> None:
        """See `Copies`."""
        try:
            if route.conversions:
                self._prepare_conversions(self._chunk_lanes(route, packing))
        except (RelayoutError, RuntimeError) as exc:
            raise TransportError(f"chunks cannot be converted: {exc}") from exc

    def _prepare_conversions(self, lanes: Sequence[Lane]) -> None:
        ids = self.some_ids()
        for lane in lanes:
            pools = [
                end.table.block_size for end in (lane.src, lane.dst) if isinstance(end, Window)
            ]
            windows = windows_of(min(pools)) if lane.conversion is not None else []
            for (there, count), (here, _) in product(windows, windows):
                src, dst = _end(lane.src, ids, there), _end(lane.dst, ids, here)
                self._prepare(src, dst, lane.num_heads, count, lane.conversion)

    def _prepare_read(self, src: PartTable, dst: PartTable, num_heads: int) -> None:
        ids = self.some_ids()
        windows = windows_of(min(src.block_size, dst.block_size))
        for (there, count), (here, _) in product(windows, windows):
            theirs = PagedSide(src, ids, token_start=there)
            ours = PagedSide(dst, ids, token_start=here)
            self._prepare(theirs, ours, num_heads, count)

    def finish(self) -> None:
        # one wait for all of them: each would have as long as a closing data path has in all
        await_device(
            lambda: all(map(self._is_idle, self.streams.copies)), "copies on the GPU do not end"
        )

    def check_device(self) -> None:
        self._is_idle(self.streams.copies[FREE_STREAM])

    def _is_idle(self, stream: Any) -> bool:
        try:
            return bool(stream.query())
        except RuntimeError as exc:
            raise TransportError("the GPU failed", device=self.pools.device) from exc

    def expect(self, blocks: Sequence[GroupBlocks]) -> None:
        """See `Copies`. Sends the block ids to the GPU, unless they are long, and keeps them for the newest
        `_MAX_EXPECTED`.
        """
        nbytes = sum(len(group.wire_ids) for group in blocks)
        if nbytes > _MAX_EXPECTED_BYTES or id(blocks) in self._expected:
            return
        try:
            self._expected[id(blocks)] = (blocks, *self._send_ids(blocks, FREE_STREAM))
        except TransportError:
            return  # the read sends them again, and reports its error
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.pop(next(iter(self._expected)))[1].give_back()

    def _send_ids(self, blocks: Sequence[GroupBlocks], stream: int) -> tuple[IdBuffer, list[int]]:
        """Send block ids to the GPU, before all further copies on a stream. Ids that an earlier read sent to the same
        memory and never used arrive first.
        """
        buffer, places, nbytes = self._ids.lend(blocks, stream)
        if not nbytes:
            return buffer, places
        self._cuda.cuCtxSetCurrent(self.begin[1])
        status = self._cuda.cuMemcpyHtoDAsync_v2(
            buffer.there_address, buffer.here_address, nbytes, self.streams.handles[stream]
        )
        if status:
            buffer.give_back()
            raise TransportError("block ids cannot be sent to the GPU", status=status)
        return buffer, places

    def _prepare(
        self,
        src: Side,
        dst: Side,
        num_heads: int,
        num_tokens: int,
        conversion: Conversion | None = None,
    ) -> PreparedLaunch:
        """See `prepare_launch`. Raises RelayoutError: the sides do not fit, or the kernel takes other parameters."""
        from kvconnector_kernels.relayout.launch import prepare_launch

        counts = {"num_heads": num_heads, "num_tokens": num_tokens}
        launch = prepare_launch(src, dst, **counts, conversion=conversion)
        if launch.kernel.function not in self._checked:
            self._check_parameters(launch.kernel)
            self._checked.add(launch.kernel.function)
        return launch

    def _check_parameters(self, kernel: Kernel) -> None:
        """Compare a kernel's parameters with those that it will get: a wrong number would crash the GPU's context."""
        found: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        function = ctypes.c_void_p(kernel.function)
        while len(found) <= MAX_PARAMS and not self._cuda.cuFuncGetParamInfo(
            function, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
        ):
            found.append(size.value)
        if found != list(kernel.param_bytes) or len(found) > MAX_PARAMS:
            expected = kernel.param_bytes
            raise RelayoutError(f"the kernel takes parameters of {found} bytes, not {expected}")


def _end(end: Window | PackedSide, ids: BlockIdsAt, token_start: int) -> Side:
    """Return one end of a lane, for launches that are prepared and not made."""
    if isinstance(end, PackedSide):
        return end
    return end.side(Tokens(ids.address, ids.count, token_start, 0))


def _converting(spans: Sequence[Span]) -> list[Lane]:
    """Return the lanes whose memory launches read until they have run."""
    return [span.lane for span in spans if span.lane.conversion is not None]


class CopyStreams:
    """The streams of `copies`, each with a flag of `passed`, and the `board`'s stream, which waits for every mark."""

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

    def order_after(self, event: torch.cuda.Event, requests: RequestBlocks) -> None:
        # unlike torch's own calls these keep the GIL
        mark: int = event.cuda_event
        index, number = self.marks.add(requests)
        stream, passed = self.handles[index], self._passed[index]
        status = (
            self._cuda.cuStreamWaitEvent(self.board.cuda_stream, mark, 0)
            or self._cuda.cuStreamWaitEvent(stream, mark, 0)
            or self._cuda.cuStreamWriteValue32_v2(stream, passed, number, 0)
        )
        if status:
            raise TransportError("cuStreamWaitEvent or cuStreamWriteValue32 failed", status=status)


def _open_stream(cuda: Any) -> Any:
    import torch

    handle = ctypes.c_void_p()
    status = cuda.cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING))
    if status or not handle.value:
        raise TransportError("cannot create a CUDA stream for copies", status=status)
    return torch.cuda.ExternalStream(handle.value)


def _allocate_ids(
    streams: Sequence[Any], device: str, num_ids: int, stream: int, free: list[IdBuffer]
) -> IdBuffer:
    import torch

    try:
        # memory that was freed on the caller's stream may still be used there, by the model's kernels
        with torch.cuda.stream(streams[stream]):
            pinned = torch.empty(num_ids, dtype=torch.int32, pin_memory=True)
            ids = torch.empty(num_ids, dtype=torch.int32, device=device)
    except RuntimeError as exc:
        raise TransportError(f"no memory for block ids: {exc}", device=device) from exc
    here = pinned.numpy().data.cast("B")
    return IdBuffer(here, pinned.data_ptr(), ids.data_ptr(), (pinned, ids), free)
