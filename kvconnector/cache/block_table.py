"""Block tables that an engine keeps in host memory, with a copy on the device: a row of block ids per request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvconnector.cache.slot_mapping import (
    PAD_SLOT_ID,
    BlockGeometry,
    group_geometries,
    slot_mapping,
)
from kvconnector.errors import BlockIdError, GeometryError, require_at_least
from kvconnector.layout import NO_CONTEXT_PARALLEL, ContextParallel, check_block_ids

BlockIds = Sequence[int] | npt.NDArray[np.integer]
"""The allocator's ids of a request's consecutive blocks."""


def check_every_group(block_ids: Sequence[BlockIds], num_groups: int) -> None:
    """Raise GeometryError unless there is a sequence of ids for each cache group."""
    if len(block_ids) != num_groups:
        raise GeometryError(
            "every cache group needs its block ids", num_groups=num_groups, num_given=len(block_ids)
        )


def check_count(name: str, count: int, limit: int) -> None:
    """Raise GeometryError unless `count` is between 0 and `limit`."""
    if not 0 <= count <= limit:
        raise GeometryError(f"{name} is out of the table's range", **{name: count}, limit=limit)


def check_row_ids(
    block_ids: BlockIds, *, held: int, max_num_blocks: int, ratio: int
) -> npt.NDArray[np.int32]:
    """Return allocation ids as int32, to follow the `held` ones of a row. Each of them becomes `ratio` kernel ids.

    Raises BlockIdError: the row has no room for them, or an id is not an integer, is negative, or has a kernel id that
    exceeds int32.
    """
    if held + len(block_ids) > max_num_blocks:
        raise BlockIdError(
            "the row has no room for these blocks",
            num_blocks=held,
            num_new_blocks=len(block_ids),
            max_num_blocks=max_num_blocks,
        )
    return check_block_ids(block_ids, 2**31 // ratio, what="block ids")


class MirroredArray:
    """An array of zeros on the host (`host` in numpy, `host_tensor` in torch) and its copy on a device (`device`).

    For a CUDA GPU the host's memory is pinned and copies do not block; on the CPU both sides are the same memory. Write
    `host` only after `wait_until_copied`, because a GPU reads it only when its stream gets to the copy.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        is_gpu = torch.device(device).type == "cuda"
        self.host_tensor = torch.zeros(shape, dtype=dtype, pin_memory=is_gpu)
        self._copied = torch.cuda.Event() if is_gpu else None
        self.host: npt.NDArray[Any] = self.host_tensor.numpy()
        self.device = torch.zeros(shape, dtype=dtype, device=device) if is_gpu else self.host_tensor

    def copy_to_device(self, count: int) -> None:
        """Copy the first `count` entries of axis 0, on the current stream of a GPU."""
        if self._copied is not None and count:
            self.device[:count].copy_(self.host_tensor[:count], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self.device.device))

    def wait_until_copied(self) -> None:
        """Wait until the last copy has read the host's side."""
        if self._copied is not None:
            self._copied.synchronize()


