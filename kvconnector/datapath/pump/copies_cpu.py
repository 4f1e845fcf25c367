"""The pump's copies in host memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import (
    ChunkCopies,
    Jobs,
    Span,
    slots_of,
    spans_of,
    words_of,
)
from kvconnector_kernels.pump.copy_cpu import JOB, compile_copy
from kvconnector_kernels.relayout.cpu import MIN_STREAMED_COPY_BYTES
from kvconnector_kernels.relayout.sides import CopyGeometry

_ROW_BYTES = 40
_PAGE = 4096


class CpuCopies(ChunkCopies):
    """See `ChunkCopies`. A program of at least `min_streamed_bytes` is unpacked past the caches, which would not keep
    it; what is packed is sent next, from the cache.
    """

    job = JOB

    def __init__(
        self,
        pools: Pools,
        slot_bytes: int,
        *,
        min_streamed_bytes: int = MIN_STREAMED_COPY_BYTES,
    ) -> None:
        self._pools = pools
        # the alignment of a slot does not matter here
        self._slots = slots_of(_PAGE, slot_bytes, "cpu")
        self._min_streamed_bytes = min_streamed_bytes
        self._compiled = compile_copy()
        self.function = int(self._compiled.address)

    def make_jobs(self, program: Program, *, packing: bool) -> Jobs:
        # checked with the spans, as far as copies take them
        ids = [np.ascontiguousarray(blocks.block_ids) for blocks in program.blocks]
        rows = np.empty(len(program.chunks), JOB)
        words = words_of(rows)
        for span in spans_of(program, self._pools, ids, self._slots):
            geometry = span.check(packing=packing)
            words[span.chunks] = self._common(span, geometry, packing=packing)
            rows["num_parts"][span.chunks] = span.num_parts
            rows["nbytes"][span.chunks] = span.num_parts * span.part_bytes
            rows["rows"][span.chunks] = span.table.rows_address + span.first_rows * _ROW_BYTES
        if not packing:
            rows["is_streamed"] = rows["nbytes"].sum() >= self._min_streamed_bytes
        return Jobs(words, tuple(ids))

    @staticmethod
    def _common(span: Span, geometry: CopyGeometry, *, packing: bool) -> list[int]:
        """A job with the fields that all chunks of a span share, in their order."""
        ids: npt.NDArray[np.int32] = span.ids  # type: ignore[assignment]  # numpy on the CPU
        part, head, token, dim = span.packed.strides_bytes(geometry)
        runs = span.runs
        values = {
            "is_pack": packing,
            "num_heads": geometry.num_heads,
            "num_tokens": geometry.num_tokens,
            "head_dim": geometry.head_dim,
            "item_bytes": geometry.item_size_bytes,
            "block_ids": ids.ctypes.data,
            "block_size": span.table.block_size,
            "head_start": span.head_start,
            "token_start": span.token_start,
            "run_tokens": runs.run_tokens,
            "step_tokens": runs.step_tokens,
            "skip_tokens": runs.skip_tokens,
            "part_stride": part,
            "head_stride": head,
            "token_stride": token,
            "dim_stride": dim,
        }
        return [values.get(name, 0) for name in JOB.names or ()]
