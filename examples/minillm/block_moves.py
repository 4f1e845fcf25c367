"""A rank's part of swapping and of copy on write: whole blocks between its pools, one launch per move.

In host memory blocks may be smaller than on the device, or stored in another order. The transform for that difference
then lays them out anew during the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from minillm.messages import BlockMove, MoveKind
from minillm.paged_cache import PagedCache

if TYPE_CHECKING:
    from kvconnector.cache.host_copy import Direction, KVPool
    from kvconnector.layout import KVView
    from kvconnector_kernels.relayout.receive import ReceiveTransform

IdArray: TypeAlias = npt.NDArray[np.int32]
NO_IDS = np.empty(0, np.int32)


class BlockMover:
    """Copies blocks between a rank's pools and their counterparts in host memory, if there are any."""

    def __init__(self, cache: PagedCache, host: PagedCache | None) -> None:
        self._cache = cache
        self.host = host
        self._pools: dict[tuple[int, bool], list[KVPool]] = {}
        self._transforms: dict[tuple[KVPool, KVPool], ReceiveTransform | None] = {}

    def run(self, moves: Sequence[BlockMove]) -> None:
        """Carry out the moves in their order. On a GPU they are queued on its stream on return, not done."""
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
        source_ids, target_ids = zip(*pairs, strict=True)
        for source, target in zip(sources, targets, strict=True):
            if (source, target) not in self._transforms:
                found = transform_between(source, target, self._cache.device)
                self._transforms[source, target] = found
            if (transform := self._transforms[source, target]) is None:
                copy_kv_blocks(source, target, source_ids, target_ids, direction)
                continue
            size = max(source.view.block_size, target.view.block_size)
            transform(
                source.side(_stored_ids(source_ids, source, size), self._cache.device),
                target.side(_stored_ids(target_ids, target, size), self._cache.device),
                num_parts=source.token_shape[0],
                num_heads=source.view.num_heads,
                num_tokens=len(pairs) * size,
            )

    def _direction(self, kind: MoveKind) -> Direction:
        if self._cache.device == "cpu":
            return "h2h"
        directions: dict[MoveKind, Direction] = {"out": "d2h", "in": "h2d", "copy": "d2d"}
        return directions[kind]

    def _parts(self, pool: int, *, on_host: bool) -> list[KVPool]:
        """Return a pool's parts on the device or the host, grouped by shape."""
        from kvconnector.cache.host_copy import KVPool

        cache = self.host if on_host else self._cache
        if cache is None:
            raise ValueError("blocks are swapped in an engine without host blocks")
        if (pool, on_host) not in self._pools:
            self._pools[pool, on_host] = [
                KVPool(views, cache.device) for views in _views_by_shape(cache, pool)
            ]
        return self._pools[pool, on_host]


def transform_between(source: KVPool, target: KVPool, device: str) -> ReceiveTransform | None:
    """Return the transform from one pool's blocks to another's layout; None if they have the same size and order."""
    from kvconnector_kernels.relayout import (
        receive_block_size,
        receive_block_size_and_layout,
        receive_layout,
    )

    forms = [(pool.view.shape[1:], pool.view.strides_bytes[1:]) for pool in (source, target)]
    if forms[0] == forms[1]:
        return None  # and the parts of one pool may differ in their order
    received, local = (pool.side(NO_IDS, device).table for pool in (source, target))
    transforms = {
        (False, True): receive_block_size,
        (True, False): receive_layout,
        (False, False): receive_block_size_and_layout,
    }
    is_same = (received.block_size == local.block_size, received.order == local.order)
    return transforms.get(is_same)


def _stored_ids(block_ids: Sequence[int], pool: KVPool, block_size: int) -> IdArray:
    """Return the pool's own blocks that hold blocks of `block_size` tokens, one after another."""
    ratio = block_size // pool.view.block_size
    stored: IdArray = np.add.outer(np.asarray(block_ids) * ratio, np.arange(ratio)).astype(np.int32)
    return stored.reshape(-1)


def _views_by_shape(cache: PagedCache, pool: int) -> Iterator[list[KVView]]:
    by_shape: dict[tuple[int, ...], dict[KVView, None]] = {}
    for name, group in cache.group_of.items():
        if cache.groups[group].pool == pool:
            for view in cache.views[name]:
                # layers of different groups that share a tensor are one part
                by_shape.setdefault(view.shape[1:], {})[view] = None
    for views in by_shape.values():
        yield list(views)