class BlockTable:
    """The block ids of every request slot, int32 `[max_num_reqs, max_num_blocks_per_req x ratio]`.

    Callers pass the allocator's ids. If the attention kernel's blocks are smaller, an id becomes `ratio` consecutive
    kernel ids, `block_size / kernel_block_size`. Entries after a row's ids are always zero. Rows change on the host;
    `commit` copies them to the device. Not thread safe.

    Args:
        geometry: The sizes of blocks, and this rank's position among those that share a request's tokens.
        max_num_reqs: The number of rows.
        max_num_blocks_per_req: The most allocation ids of a row.
        max_num_batched_tokens: The most tokens of a step.
        device: The device of the copy: "cpu" or a CUDA GPU.

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
        sizes = {"max_num_reqs": max_num_reqs, "max_num_batched_tokens": max_num_batched_tokens}
        sizes["max_num_blocks_per_req"] = max_num_blocks_per_req
        require_at_least(1, GeometryError, **sizes)
        self.geometry = geometry
        self.max_num_reqs = max_num_reqs
        self.max_num_blocks_per_req = max_num_blocks_per_req
        self.max_num_batched_tokens = max_num_batched_tokens
        width = max_num_blocks_per_req * geometry.kernel_blocks_per_block
        self._table = MirroredArray((max_num_reqs, width), torch.int32, device)
        self._slots = MirroredArray((max_num_batched_tokens,), torch.int64, device)
        self._slots.host.fill(PAD_SLOT_ID)
        self._slots.copy_to_device(max_num_batched_tokens)
        self._num_kernel_blocks = np.zeros(max_num_reqs, dtype=np.int32)
        self._num_slots = 0
        self._num_committed_slots = 0

    def append_row(self, block_ids: BlockIds, row: int) -> None:
        """Append allocation ids to a row. Raises BlockIdError: the row has no room, or an id is invalid."""
        self.write(row, *self.checked(block_ids, row, overwrite=False))

    def add_row(self, block_ids: BlockIds, row: int) -> None:
        """Replace a row by a new request's allocation ids. Raises BlockIdError: as `append_row`."""
        self.write(row, *self.checked(block_ids, row, overwrite=True))

    def checked(
        self, block_ids: BlockIds, row: int, *, overwrite: bool
    ) -> tuple[int, npt.NDArray[np.int32]]:
        """Return how many of a row's ids stay, and the ids to `write` next. Raises BlockIdError: as `append_row`."""
        self._check_rows(row)
        held = 0 if overwrite else self.num_blocks(row)
        return held, check_row_ids(
            block_ids,
            held=held,
            max_num_blocks=self.max_num_blocks_per_req,
            ratio=self.geometry.kernel_blocks_per_block,
        )

    def write(self, row: int, held: int, ids: npt.NDArray[np.int32]) -> None:
        """Keep the first `held` allocation ids of a row, and put these `checked` ones after them."""
        ratio = self.geometry.kernel_blocks_per_block
        start, end = held * ratio, (held + len(ids)) * ratio
        self._table.wait_until_copied()
        self._table.host[row, start:end] = (ids[:, None] * ratio + np.arange(ratio)).ravel()
        self._table.host[row, end : self._num_kernel_blocks[row]] = 0
        self._num_kernel_blocks[row] = end

    def move_row(self, source: int, target: int) -> None:
        """Move a row's ids from `source` to `target`, whose own are lost."""
        self.swap_row(source, target)
        if source != target:
            self.clear_row(source)

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""
        self._check_rows(first, second)
        self._table.wait_until_copied()
        for array in (self._table.host, self._num_kernel_blocks):
            array[[first, second]] = array[[second, first]]

    def clear_row(self, row: int) -> None:
        """Empty one row."""
        self._check_rows(row)
        self._table.wait_until_copied()
        self._table.host[row] = 0
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
        """Compute the slots of a step's tokens.

        Args:
            req_indices: The row of each token, `[num_tokens]`.
            positions: The index of each token in its request, `[num_tokens]`.

        Returns:
            int64 `[num_tokens]`, a view of this table's memory; `PAD_SLOT_ID` for tokens that another rank stores, or
            that are not the last of a compressed row.

        Raises:
            BlockIdError: a token with a slot has no block in its row.
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

    def commit_slot_mapping(self, num_tokens: int | None = None) -> None:
        """Copy the slot mapping to the device, on the current stream.

        After the last token the device's side holds `PAD_SLOT_ID`, for CUDA graphs that were captured with more tokens.

        Args:
            num_tokens: Number of tokens that keep their slots; later ones become padding on both sides. None for all.
        """
        if num_tokens is not None:
            check_count("num_tokens", num_tokens, self.max_num_batched_tokens)
            self._slots.wait_until_copied()
            self._slots.host[num_tokens : self._num_slots] = PAD_SLOT_ID
            self._num_slots = min(num_tokens, self._num_slots)
        self._slots.copy_to_device(max(self._num_slots, self._num_committed_slots))
        self._num_committed_slots = self._num_slots

    def numpy(self, num_reqs: int | None = None) -> npt.NDArray[np.int32]:
        """Return the first rows on the host, int32 `[num_reqs, width]`, as a read-only view."""
        rows: npt.NDArray[np.int32] = self._table.host[: self._num_rows(num_reqs)]
        rows.flags.writeable = False
        return rows

    def host_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """Return the same memory as a tensor, pinned for a GPU. Do not write to it."""
        return self._table.host_tensor[: self._num_rows(num_reqs)]

    def device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """Return the first rows as last committed, int32 `[num_reqs, width]` on the device."""
        return self._table.device[: self._num_rows(num_reqs)]

    def device_slot_mapping(self, num_tokens: int | None = None) -> torch.Tensor:
        """Return the slot mapping as last committed, int64 `[num_tokens]` on the device."""
        if num_tokens is not None:
            check_count("num_tokens", num_tokens, self.max_num_batched_tokens)
        return self._slots.device[:num_tokens]

    def num_blocks(self, row: int) -> int:
        """Return the number of allocation ids in a row."""
        return self.num_kernel_blocks(row) // self.geometry.kernel_blocks_per_block

    def num_kernel_blocks(self, row: int) -> int:
        """Return the number of kernel ids in a row."""
        self._check_rows(row)
        return int(self._num_kernel_blocks[row])

    def _num_rows(self, num_reqs: int | None) -> int:
        """Return `num_reqs`, or the number of all rows: a slice alone would be shorter without an error."""
        if num_reqs is None:
            return self.max_num_reqs
        check_count("num_reqs", num_reqs, self.max_num_reqs)
        return num_reqs

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


class MultiGroupBlockTable:
    """One `BlockTable` per cache group. A request has the same row in all of them; if one refuses ids, none changes.

    Arguments are those of `DeviceBlockTables`; methods do what those of `BlockTable` do, in every group.
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
    ) -> None:
        geometries = group_geometries(
            block_sizes, kernel_block_sizes, context_parallel, row_tokens, rings
        )
        self.tables = tuple(
            BlockTable(
                geometry=geometry,
                max_num_reqs=max_num_reqs,
                max_num_blocks_per_req=geometry.max_blocks_per_request(
                    max_model_len, num_speculative_tokens
                ),
                max_num_batched_tokens=max_num_batched_tokens,
                device=device,
            )
            for geometry in geometries
        )

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, group: int) -> BlockTable:
        return self.tables[group]

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self.tables)

    def append_row(self, block_ids: Sequence[BlockIds], row: int) -> None:
        """Append each group's allocation ids to a row."""
        self._write(block_ids, row, overwrite=False)

    def add_row(self, block_ids: Sequence[BlockIds], row: int) -> None:
        """Replace a row of every group by a new request's allocation ids."""
        self._write(block_ids, row, overwrite=True)

    def move_row(self, source: int, target: int) -> None:
        for table in self.tables:
            table.move_row(source, target)

    def swap_row(self, first: int, second: int) -> None:
        for table in self.tables:
            table.swap_row(first, second)

    def clear_row(self, row: int) -> None:
        for table in self.tables:
            table.clear_row(row)

    def clear(self) -> None:
        for table in self.tables:
            table.clear()

    def commit(self, num_reqs: int) -> None:
        for table in self.tables:
            table.commit(num_reqs)

    def compute_slot_mapping(
        self, req_indices: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.int64], ...]:
        return tuple(table.compute_slot_mapping(req_indices, positions) for table in self.tables)

    def commit_slot_mapping(self, num_tokens: int | None = None) -> None:
        for table in self.tables:
            table.commit_slot_mapping(num_tokens)

    def _write(self, block_ids: Sequence[BlockIds], row: int, *, overwrite: bool) -> None:
        check_every_group(block_ids, len(self.tables))
        tables = list(zip(self.tables, block_ids, strict=True))
        checked = [table.checked(ids, row, overwrite=overwrite) for table, ids in tables]
        for table, (held, ids) in zip(self.tables, checked, strict=True):
            table.write(row, held, ids)
