"""Block tables of all cache groups, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvconnector.cache.block_table.ids import (
    BlockIds,
    check_at_least_one,
    check_count,
    check_every_group,
)
from kvconnector.cache.device_block_table.staged_write import StagedWriteTensor
from kvconnector.cache.slot_mapping import (
    NO_CONTEXT_PARALLEL,
    PAD_SLOT_ID,
    ContextParallel,
    group_geometries,
)
from kvconnector.errors import ConfigError, GeometryError
from kvconnector_kernels.block_table import BlockTableKernels, TableSet, implementation_for


class DeviceBlockTables:
    """The block ids of every request on the device, the rows of the current batch, and its slots.

    A step is `append_block_ids` for requests with new blocks, `apply_staged_writes`, then
    `gather_block_tables` and `compute_slot_mappings`. The last two write to the same memory in
    every step, read nothing back and allocate nothing, so a CUDA graph can hold them. Run each once
    before a capture, which compiles it. Not thread safe.

    Args:
        block_sizes: tokens per allocation block, by group.
        kernel_block_sizes: tokens per block of the attention kernel, by group; None if the same.
        max_num_reqs: requests at a time, in the tables and in a batch.
        max_model_len: tokens of the longest request.
        max_num_batched_tokens: tokens of the largest step.
        num_speculative_tokens: tokens that a step may compute ahead of a request's end.
        context_parallel: this rank's place among those that share a request's tokens.
        device: of the tables, as torch names it: a CUDA GPU or the CPU.
        kernels: what runs on it; None for the device's own.

    Every method raises GeometryError for a group, a request, a tensor or a size that does not fit, and then changes
    nothing. A device without kernels is a ConfigError.
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
        context_parallel: ContextParallel = NO_CONTEXT_PARALLEL,
        device: str,
        kernels: BlockTableKernels | None = None,
    ) -> None:
        geometries = group_geometries(block_sizes, kernel_block_sizes, context_parallel)
        check_at_least_one(max_num_reqs=max_num_reqs, max_num_batched_tokens=max_num_batched_tokens)
        # A tensor's device has its GPU's index, also where the caller meant the current one.
        self.device = torch.empty(0, device=device).device
        self.max_num_reqs = max_num_reqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._kernels = _kernels_for(self.device) if kernels is None else kernels
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
        """Cache groups."""
        return self._batch.num_groups

    def num_blocks(self, group: int, req_index: int) -> int:
        """Allocation ids of a request in a group, staged ones included."""
        self._check_request(req_index)
        if not 0 <= group < self.num_groups:
            raise GeometryError("no such group", group=group, num_groups=self.num_groups)
        return int(self._num_blocks[group, req_index])

    def num_kernel_blocks(self, group: int, req_index: int) -> int:
        """As `num_blocks`, in the attention kernel's ids."""
        return self.num_blocks(group, req_index) * self._requests.ratios[group]

    def append_block_ids(
        self, req_index: int, block_ids: Sequence[BlockIds], *, overwrite: bool
    ) -> None:
        """Stage a request's new ids of each group, behind those it has or in their place.

        Raises BlockIdError: one group refuses its ids; nothing changes.
        """
        self._check_request(req_index)
        check_every_group(block_ids, self.num_groups)
        starts = [0] * self.num_groups if overwrite else self._num_blocks[:, req_index].tolist()
        for group, (start, ids) in enumerate(zip(starts, block_ids, strict=True)):
            self._requests.check_write(group, start, ids)
        for group, (start, ids) in enumerate(zip(starts, block_ids, strict=True)):
            if overwrite or len(ids):
                self._requests.stage(group, req_index, start, len(ids))
            self._num_blocks[group, req_index] = start + len(ids)

    def apply_staged_writes(self) -> None:
        """Write all staged ids to the tables: one launch, on the current stream. Raises LocalProtocolError: it is being
        captured.
        """
        self._requests.apply()

    def gather_block_tables(self, req_indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The kernel ids of a batch: per group, int32 `[num_reqs, width]`, zero behind a row's ids.

        They are views of the same memory in every step. `req_indices` is int32 `[num_reqs]` on the device, the request
        of each row of the batch. Where it is none, such as -1 in the padding of a CUDA graph, the row is empty.
        """
        self._check_vector("req_indices", req_indices, torch.int32, self.max_num_reqs)
        self._kernels.gather_rows(self._requests.tables, self._batch, req_indices)
        return tuple(table[: len(req_indices)] for table in self._batch.tables)

    def compute_slot_mappings(
        self, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The slots of the gathered batch's tokens, int64 `[num_groups, max_num_batched_tokens]`.

        `PAD_SLOT_ID` behind the last token, which a CUDA graph of a wider step reads. That is also
        the slot of a token that another rank stores or whose request has no block for it.

        `query_start_loc`, int32 `[num_reqs + 1]` ascending from 0, says where the tokens of each request start;
        `positions`, int64 `[num_tokens]`, is each token's index in its request. Both are on the device.
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
        """Empty rows in the memory that `gather_block_tables` uses, for a warm-up or a capture."""
        check_count("num_reqs", num_reqs, self.max_num_reqs)
        self._batch.lengths[:, :num_reqs].zero_()
        return tuple(table[:num_reqs].zero_() for table in self._batch.tables)

    def dummy_slot_mappings(self) -> torch.Tensor:
        """Padding in the memory that `compute_slot_mappings` uses, for a warm-up or a capture."""
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


def _kernels_for(device: torch.device) -> BlockTableKernels:
    try:
        return implementation_for(device)
    except ValueError as error:
        raise ConfigError("no block table kernels for this device", device=str(device)) from error
