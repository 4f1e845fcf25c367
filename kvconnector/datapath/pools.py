"""The registered caches of one worker: validated views, and the part tables that the kernels read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvconnector.errors import BlockIdError, GeometryError
from kvconnector.layout import KVView, memory_orders, part_table
from kvconnector.planning import GroupBlocks
from kvconnector.topology import GroupGeometry
from kvconnector_kernels.relayout import GeometryMismatchError, PartTable

NO_POOL = 1 << 31
"""`num_blocks` of a group without layers on this rank: its block ids mean nothing here, so any are accepted."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cache group of this worker: its geometry, and for every layer one view per part, in the geometry's order.

    The views are on `device`, "cpu" or "cuda:N". `dtype` is the type of the elements, where the engine states it.
    `memory` owns the bytes, where the owner is known: code that uses the views holds it.
    """

    geometry: GroupGeometry
    views: Mapping[int, Sequence[KVView]]
    device: str = "cpu"
    dtype: str = ""
    memory: Sequence[object] = ()


class Pools:
    """Part tables by (group, family), made once, at registration. The geometries of `groups` get the order in which
    their views lie in memory. Raises GeometryError: layers or parts are missing, or a view's shape is not its
    geometry's.
    """

    def __init__(self, groups: Sequence[CacheGroup], device: str) -> None:
        self.device = device
        self.groups = tuple(_checked(index, group) for index, group in enumerate(groups))
        self.tables: dict[tuple[int, int], PartTable] = {}
        self.num_blocks: list[int] = []
        for index, group in enumerate(self.groups):
            pools = {view.num_blocks for views in group.views.values() for view in views}
            if len(pools) > 1:
                raise GeometryError(
                    "all views of a group must have the same number of blocks",
                    group=index,
                    found=pools,
                )
            self.num_blocks.append(pools.pop() if pools else NO_POOL)
            if group.geometry.layers:
                self._add_tables(index, group)

    @property
    def largest_row_bytes(self) -> int:
        """The largest number of bytes that a part has for one token or one state. A chunk must hold at least this
        number.
        """
        parts = (part for group in self.groups for part in group.geometry.parts)
        return max((part.token_bytes for part in parts), default=0)

    def _add_tables(self, index: int, group: CacheGroup) -> None:
        for family_index, family in enumerate(group.geometry.families):
            views = [
                group.views[layer][part]
                for layer in group.geometry.layers
                for part in family.part_indices
            ]
            self.tables[index, family_index] = PartTable(
                part_table(views),
                num_blocks=views[0].num_blocks,
                block_size=views[0].block_size,
                num_heads=views[0].num_heads,
                head_dim=views[0].head_dim,
                item_size_bytes=views[0].item_size_bytes,
                device=self.device,
            )

    def ranges(self) -> list[tuple[int, int]]:
        """Return the `(start, stop)` addresses of every part."""
        found = []
        for table in self.tables.values():
            counts = (table.num_blocks, table.num_heads, table.block_size, table.head_dim)
            for start, *strides in table.rows.tolist():
                last = sum(s * (n - 1) for s, n in zip(strides, counts, strict=True))
                found.append((start, start + last + table.item_size_bytes))
        return found

    def element_orders(self) -> dict[tuple[int, int], str]:
        """Return the element order in which each table is read and written fastest."""
        return {key: _order_of(table) for key, table in self.tables.items()}

    def check_blocks(self, blocks: Sequence[GroupBlocks], what: str) -> None:
        """Raise BlockIdError if `blocks` has another number of groups, or an id outside the pool."""
        if len(blocks) != len(self.groups):
            raise BlockIdError(
                f"{what} name a different number of cache groups",
                given=len(blocks),
                groups=len(self.groups),
            )
        for index, (group, limit) in enumerate(zip(blocks, self.num_blocks, strict=True)):
            if group.highest_id() >= limit:
                ids = group.block_ids
                raise BlockIdError(
                    f"{what} are outside the pool",
                    group=index,
                    lowest=int(ids.min()),
                    highest=int(ids.max()),
                    num_blocks=limit,
                )


def _order_of(table: PartTable) -> str:
    try:
        return str(table.order)
    except GeometryMismatchError:
        return "HND"  # parts differ, as with transposed K: then one of them has to be transposed anyway


def _checked(index: int, group: CacheGroup) -> CacheGroup:
    """Return the group with the memory order of its views in its geometry."""
    geometry = group.geometry
    if set(group.views) != set(geometry.layers):
        raise GeometryError(
            "a cache group must register exactly the layers of its geometry",
            group=index,
            registered=sorted(group.views),
            geometry=geometry.layers,
        )
    for layer, views in group.views.items():
        if len(views) != len(geometry.parts):
            raise GeometryError(
                "a layer must register one view per part",
                group=index,
                layer=layer,
                views=len(views),
                parts=[part.name for part in geometry.parts],
            )
        for part, view in zip(geometry.parts, views, strict=True):
            expected = (part.num_heads, geometry.block_size, part.head_dim, part.item_size_bytes)
            found = (view.num_heads, view.block_size, view.head_dim, view.item_size_bytes)
            if expected != found:
                raise GeometryError(
                    "a view must have its part's heads, block size, head dim and item size",
                    group=index,
                    layer=layer,
                    part=part.name,
                    expected=expected,
                    found=found,
                )
    if not geometry.layers:
        return group
    parts = tuple(
        msgspec.structs.replace(part, memory_order=order)
        for part, order in zip(geometry.parts, memory_orders(group.views), strict=True)
    )
    return replace(group, geometry=msgspec.structs.replace(geometry, parts=parts))
