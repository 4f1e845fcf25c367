"""Block tables that an engine keeps on the GPU: staged writes, the rows of a batch, and the slots of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvconnector.cache.block_table import BlockIds, check_count, check_every_group, check_row_ids
from kvconnector.cache.slot_mapping import PAD_SLOT_ID, BlockGeometry, group_geometries
from kvconnector.errors import ConfigError, GeometryError, LocalProtocolError, require_at_least
from kvconnector.layout import NO_CONTEXT_PARALLEL, ContextParallel
from kvconnector_kernels.block_table import (
    WRITE_COLUMNS,
    BlockTableKernels,
    TableGeometry,
    TableSet,
    implementation_for,
)


class _DeviceAddress:
    """Pinned memory with the interface by which torch adopts the device arrays of other libraries."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": tensor.numpy().dtype.str,
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


class UvaBackedTensor:
    """One array of zeros seen from the host (`numpy`, and `host` in torch) and from kernels (`device`), without copies.

    A GPU's kernels read the pinned memory over the bus. Write it before a launch, and not again before that has run.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.host = torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)
                # if a device were named, torch would take the memory for another device's and copy it
                self.device = torch.as_tensor(_DeviceAddress(self.host))
        else:
            self.host = torch.zeros(tuple(shape), dtype=dtype)
            self.device = self.host
        self.numpy: npt.NDArray[Any] = self.host.numpy()


_GROUP, _ROW, _START, _COUNT, _OFFSET, _LENGTH = range(len(WRITE_COLUMNS))
_NO_WRITE = -1

NUM_BUFFERS = 3
"""The host fills one while the GPU has yet to read two, so that scheduling one step ahead never waits."""

MAX_STAGED_IDS = 1 << 18
"""Ids per buffer: 1 MiB of pinned memory, for four million new tokens per step at 16 tokens per block."""


class _Buffer:
    """The writes staged for one `apply`, in memory that the device reads."""

    def __init__(self, max_writes: int, max_ids: int, device: torch.device) -> None:
        self.records = UvaBackedTensor((max_writes, len(WRITE_COLUMNS)), torch.int32, device)
        self.ids = UvaBackedTensor((max_ids,), torch.int32, device)
        self.num_writes = 0
        self.num_ids = 0
        self.applied = torch.cuda.Event() if device.type == "cuda" else None


class StagedWriteTensor:
    """The block tables of all cache groups on a device, int32 `[num_rows, max_blocks x ratio]` each.

    `stage` keeps allocation ids on the host. `apply` expands them to kernel ids and writes all of them in one launch on
    the current stream. A row ends after its last write, which replaces what was staged for the same entries and later
    ones. So staged writes never overlap, and may run in any order. They take effect in stream order at the next
    `apply`, which `stage` calls if the staging memory is full. Not thread safe.

    Args:
        geometries: The sizes of blocks, by group.
        num_rows: The number of rows of every table.
        max_blocks_per_row: The most allocation ids of a row, by group.
        device: The tables' device.
        kernels: The kernels that write the tables.
        max_staged_ids: The most allocation ids between two calls of `apply`; raised to the longest row.
    """

    def __init__(
        self,
        *,
        geometries: Sequence[BlockGeometry],
        num_rows: int,
        max_blocks_per_row: Sequence[int],
        device: torch.device,
        kernels: BlockTableKernels,
        max_staged_ids: int = MAX_STAGED_IDS,
    ) -> None:
        self.max_blocks_per_row = tuple(max_blocks_per_row)
        self.ratios = tuple(geometry.kernel_blocks_per_block for geometry in geometries)
        widths = [
            blocks * ratio for blocks, ratio in zip(max_blocks_per_row, self.ratios, strict=True)
        ]
        self.tables = TableSet.zeros(num_rows, widths, device)
        self.geometry = TableGeometry.of(
            block_sizes=[each.block_size for each in geometries],
            kernel_block_sizes=[each.kernel_block_size for each in geometries],
            places=[
                (
                    each.context_parallel.world_size,
                    each.context_parallel.rank,
                    each.context_parallel.interleave_tokens,
                    each.row_tokens,
                    int(each.is_ring),
                )
                for each in geometries
            ],
            device=device,
        )
        self._device = device
        self._kernels = kernels
        self._buffers = [
            _Buffer(len(widths) * num_rows, max(max_staged_ids, *self.max_blocks_per_row), device)
            for _ in range(NUM_BUFFERS if device.type == "cuda" else 1)
        ]
        # the last staged write of each row, which alone sets the row's length; and before each write that of its row
        self._last_write = np.full((len(widths), num_rows), _NO_WRITE, dtype=np.int64)
        self._previous_write = np.zeros(len(widths) * num_rows, dtype=np.int64)

    def check(self, group: int, start: int, block_ids: BlockIds) -> npt.NDArray[np.int32]:
        """Return ids as int32, to stage in a row from `start` on. Raises BlockIdError: as `check_row_ids`."""
        return check_row_ids(
            block_ids,
            held=start,
            max_num_blocks=self.max_blocks_per_row[group],
            ratio=self.ratios[group],
        )

    def stage(self, group: int, row: int, start: int, ids: npt.NDArray[np.int32]) -> None:
        """Stage checked ids for a row from entry `start` on. The row ends after them."""
        buffer, count = self._buffers[0], len(ids)
        if buffer.num_writes == len(buffer.records.numpy) or buffer.num_ids + count > len(
            buffer.ids.numpy
        ):
            self.apply()
            buffer = self._buffers[0]
        if not buffer.num_writes and buffer.applied is not None:
            buffer.applied.synchronize()
        self._supersede(buffer, group, row, start)
        write, offset, end = buffer.num_writes, buffer.num_ids, buffer.num_ids + count
        buffer.ids.numpy[offset:end] = ids
        buffer.records.numpy[write] = (group, row, start, count, offset, start + count)
        self._previous_write[write] = self._last_write[group, row]
        self._last_write[group, row] = write
        buffer.num_writes, buffer.num_ids = write + 1, end

    def _supersede(self, buffer: _Buffer, group: int, row: int, start: int) -> None:
        """Cut off at `start` the writes staged for a row. The next write sets the row's length."""
        write = int(self._last_write[group, row])
        while write != _NO_WRITE:
            record = buffer.records.numpy[write]
            record[_LENGTH] = _NO_WRITE
            room = start - int(record[_START])
            if room >= record[_COUNT]:
                return
            record[_COUNT] = max(0, room)
            write = int(self._previous_write[write])

    def apply(self) -> None:
        """Write everything that is staged, in one launch on the current stream.

        Raises:
            LocalProtocolError: the stream is being captured; each replay would repeat the writes.
        """
        buffer = self._buffers[0]
        if not buffer.num_writes:
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise LocalProtocolError("staged writes cannot be applied inside a CUDA graph")
        records = buffer.records.device[: buffer.num_writes]
        self._kernels.apply_writes(self.tables, self.geometry, records, buffer.ids.device)
        if buffer.applied is not None:
            buffer.applied.record(torch.cuda.current_stream(self._device))
        written = buffer.records.numpy[: buffer.num_writes]
        self._last_write[written[:, _GROUP], written[:, _ROW]] = _NO_WRITE
        self._buffers.append(self._buffers.pop(0))
        self._buffers[0].num_writes = self._buffers[0].num_ids = 0


