"""A rank's part of swapping and of copy on write: whole blocks between its pools, one launch a move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from minillm.messages import BlockMove, MoveKind
from minillm.paged_cache import PagedCache

if TYPE_CHECKING:
    from kvconnector.cache.host_copy import Direction, KVPool
    from kvconnector.layout import KVView


class BlockMover:
    """Copies blocks between a rank's pools and their counterparts in host memory, if there are any."""

    def __init__(self, cache: PagedCache, host: PagedCache | None) -> None:
        self._cache = cache
        self._host = host
        self._pools: dict[tuple[int, bool], list[KVPool]] = {}

    def run(self, moves: Sequence[BlockMove]) -> None:
        """Carry the moves out in their order. On a GPU they are in its stream on return, not done."""
        # imported here so that a rank that never moves a block starts without the copy kernels
        from kvconnector.cache.block_manager import split_dependent_copies

        for (pool, kind), same in groupby(moves, key=lambda move: (move.pool, move.kind)):
            batches = [move.pairs for move in same]
            if kind == "copy":
                # inside one pool a copy may write what an earlier one still reads
                batches = split_dependent_copies(pair for pairs in batches for pair in pairs)
            for pairs in batches:
                self._copy(pool, kind, pairs)

    def _copy(self, pool: int, kind: MoveKind, pairs: Sequence[tuple[int, int]]) -> None:
        from kvconnector.cache.host_copy import copy_kv_blocks

        sources = self._parts(pool, on_host=kind == "in")
        targets = self._parts(pool, on_host=kind == "out")
        direction = self._direction(kind)
        for source, target in zip(sources, targets, strict=True):
            ids = list(zip(*pairs, strict=True))
            copy_kv_blocks(source, target, ids[0], ids[1], direction)

    def _direction(self, kind: MoveKind) -> Direction:
        if self._cache.device == "cpu":
            return "h2h"
        directions: dict[MoveKind, Direction] = {"out": "d2h", "in": "h2d", "copy": "d2d"}
        return directions[kind]

    def _parts(self, pool: int, *, on_host: bool) -> list[KVPool]:
        """What a pool's blocks hold on one side, together for all parts of one shape."""
        from kvconnector.cache.host_copy import KVPool

        cache = self._host if on_host else self._cache
        if cache is None:
            raise ValueError("blocks are swapped in an engine without host blocks")
        if (pool, on_host) not in self._pools:
            self._pools[pool, on_host] = [
                KVPool(views, cache.device) for views in _views_by_shape(cache, pool)
            ]
        return self._pools[pool, on_host]


def _views_by_shape(cache: PagedCache, pool: int) -> Iterator[list[KVView]]:
    by_shape: dict[tuple[int, ...], dict[KVView, None]] = {}
    for name, group in cache.group_of.items():
        if cache.groups[group].pool == pool:
            for view in cache.views[name]:
                # layers of different groups that share a tensor are one part
                by_shape.setdefault(view.shape[1:], {})[view] = None
    for views in by_shape.values():
        yield list(views)
