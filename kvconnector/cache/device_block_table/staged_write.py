"""Tables on a device whose row writes are staged on the host and applied by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvconnector.cache.block_table.ids import BlockIds, check_room, stage_block_ids
from kvconnector.cache.slot_mapping import BlockGeometry
from kvconnector.errors import LocalProtocolError
from kvconnector_kernels.block_table import (
    WRITE_COLUMNS,
    BlockTableKernels,
    TableGeometry,
    TableSet,
)


class _DeviceAddress:
    """Pinned memory, described the way torch adopts foreign device arrays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": tensor.numpy().dtype.str,
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


class UvaBackedTensor:
    """One array under three names: `numpy` and `host` on the host, `device` for kernels. No copies.

    For a CUDA GPU the memory is pinned and read over the bus when a kernel reads it: write it
    before the launch, and leave it alone until that has run. On the CPU `device` is `host`. It starts as zeros, of a
    type that numpy has too.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.host = torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)
                # No target device is named: torch would then copy what it takes for another one's.
                self.device = torch.as_tensor(_DeviceAddress(self.host))
        else:
            self.host = torch.zeros(tuple(shape), dtype=dtype)
            self.device = self.host
        self.numpy: npt.NDArray[Any] = self.host.numpy()


_GROUP, _ROW, _START, _COUNT, _OFFSET, _LENGTH = range(len(WRITE_COLUMNS))
_NO_WRITE = -1

NUM_BUFFERS = 3
"""One that the host fills, two that the GPU has yet to read: scheduling one step ahead never waits."""

MAX_STAGED_IDS = 1 << 18
"""Ids per buffer, 1 MiB of pinned memory: four million new tokens per step at 16 tokens a block."""


class _Buffer:
    """Staged writes of one apply, in memory that the device reads."""

    def __init__(self, max_writes: int, max_ids: int, device: torch.device) -> None:
        self.records = UvaBackedTensor((max_writes, len(WRITE_COLUMNS)), torch.int32, device)
        self.ids = UvaBackedTensor((max_ids,), torch.int32, device)
        self.num_writes = 0
        self.num_ids = 0
        self._applied = torch.cuda.Event() if device.type == "cuda" else None

    def mark_applied(self, device: torch.device) -> None:
        if self._applied is not None:
            self._applied.record(torch.cuda.current_stream(device))

    def wait_until_read(self) -> None:
        if self._applied is not None:
            self._applied.synchronize()


class StagedWriteTensor:
    """int32 tables `[num_rows, max_blocks x ratio]` of all cache groups, on a device.

    `stage` keeps allocation ids on the host; `apply` writes all that were kept, expanded to
    kernel ids, in one launch on the current stream. A row ends behind its last write, so that write
    supersedes what was staged for the same entries and those behind them. Staged writes never
    overlap and may run in any order. They become visible at the next `apply`, or before it when the
    staging memory is full; in stream order always. Not thread safe.

    `max_blocks_per_row` are allocation ids, by group; `max_staged_ids` fit between two applies, and the longest row
    always does.
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
        parallel = geometries[0].context_parallel
        self.geometry = TableGeometry(
            block_sizes=torch.tensor([each.block_size for each in geometries], device=device),
            kernel_block_sizes=torch.tensor(
                [each.kernel_block_size for each in geometries], device=device
            ),
            world_size=parallel.world_size,
            rank=parallel.rank,
            interleave_tokens=parallel.interleave_tokens,
        )
        self._device = device
        self._kernels = kernels
        self._buffers = [
            _Buffer(len(widths) * num_rows, max(max_staged_ids, *self.max_blocks_per_row), device)
            for _ in range(NUM_BUFFERS if device.type == "cuda" else 1)
        ]
        # The last staged write of each row, which alone sets the row's length, and of each staged
        # write the one before it in its row.
        self._last_write = np.full((len(widths), num_rows), _NO_WRITE, dtype=np.int64)
        self._previous_write = np.zeros(len(widths) * num_rows, dtype=np.int64)
        self._checked = tuple(np.zeros(blocks, dtype=np.int64) for blocks in max_blocks_per_row)

    def check_write(self, group: int, start: int, block_ids: BlockIds) -> None:
        """Check ids for `start` and on of a row, and keep them for `stage`.

        Raises BlockIdError: the ids do not fit into the row, or one is negative or too large.
        """
        count = len(block_ids)
        check_room(start, count, self.max_blocks_per_row[group])
        stage_block_ids(block_ids, self._checked[group][:count], self.ratios[group])

    def stage(self, group: int, row: int, start: int, count: int) -> None:
        """Stage the ids that the last `check_write` of this group saw; the row then ends behind them."""
        buffer = self._buffers[0]
        if buffer.num_writes == len(buffer.records.numpy) or buffer.num_ids + count > len(
            buffer.ids.numpy
        ):
            self.apply()
            buffer = self._buffers[0]
        if not buffer.num_writes:
            buffer.wait_until_read()
        self._supersede(buffer, group, row, start)
        write, offset, end = buffer.num_writes, buffer.num_ids, buffer.num_ids + count
        buffer.ids.numpy[offset:end] = self._checked[group][:count]
        buffer.records.numpy[write] = (group, row, start, count, offset, start + count)
        self._previous_write[write] = self._last_write[group, row]
        self._last_write[group, row] = write
        buffer.num_writes, buffer.num_ids = write + 1, end

    def _supersede(self, buffer: _Buffer, group: int, row: int, start: int) -> None:
        """Cut what is staged of a row off at `start`, and leave its length to the next write."""
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
        """Make the staged writes, in one launch on the current stream; none if nothing is staged.

        Raises LocalProtocolError: the stream is being captured, and a replay would repeat what was staged once.
        """
        buffer = self._buffers[0]
        if not buffer.num_writes:
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise LocalProtocolError("staged writes cannot be applied inside a CUDA graph")
        records = buffer.records.device[: buffer.num_writes]
        self._kernels.apply_writes(self.tables, self.geometry, records, buffer.ids.device)
        buffer.mark_applied(self._device)
        written = buffer.records.numpy[: buffer.num_writes]
        self._last_write[written[:, _GROUP], written[:, _ROW]] = _NO_WRITE
        self._buffers.append(self._buffers.pop(0))
        self._buffers[0].num_writes = self._buffers[0].num_ids = 0