class DeviceBlockTables:
    """The block ids of all requests on the device, the rows of the current batch, and the slots of its tokens.

    In each step call `append_block_ids` for requests with new blocks, `apply_staged_writes`, then `gather_block_tables`
    and `compute_slot_mappings`. The last two always write to the same memory, read nothing back and allocate nothing,
    so a CUDA graph can contain them. Run each once before a capture, to compile it. Not thread safe.

    Args:
        block_sizes: Tokens per allocation block, by group.
        kernel_block_sizes: Tokens per block of the attention kernel, by group; None if these are the same.
        max_num_reqs: The most requests at a time, in the tables and in a batch.
        max_model_len: The most tokens of a request.
        max_num_batched_tokens: The most tokens of a step.
        num_speculative_tokens: The most tokens that a step computes beyond a request's end.
        context_parallel: This rank's position among those that share a request's tokens, of all groups or by group.
        row_tokens: The tokens that share a slot, by group; None if each token has one of its own.
        rings: By group, True if a request has one block, whose slots its tokens take in turns; None if none is one.
        device: The tables' device by torch's name, a CUDA GPU or the CPU.
        kernels: The kernels to run; None for the device's own.

    Raises ConfigError: the device has no kernels. Every method raises GeometryError for a group, a request, a tensor or
    a size that does not fit, and then changes nothing.
    """

    def __init__(
        self,
        *,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        context_parallel: ContextParallel | Sequence[ContextParallel] = NO_CONTEXT_PARALLEL,
        row_tokens: Sequence[int] | None = None,
        rings: Sequence[bool] | None = None,
        device: str,
        kernels: BlockTableKernels | None = None,
    ) -> None:
        geometries = group_geometries(
            block_sizes, kernel_block_sizes, context_parallel, row_tokens, rings
        )
        sizes = {"max_num_reqs": max_num_reqs, "max_num_batched_tokens": max_num_batched_tokens}
        require_at_least(1, GeometryError, **sizes)
        # a tensor's device has the GPU's index, even if the caller named none
        self.device = torch.empty(0, device=device).device
        self.max_num_reqs = max_num_reqs
        self.max_num_batched_tokens = max_num_batched_tokens
        try:
            self._kernels = implementation_for(self.device) if kernels is None else kernels
        except ValueError as error:
            raise ConfigError("no block table kernels for this device", device=device) from error
        self._requests = StagedWriteTensor(
            geometries=geometries,
            num_rows=max_num_reqs,
            max_blocks_per_row=[
                each.max_blocks_per_request(max_model_len, num_speculative_tokens)
                for each in geometries
            ],
            device=self.device,
            kernels=self._kernels,
        )
        tables = self._requests.tables
        self._batch = TableSet.zeros(max_num_reqs, tables.widths.tolist(), self.device)
        self._num_blocks = np.zeros((tables.num_groups, max_num_reqs), dtype=np.int64)
        self._slots = torch.full(
            (tables.num_groups, max_num_batched_tokens),
            PAD_SLOT_ID,
            dtype=torch.int64,
            device=self.device,
        )

    @property
    def num_groups(self) -> int:
        return self._batch.num_groups

    def num_blocks(self, group: int, req_index: int) -> int:
        """Return the number of allocation ids of a request in a group, with the staged ones."""
        self._check_request(req_index)
        if not 0 <= group < self.num_groups:
            raise GeometryError("no such group", group=group, num_groups=self.num_groups)
        return int(self._num_blocks[group, req_index])

    def num_kernel_blocks(self, group: int, req_index: int) -> int:
        """Return the number of kernel ids of a request in a group, with the staged ones."""
        return self.num_blocks(group, req_index) * self._requests.ratios[group]

    def append_block_ids(
        self, req_index: int, block_ids: Sequence[BlockIds], *, overwrite: bool
    ) -> None:
        """Stage a request's new ids in each group.

        Args:
            req_index: The request's row.
            block_ids: Allocation ids, by group.
            overwrite: True to replace the request's ids, False to append to them.

        Raises:
            BlockIdError: the row has no room, or an id is invalid.
        """
        self._check_request(req_index)
        check_every_group(block_ids, self.num_groups)
        starts = [0] * self.num_groups if overwrite else self._num_blocks[:, req_index].tolist()
        checked = [
            self._requests.check(group, start, ids)
            for group, (start, ids) in enumerate(zip(starts, block_ids, strict=True))
        ]
        for group, (start, ids) in enumerate(zip(starts, checked, strict=True)):
            if overwrite or len(ids):
                self._requests.stage(group, req_index, start, ids)
            self._num_blocks[group, req_index] = start + len(ids)

    def apply_staged_writes(self) -> None:
        """Write all staged ids to the tables. See `StagedWriteTensor.apply`."""
        self._requests.apply()

    def gather_block_tables(self, req_indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gather the kernel ids of a batch.

        Args:
            req_indices: The request of each row of the batch, int32 `[num_reqs]` on the device. The row of an index
                that is no request, such as -1 in the padding of a CUDA graph, becomes empty.

        Returns:
            A table per group, int32 `[num_reqs, width]`, zero after a row's ids, in the same memory in every step.
        """
        self._check_vector("req_indices", req_indices, torch.int32, self.max_num_reqs)
        self._kernels.gather_rows(self._requests.tables, self._batch, req_indices)
        return tuple(table[: len(req_indices)] for table in self._batch.tables)

    def compute_slot_mappings(
        self, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Compute the slots of the gathered batch's tokens.

        Args:
            query_start_loc: The index of each request's first token, then the number of tokens: int32 `[num_reqs + 1]`
                on the device, ascending from 0.
            positions: The index of each token in its request, int64 `[num_tokens]` on the device.

        Returns:
            int64 `[num_groups, max_num_batched_tokens]`, the same memory in every step. The slot is `PAD_SLOT_ID` after
            the last token (for CUDA graphs that were captured with more tokens), and for tokens that another rank
            stores, that are not the last of a compressed row, or whose request has no block for them.
        """
        self._check_vector("query_start_loc", query_start_loc, torch.int32, self.max_num_reqs + 1)
        self._check_vector("positions", positions, torch.int64, self.max_num_batched_tokens)
        if not len(query_start_loc):
            raise GeometryError("query_start_loc needs an entry for the end of the last request")
        self._kernels.map_slots(
            self._batch, self._requests.geometry, query_start_loc, positions, self._slots
        )
        return self._slots

    def dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return empty rows in the memory of `gather_block_tables`, for a warm-up or a capture."""
        check_count("num_reqs", num_reqs, self.max_num_reqs)
        self._batch.lengths[:, :num_reqs].zero_()
        return tuple(table[:num_reqs].zero_() for table in self._batch.tables)

    def dummy_slot_mappings(self) -> torch.Tensor:
        """Return padding in the memory of `compute_slot_mappings`, for a warm-up or a capture."""
        return self._slots.fill_(PAD_SLOT_ID)

    def _check_request(self, req_index: int) -> None:
        if not 0 <= req_index < self.max_num_reqs:
            raise GeometryError(
                "there is no such request", req_index=req_index, max_num_reqs=self.max_num_reqs
            )

    def _check_vector(
        self, name: str, vector: torch.Tensor, dtype: torch.dtype, max_length: int
    ) -> None:
        if (
            vector.dtype != dtype
            or vector.dim() != 1
            or vector.device != self.device
            or not vector.is_contiguous()
        ):
            raise GeometryError(
                f"{name} must be a contiguous vector of the tables' device",
                expected=(dtype, self.device),
                given=(vector.dtype, vector.device, tuple(vector.shape), vector.stride()),
            )
        check_count(name, len(vector), max_length)
