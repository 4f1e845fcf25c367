"""A chunk's copy in host memory, as a C function for the pump. It is through when it returns."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cfunc, types

from kvconnector_kernels.pump.native import load, store, store_flag
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.relayout.cpu_kernel import copy_span
from kvconnector_kernels.relayout.runs import MAX_RUN_TOKENS

# A job's int64 fields. `ROW` is the chunk's side as a part table's row, completed here.
NBYTES, IS_PACK, NUM_PARTS, NUM_HEADS, NUM_TOKENS, HEAD_DIM, ITEM_BYTES = range(7)
PAGED_ROWS, BLOCK_IDS, BLOCK_SIZE, HEAD_START, TOKEN_START = range(7, 12)
PART_STRIDE, ROW = 12, 13
HEAD_STRIDE, TOKEN_STRIDE, DIM_STRIDE = ROW + 2, ROW + 3, ROW + 4
RUN_TOKENS, STEP_TOKENS, SKIP_TOKENS = range(18, 21)
# Write past the caches.
IS_STREAMED = 21
JOB_FIELDS = 22
_PART_BYTES = 40


def _make(sources_hash):
    def copy(context, job, slot, fence, fence_value):
        _ = sources_hash
        # a chunk's tokens are one block, number 0: the zero before the head stride is its block's stride, and its id
        row = job + ROW * 8
        item = (load(job + HEAD_DIM * 8), load(job + ITEM_BYTES * 8))
        num_heads, num_tokens = load(job + NUM_HEADS * 8), load(job + NUM_TOKENS * 8)
        chunk_window = (row + 8, num_tokens, 0, 0, MAX_RUN_TOKENS, MAX_RUN_TOKENS, 0)
        paged_window = (
            load(job + BLOCK_IDS * 8),
            load(job + BLOCK_SIZE * 8),
            load(job + HEAD_START * 8),
            load(job + TOKEN_START * 8),
            load(job + RUN_TOKENS * 8),
            load(job + STEP_TOKENS * 8),
            load(job + SKIP_TOKENS * 8),
        )
        paged = load(job + PAGED_ROWS * 8)
        is_streamed = load(job + IS_STREAMED * 8) != 0
        for part in range(load(job + NUM_PARTS * 8)):
            store(row, slot + part * load(job + PART_STRIDE * 8))
            at = paged + part * _PART_BYTES
            if load(job + IS_PACK * 8):
                copy_span(
                    row,
                    chunk_window,
                    at,
                    paged_window,
                    num_heads,
                    num_tokens,
                    item,
                    is_streamed,
                    0,
                    num_tokens,
                )
            else:
                copy_span(
                    at,
                    paged_window,
                    row,
                    chunk_window,
                    num_heads,
                    num_tokens,
                    item,
                    is_streamed,
                    0,
                    num_tokens,
                )
        store_flag(fence, fence_value)
        return 0

    return copy


@cache
def compile_copy() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives."""
    signature = types.int64(*[types.int64] * 5)
    return cfunc(signature, nopython=True, cache=True)(_make(SOURCES_HASH))
