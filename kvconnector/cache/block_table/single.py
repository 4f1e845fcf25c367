"""The block table of one cache group, kept on the host and copied to the device once per step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvconnector.cache.block_table.ids import (
    BlockIds,
    check_at_least_one,
    check_count,
    check_room,
    stage_block_ids,
)
from kvconnector.cache.slot_mapping import PAD_SLOT_ID, BlockGeometry, slot_mapping
from kvconnector.errors import GeometryError


class MirroredArray:
    """A numpy array of zeros, `host`, and a tensor of the same shape on a device, `device`.

    For a CUDA GPU the host's side is pinned, and copies do not block. On the device `cpu` both
    sides are the same memory. Write `host` only after `wait_until_copied`: a GPU reads it when the
    stream gets to the copy, not when it is asked for.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        target = torch.device(device)
        is_gpu = target.type == "cuda"
        self._host_tensor = torch.zeros(shape, dtype=dtype, pin_memory=is_gpu)
        self._copied = torch.cuda.Event() if is_gpu else None
        self._in_flight = False
        self.host: npt.NDArray[Any] = self._host_tensor.numpy()
        self.device = (
            self._host_tensor
            if target.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=target)
        )

    def copy_to_device(self, count: int) -> None:
        """Copy the first `count` entries of axis 0, on the current stream of a GPU."""
        if self.device is self._host_tensor or not count:
            return
        is_gpu = self._copied is not None
        self.device[:count].copy_(self._host_tensor[:count], non_blocking=is_gpu)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))
            self._in_flight = True

    def wait_until_copied(self) -> None:
        """Return once the last copy has read the host's side."""
        if self._in_flight and self._copied is not None:
            self._copied.synchronize()
            self._in_flight = False


