"""Which memory of two pools holds a read in the same order: runs that can be copied without looking inside them. Pure.

Legend: a *box* is `[head, token, dim]` of tokens that follow each other in one block on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnector.errors import LocalError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One side of a read: `rows` int64 `[num_parts, 5]` (address and block, head, token and dim strides in bytes),
    heads from `head_start`, and the `positions` of its tokens in `block_ids`, which rise.
    """

    rows: Int64s
    block_ids: npt.NDArray[np.integer]
    block_size: int
    head_start: int
    positions: Int64s


def common_runs(
    there: Window,
    here: Window,
    *,
    num_heads: int,
    head_dim: int,
    item_bytes: int,
    max_runs: int,
) -> Int64s:
    """The runs of a read, int64 `[num_runs, 3]`: address there and here, bytes. As long as possible, by rising address
    there. Where the two sides store tokens in another order, a run is an element.

    Raises:
        LocalError: before they are joined, there are more than `max_runs`.
    """
    firsts, lengths = _boxes(there, here)
    pieces: list[Int64s] = []
    num_pieces = 0
    for parts, (src, dst) in _alike(there.rows, here.rows):
        for length in np.unique(lengths).tolist():
            level = _Level(src[1:], dst[1:], (num_heads, length, head_dim), item_bytes)
            begins = firsts[lengths == length]
            num_pieces += len(parts) * len(begins) * level.num_runs
            if num_pieces > max_runs:
                raise LocalError("a read is in too many runs", at_least=num_pieces, most=max_runs)
            pieces.append(
                np.stack(
                    [
                        _addresses(there, parts, src, begins, level.offsets_there),
                        _addresses(here, parts, dst, begins, level.offsets_here),
                        np.full(len(parts) * len(begins) * level.num_runs, level.run_bytes),
                    ],
                    axis=1,
                )
            )
    return _joined(np.concatenate(pieces))


def _boxes(there: Window, here: Window) -> tuple[Int64s, Int64s]:
    """The first token of each box, and how many it has."""
    is_first = np.zeros(len(there.positions), bool)
    is_first[0] = True
    for side in (there, here):
        is_first[1:] |= np.diff(side.positions) != 1
        is_first |= side.positions % side.block_size == 0
    firsts: Int64s = np.flatnonzero(is_first).astype(np.int64)
    return firsts, np.diff(firsts, append=len(is_first)).astype(np.int64)


def _alike(there: Int64s, here: Int64s) -> list[tuple[Int64s, tuple[list[int], list[int]]]]:
    """The parts whose strides are the same, and these: block, head, token and dim of both sides."""
    strides = np.concatenate([there[:, 1:], here[:, 1:]], axis=1)
    kinds, kind_of = np.unique(strides, axis=0, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    return [
        (np.flatnonzero(kind_of == index), (kind[:4].tolist(), kind[4:].tolist()))
        for index, kind in enumerate(kinds)
    ]


class _Level:
    """The runs of a box: the innermost axes that lie alike and without gaps on both sides are one run's."""

    def __init__(
        self, src: list[int], dst: list[int], counts: tuple[int, int, int], item_bytes: int
    ) -> None:
        self.run_bytes = item_bytes
        axes = sorted((axis for axis in range(3) if counts[axis] > 1), key=src.__getitem__)
        while axes and src[axes[0]] == dst[axes[0]] == self.run_bytes:
            self.run_bytes *= counts[axes.pop(0)]
        self.offsets_there = _offsets(src, counts, axes)
        self.offsets_here = _offsets(dst, counts, axes)

    @property
    def num_runs(self) -> int:
        """In one box."""
        return len(self.offsets_there)


def _offsets(strides: list[int], counts: tuple[int, int, int], axes: list[int]) -> Int64s:
    found = np.zeros(1, np.int64)
    for axis in axes:
        steps = np.arange(counts[axis], dtype=np.int64) * strides[axis]
        found = (found[:, None] + steps).reshape(-1)
    return found


def _addresses(
    side: Window, parts: Int64s, strides: list[int], begins: Int64s, offsets: Int64s
) -> Int64s:
    block, head, token, _ = strides
    positions = side.positions[begins]
    ids = side.block_ids[positions // side.block_size].astype(np.int64)
    boxes = ids * block + positions % side.block_size * token + side.head_start * head
    bases = side.rows[parts, 0]
    found: Int64s = (bases[:, None, None] + boxes[:, None] + offsets).reshape(-1)
    return found


def _joined(pieces: Int64s) -> Int64s:
    """The same memory, runs that follow each other on both sides made one."""
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    steps = np.diff(pieces[:, :2], axis=0)
    is_first = np.ones(len(pieces), bool)
    is_first[1:] = (steps != pieces[:-1, 2:]).any(axis=1)
    firsts = np.flatnonzero(is_first)
    joined: Int64s = pieces[firsts]
    joined[:, 2] = np.add.reduceat(pieces[:, 2], firsts)
    return joined
