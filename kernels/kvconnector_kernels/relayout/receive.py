"""The three transforms of a received cache, by name. Each is a case of `relayout` that checks what it is called for.

They are for a consumer whose transport wrote the sender's blocks unchanged, into another pool or into the local one,
and for swapping to host memory with another layout (as `examples/minillm` does): kvconnector itself re-lays out while
it copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Unpack

from kvconnector_kernels.relayout.checks import GeometryMismatchError
from kvconnector_kernels.relayout.dispatch import relayout
from kvconnector_kernels.relayout.sides import CopyCounts, PackedSide, PagedSide, Side


@dataclass(frozen=True, slots=True)
class ReceiveTransform:
    """A copy between a received pool and the local one, which agree in block size, in element order, or in neither."""

    name: str
    same_block_size: bool
    same_order: bool

    def __call__(
        self,
        src: PagedSide,
        dst: PagedSide,
        *,
        scratch: PackedSide | None = None,
        **counts: Unpack[CopyCounts],
    ) -> None:
        """Copy as `relayout` does, in either direction: to larger or smaller blocks, HND to NHD or back.

        Args:
            src: The received blocks.
            dst: The local ones.
            scratch: Room for the whole copy, which then goes through it, so `src` and `dst` may be the same memory.
            **counts: See `CopyCounts`; tokens count from the first block on.

        Raises:
            GeometryMismatchError: Properties that this transform keeps differ, or one that it changes is equal.
            RelayoutError: See `relayout`.
        """
        self._check(src, dst)
        hops: list[Side] = [src, dst] if scratch is None else [src, scratch, dst]
        for source, destination in pairwise(hops):
            relayout(source, destination, **counts)

    def _check(self, src: PagedSide, dst: PagedSide) -> None:
        for what, received, local, same in (
            ("block size", src.table.block_size, dst.table.block_size, self.same_block_size),
            ("order", src.table.order, dst.table.order, self.same_order),
        ):
            if (received == local) != same:
                raise GeometryMismatchError(
                    f"{self.name} expects {'one' if same else 'another'} {what} on both sides: "
                    f"received {received}, local {local}"
                )


receive_block_size = ReceiveTransform("receive_block_size", same_block_size=False, same_order=True)
"""Blocks of another size, stored in the same order."""

receive_layout = ReceiveTransform("receive_layout", same_block_size=True, same_order=False)
"""Blocks of the same size, stored in another order: HND to NHD, NHD to HND, or from and to transposed."""

receive_block_size_and_layout = ReceiveTransform(
    "receive_block_size_and_layout", same_block_size=False, same_order=False
)
"""Blocks of another size and stored in another order, in one copy."""
