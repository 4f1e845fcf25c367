"""Re-layout in host memory: compiled loops without the GIL, spread over a few threads.

The threads are a plain pool, not numba's: numba's default threading layer breaks when two Python threads use it at
once. Every copy says how many threads it may use; it always takes one share itself, so any number of copies of at most
`n` threads add `n - 1` to the process.
"""

from __future__ import annotations

import os
import queue
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector_kernels.relayout.cpu_kernel import copy_span
from kvconnector_kernels.relayout.errors import RelayoutError
from kvconnector_kernels.relayout.runs import ADJACENT, TokenRuns
from kvconnector_kernels.relayout.sides import (
    ROW_COLUMNS,
    CopyGeometry,
    PackedSide,
    Side,
    check_copy,
)

# Below this a share costs more to hand over than to copy.
_MIN_SHARE_BYTES = 1 << 20
_MAX_DEFAULT_THREADS = 4
# A larger copy leaves no second-level cache anything worth keeping, so it goes past the caches.
MIN_STREAMED_COPY_BYTES = 2 << 20


class _CopyThreads:
    """The helper threads, started when a copy is large enough to be shared, as many as the largest such copy asked for.

    They are daemons that only ever run the compiled loops: an idle one keeps no process alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Share] = queue.SimpleQueue()
        self._num_started = 0

    def submit(self, shares: list[_Share]) -> None:
        with self._lock:
            while self._num_started < len(shares):
                threading.Thread(
                    target=_run_helper, args=(self._tasks,), name="kv-relayout", daemon=True
                ).start()
                self._num_started += 1
            for share in shares:
                self._tasks.put(share)

    def forget(self) -> None:
        """In a forked child: the parent's threads do not exist here, and its lock may be held for ever."""
        self._lock = threading.Lock()
        self._tasks = queue.SimpleQueue()
        self._num_started = 0


class _Share:
    """One helper's part of a copy."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.is_ended = threading.Event()
        self.error: BaseException | None = None

    def copy(self) -> None:
        try:
            copy_span(*self.arguments)
        except BaseException as error:
            self.error = error
        finally:
            self.is_ended.set()


def _run_helper(tasks: queue.SimpleQueue[_Share]) -> None:
    while True:
        tasks.get().copy()


_default_num_threads = max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)) // 2))
_threads = _CopyThreads()
os.register_at_fork(after_in_child=_threads.forget)


def relayout_cpu(
    src: Side,
    dst: Side,
    *,
    num_parts: int,
    num_heads: int,
    num_tokens: int,
    num_threads: int | None = None,
    head_dim: int | None = None,
    item_size_bytes: int | None = None,
) -> None:
    """Copy between two sides in host memory, see `relayout`. Returns when the destination holds all of it.

    Raises:
        RelayoutError: the sides do not hold the copy, see `check_copy`; `num_threads` is not at least 1.
    """
    num_threads = _default_num_threads if num_threads is None else num_threads
    if num_threads < 1:
        raise RelayoutError(f"num_threads must be at least 1, not {num_threads}")
    geometry = check_copy(
        src,
        dst,
        num_parts=num_parts,
        num_heads=num_heads,
        num_tokens=num_tokens,
        head_dim=head_dim,
        item_size_bytes=item_size_bytes,
    )
    if src.device != "cpu":
        raise RelayoutError(f"this copy runs on the CPU, the sides are on {src.device}")
    if geometry.nbytes == 0:
        return
    source, destination = _HostSide(src, geometry), _HostSide(dst, geometry)
    arguments = (
        *destination.arguments,
        *source.arguments,
        geometry.num_heads,
        geometry.num_tokens,
        (geometry.head_dim, geometry.item_size_bytes),
        geometry.nbytes >= MIN_STREAMED_COPY_BYTES,
    )
    _run_shares(arguments, geometry, num_threads)


def warm_up() -> None:
    """Compile, or load from the on-disk cache, all that any copy on the CPU needs. Copies nothing."""
    window = (1, 1, 0, *token_window(0, ADJACENT))
    copy_span(1, window, 1, window, 1, 1, (1, 1), False, 0, 0)


def token_window(token_start: int, runs: TokenRuns) -> tuple[int, int, int, int]:
    """The last four numbers of a window as `copy_span` takes them."""
    return (token_start, runs.run_tokens, runs.step_tokens, runs.skip_tokens)


class _HostSide:
    """One side as the compiled loops take it. Keeps the arrays alive whose addresses it holds."""

    def __init__(self, side: Side, geometry: CopyGeometry) -> None:
        self.rows: npt.NDArray[np.int64]
        self.block_ids: npt.NDArray[np.int32]
        if isinstance(side, PackedSide):
            self.rows = packed_rows(side, geometry)
            self.block_ids = np.zeros(1, np.int32)
            window = (geometry.num_tokens, 0, *token_window(0, ADJACENT))
        else:
            if not isinstance(side.block_ids, np.ndarray):
                raise RelayoutError("block ids of a copy on the CPU must be a numpy array")
            self.rows = side.table.rows[side.part_start :]
            self.block_ids = side.block_ids
            tokens = token_window(side.token_start, side.runs)
            window = (side.table.block_size, side.head_start, *tokens)
        self.arguments = (self.rows.ctypes.data, (self.block_ids.ctypes.data, *window))


def packed_rows(side: PackedSide, geometry: CopyGeometry) -> npt.NDArray[np.int64]:
    """A chunk as a part table: each part is one block, number 0, that holds every token of the copy."""
    part_stride, head_stride, token_stride, dim_stride = side.strides_bytes(geometry)
    rows = np.empty((geometry.num_parts, ROW_COLUMNS), np.int64)
    rows[:, 0] = side.address + part_stride * np.arange(geometry.num_parts, dtype=np.int64)
    rows[:, 1:] = (0, head_stride, token_stride, dim_stride)
    return rows


def _run_shares(arguments: tuple[Any, ...], geometry: CopyGeometry, num_threads: int) -> None:
    num_units = geometry.num_parts * geometry.num_tokens
    num_shares = min(num_threads, num_units, 1 + geometry.nbytes // _MIN_SHARE_BYTES)
    if num_shares == 1:
        copy_span(*arguments, 0, num_units)
        return
    bounds = [num_units * share // num_shares for share in range(num_shares + 1)]
    shares = [_Share((*arguments, *span)) for span in pairwise(bounds)]
    _threads.submit(shares[1:])
    shares[0].copy()
    # Never return while a helper still writes, not even when this thread was interrupted.
    for share in shares:
        share.is_ended.wait()
    errors = [share.error for share in shares if share.error is not None]
    if errors:
        raise errors[0]
