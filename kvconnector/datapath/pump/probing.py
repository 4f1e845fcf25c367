"""How fast pools of another worker can be read: a few timed copies of some blocks into memory of nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pools import Pools
from kvconnector.errors import TransportError
from kvconnector.planning.cost import PathCost, Probe
from kvconnector_kernels.relayout import PartTable
from kvconnector_kernels.relayout.sides import ROW_COLUMNS

MIN_ROUNDS, MAX_ROUNDS, PROBE_S = 3, 100, 15e-3
"""All copies of a probe are repeated in turn for so long, and the fastest of each counts: what disturbs a copy only
makes it longer. On a machine with more threads than cores some of many short copies are left alone; few long ones are
not. In turn, so that a disturbance which lasts does not meet one kind of copy alone."""
MAX_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TestCopy:
    """The first `num_tokens` of `src_ids` of one table, all heads that both have, to blocks of `dst`."""

    src: PartTable
    src_ids: npt.NDArray[np.int32]
    dst: PartTable
    dst_ids: npt.NDArray[np.int32]
    num_heads: int
    num_tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return self.num_heads * self.num_tokens * self.src.head_dim * self.src.item_size_bytes


def probe_cost(
    remote: RemotePools,
    pools: Pools,
    *,
    max_bytes: int,
    allocate: Callable[[int], tuple[int, object]],
    seconds_of: Callable[[TestCopy], float],
) -> PathCost:
    """What reading a producer's pools costs, by copies of at most `max_bytes` from one part into memory of
    `allocate(nbytes)`, its address and owner, which is laid out like our own pool. `seconds_of` makes a copy and times
    it.

    Raises:
        TransportError: no table is in both pools, or a block of ours spans more than `MAX_SCRATCH_BYTES`.
    """
    src, ours = _largest(remote.tables, pools)
    return _probe(src, ours, max_bytes=max_bytes, allocate=allocate, seconds_of=seconds_of)


def probe_like_cost(
    pools: Pools,
    *,
    max_bytes: int,
    allocate: Callable[[int], tuple[int, object]],
    seconds_of: Callable[[TestCopy], float],
) -> PathCost:
    """The same of pools that are like our own, before there is a producer: what is read is of `allocate`, too.

    Raises:
        TransportError: there is no table, or a block spans more than `MAX_SCRATCH_BYTES`.
    """
    _, ours = _largest(pools.tables, pools)
    block_bytes = ours.block_size * ours.num_heads * ours.head_dim * ours.item_size_bytes
    num_blocks = max(1, min(ours.num_blocks, max_bytes // block_bytes))
    src, owner = _scratch_like(ours, num_blocks, allocate)
    cost = _probe(src, ours, max_bytes=max_bytes, allocate=allocate, seconds_of=seconds_of)
    del owner  # until here
    return cost


def _probe(
    src: PartTable,
    ours: PartTable,
    *,
    max_bytes: int,
    allocate: Callable[[int], tuple[int, object]],
    seconds_of: Callable[[TestCopy], float],
) -> PathCost:
    num_heads = min(src.num_heads, ours.num_heads)
    block_bytes = src.block_size * num_heads * src.head_dim * src.item_size_bytes
    num_blocks = max(1, min(src.num_blocks, max_bytes // block_bytes))
    num_tokens = num_blocks * src.block_size
    dst_blocks = -(-num_tokens // ours.block_size)
    dst, owner = _scratch_like(ours, dst_blocks, allocate)
    dst_ids = np.arange(dst_blocks, dtype=np.int32)
    ordered = np.arange(num_blocks, dtype=np.int32)
    # no block follows the one that is before it in memory
    scattered = np.concatenate([ordered[::2], ordered[1::2]])

    copies = [
        TestCopy(src, ids, dst, dst_ids, num_heads, tokens)
        for ids, tokens in ((ordered, 1), (ordered, num_tokens), (scattered, num_tokens))
    ]
    found = fastest([partial(seconds_of, copy) for copy in copies])
    del owner  # until here
    smallest, longest, scattered_ones = (
        Probe(copy.nbytes, num_runs, seconds)
        for copy, num_runs, seconds in zip(copies, (1, 1, num_blocks), found, strict=True)
    )
    return PathCost.fit(smallest, longest, scattered_ones)


def fastest(measures: Sequence[Callable[[], float]]) -> list[float]:
    """The least of repeated measurements of each kind, in seconds."""
    rounds: list[list[float]] = []
    while len(rounds) < MIN_ROUNDS or (
        len(rounds) < MAX_ROUNDS and sum(map(sum, rounds)) < PROBE_S
    ):
        rounds.append([measure() for measure in measures])
    return [min(found) for found in zip(*rounds, strict=True)]


def _largest(
    theirs: Mapping[tuple[int, int], PartTable], pools: Pools
) -> tuple[PartTable, PartTable]:
    """The table with most bytes, there and here."""
    keys = theirs.keys() & pools.tables.keys()
    if not keys:
        raise TransportError("there is no part table that is in our pools, too")
    key = max(sorted(keys), key=lambda key: theirs[key].num_parts * _bytes_of(pools, key))
    return theirs[key], pools.tables[key]


def _bytes_of(pools: Pools, key: tuple[int, int]) -> int:
    table = pools.tables[key]
    return table.num_heads * table.head_dim * table.item_size_bytes


def _span_bytes(table: PartTable) -> int:
    """From a block's first to its last byte, in the part that is stored most widely."""
    counts = np.array([table.num_heads, table.block_size, table.head_dim]) - 1
    return int((table.rows[:, 2:] * counts).sum(axis=1).max()) + table.item_size_bytes


def _scratch_like(
    like: PartTable, num_blocks: int, allocate: Callable[[int], tuple[int, object]]
) -> tuple[PartTable, object]:
    """A table of one part in memory of its own, and the memory's owner."""
    block_stride = _span_bytes(like)
    if num_blocks * block_stride > MAX_SCRATCH_BYTES:
        raise TransportError(
            "our blocks span too much memory for a probe",
            blocks=num_blocks,
            span_bytes=block_stride,
        )
    address, owner = allocate(num_blocks * block_stride)
    rows = np.empty((1, ROW_COLUMNS), np.int64)
    rows[0] = (address, block_stride, *like.rows[0, 2:])
    table = PartTable(
        rows,
        num_blocks=num_blocks,
        block_size=like.block_size,
        num_heads=like.num_heads,
        head_dim=like.head_dim,
        item_size_bytes=like.item_size_bytes,
        device=like.device,
    )
    return table, owner
