"""A chunk's copy in host memory, as a C function for the pump. It is through when it returns."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cfunc, types

from kvconnector_kernels.pump.native import record_at, store_flag
from kvconnector_kernels.pump.records import PAGED_SIDE, offset_of, record_of
from kvconnector_kernels.pump.sources import SOURCES_HASH
from kvconnector_kernels.pump.steps import helper, window_of
from kvconnector_kernels.relayout.cpu_kernel import copy_span
from kvconnector_kernels.relayout.runs import MAX_RUN_TOKENS

JOB = record_of(
    "nbytes",
    # the chunk's side as a part table's row, completed here; its tokens are one block, number 0: the zero before the
    # head stride is its block's stride, and its id
    "chunk_address",
    "chunk_block",
    "head_stride",
    "token_stride",
    "dim_stride",
    "part_stride",
    "is_pack",
    "is_streamed",  # write past the caches
    "num_parts",
    "num_heads",
    "num_tokens",
    "head_dim",
    "item_bytes",
    *PAGED_SIDE,
)
_ROW_OFFSET, _BLOCK_OFFSET = (offset_of(JOB, name) for name in ("chunk_address", "chunk_block"))
_PART_BYTES = 40


@helper
def _copy(address, slot):
    job = record_at(address, JOB)
    item = (job.head_dim, job.item_bytes)
    chunk = address + _ROW_OFFSET
    chunk_ids = address + _BLOCK_OFFSET
    chunk_window = (chunk_ids, job.num_tokens, 0, 0, MAX_RUN_TOKENS, MAX_RUN_TOKENS, 0)
    paged_window = window_of(job)
    counts = (job.num_heads, job.num_tokens, item, job.is_streamed != 0, 0, job.num_tokens)
    for part in range(job.num_parts):
        job.chunk_address = slot + part * job.part_stride
        paged = job.rows + part * _PART_BYTES
        if job.is_pack:
            copy_span(chunk, chunk_window, paged, paged_window, *counts)
        else:
            copy_span(paged, paged_window, chunk, chunk_window, *counts)


def _make(sources_hash):
    def copy(context, job, slot, fence, fence_value):
        _ = sources_hash
        _copy(job, slot)
        store_flag(fence, fence_value)
        return 0

    return copy


@cache
def compile_copy() -> Any:
    """The compiled function; `address` is where it is, for as long as the object lives."""
    signature = types.int64(*[types.int64] * 5)
    return cfunc(signature, nopython=True, cache=True)(_make(SOURCES_HASH))