class BlockTable:
    """The block ids of every request slot, int32 `[max_num_reqs, max_num_blocks_per_req x ratio]`.

    Ids are given as the allocator's. Where the attention kernel's blocks are smaller, each is kept
    as `ratio` = `block_size / kernel_block_size` consecutive kernel ids. Entries behind a row's ids
    are always zero. Rows change on the host, `commit` copies them to the device. Not thread safe.

    `max_num_blocks_per_req` are allocation ids, `max_num_batched_tokens` the length of the slot mapping. `device` is
    where the device copy lives, as torch names it.

    Every method raises GeometryError for a row or a size that is out of range, and then changes nothing.
    """

    def __init__(
        self,
        *,
        geometry: BlockGeometry,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        device: str,
    ) -> None:
        check_at_least_one(
            max_num_reqs=max_num_reqs,
            max_num_blocks_per_req=max_num_blocks_per_req,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.geometry = geometry
        self.max_num_reqs = max_num_reqs
        self.max_num_blocks_per_req = max_num_blocks_per_req
        self.max_num_batched_tokens = max_num_batched_tokens
        ratio = geometry.kernel_blocks_per_block
        self._table = MirroredArray(
            (max_num_reqs, max_num_blocks_per_req * ratio), torch.int32, device
        )
        self._slots = MirroredArray((max_num_batched_tokens,), torch.int64, device)
        self._slots.host.fill(PAD_SLOT_ID)
        self._slots.copy_to_device(max_num_batched_tokens)
        self._num_kernel_blocks = np.zeros(max_num_reqs, dtype=np.int32)
        self._num_slots = 0
        self._num_committed_slots = 0
        # Working memory, so that changing a row allocates nothing. Staged: first kernel ids.
        self._staged = np.zeros(max_num_blocks_per_req, dtype=np.int64)
        self._spare_row = np.zeros(max_num_blocks_per_req * ratio, dtype=np.int32)
        self._staged_write = (0, 0, 0)

    def stage(self, block_ids: BlockIds, row: int, *, overwrite: bool) -> None:
        """Check ids for a row and keep them for `write_staged`: several tables change all or none.

        Raises BlockIdError: an id is negative or too large, or the row has no room.
        """
        self._check_rows(row)
        held = 0 if overwrite else self.num_blocks(row)
        count = len(block_ids)
        check_room(held, count, self.max_num_blocks_per_req)
        ratio = self.geometry.kernel_blocks_per_block
        stage_block_ids(block_ids, self._staged[:count], ratio)
        self._staged[:count] *= ratio
        self._staged_write = (row, held, count)

    def write_staged(self) -> None:
        """Write what the last `stage` kept."""
        row, held, count = self._staged_write
        ratio = self.geometry.kernel_blocks_per_block
        start, end = held * ratio, (held + count) * ratio
        self._table.wait_until_copied()
        expanded = self._table.host[row, start:end].reshape(count, ratio)
        # Narrowed first and then column by column: numpy allocates buffers for casts and broadcasts.
        first_ids = self._spare_row[:count]
        first_ids[:] = self._staged[:count]
        for step in range(ratio):
            np.add(first_ids, step, out=expanded[:, step])
        self._table.host[row, end : self._num_kernel_blocks[row]] = 0
        self._num_kernel_blocks[row] = end

    def move_row(self, source: int, target: int) -> None:
        """Make the target row what the source row is; the source row becomes empty."""
        self._check_rows(source, target)
        if source == target:
            return
        self.clear_row(target)
        count = int(self._num_kernel_blocks[source])
        self._table.host[target, :count] = self._table.host[source, :count]
        self._num_kernel_blocks[target] = count
        self.clear_row(source)

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""
        self._check_rows(first, second)
        if first == second:
            return
        self._table.wait_until_copied()
        counts = self._num_kernel_blocks
        longest = max(int(counts[first]), int(counts[second]))
        spare, table = self._spare_row[:longest], self._table.host
        spare[:] = table[first, :longest]
        table[first, :longest] = table[second, :longest]
        table[second, :longest] = spare
        counts[first], counts[second] = int(counts[second]), int(counts[first])

    def clear_row(self, row: int) -> None:
        """Empty one row."""
        self._check_rows(row)
        self._table.wait_until_copied()
        self._table.host[row, : self._num_kernel_blocks[row]] = 0
        self._num_kernel_blocks[row] = 0

    def clear(self) -> None:
        """Empty every row, here and on the device."""
        self._table.wait_until_copied()
        self._table.host.fill(0)
        self._num_kernel_blocks.fill(0)
        self.commit(self.max_num_reqs)

    def commit(self, num_reqs: int) -> None:
        """Copy the first rows to the device, on the current stream."""
        check_count("num_reqs", num_reqs, self.max_num_reqs)
        self._table.copy_to_device(num_reqs)

    def compute_slot_mapping(
        self, req_indices: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int64]:
        """The slots of a step's tokens, int64 `[num_tokens]`, a view of this table's own memory.

        `req_indices` are the tokens' rows and `positions` their indices in their requests, both `[num_tokens]`.

        Raises BlockIdError: a token has no block in its row.
        """
        rows = _index_vector("req_indices", req_indices)
        places = _index_vector("positions", positions)
        if len(rows) != len(places):
            raise GeometryError(
                "every token needs one row and one position",
                num_req_indices=len(rows),
                num_positions=len(places),
            )
        check_count("num_tokens", len(rows), self.max_num_batched_tokens)
        if len(rows):
            self._check_rows(int(rows.min()), int(rows.max()))
        self._slots.wait_until_copied()
        slots: npt.NDArray[np.int64] = self._slots.host[: len(rows)]
        table, counts = self._table.host, self._num_kernel_blocks
        slot_mapping(table, counts, rows, places, geometry=self.geometry, out=slots)
        self._slots.host[len(rows) : self._num_slots] = PAD_SLOT_ID
        self._num_slots = len(rows)
        return slots

    def commit_slot_mapping(self) -> None:
        """Copy the slot mapping to the device, on the current stream.

        Behind the last token the device's side holds `PAD_SLOT_ID`, which a CUDA graph of a wider
        step reads.
        """
        self._slots.copy_to_device(max(self._num_slots, self._num_committed_slots))
        self._num_committed_slots = self._num_slots

    def device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """The first rows as last committed, int32 `[num_reqs, width]` on the device."""
        return self._table.device[:num_reqs]

    def device_slot_mapping(self, num_tokens: int | None = None) -> torch.Tensor:
        """The slot mapping as last committed, int64 `[num_tokens]` on the device."""
        return self._slots.device[:num_tokens]

    def num_blocks(self, row: int) -> int:
        """Allocation ids in a row."""
        return self.num_kernel_blocks(row) // self.geometry.kernel_blocks_per_block

    def num_kernel_blocks(self, row: int) -> int:
        """Kernel ids in a row."""
        self._check_rows(row)
        return int(self._num_kernel_blocks[row])

    def _check_rows(self, *rows: int) -> None:
        for row in rows:
            if not 0 <= row < self.max_num_reqs:
                raise GeometryError(
                    "the table has no such row", row=row, max_num_reqs=self.max_num_reqs
                )


def _index_vector(name: str, values: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GeometryError(
            f"{name} must be a vector of integers", shape=array.shape, dtype=str(array.dtype)
        )
    return array.astype(np.int64, copy=False)
