"""The three transforms of a received cache, by name. Each is a case of `relayout` that checks what it is called for.

They take the arguments of `relayout` and work in both directions: to larger or smaller blocks, HND to NHD or back.
With `scratch` the copy goes through that chunk, so that source and destination may be the same memory: bytes that
landed in the local pool as the sender stored them are put in order where they are.
"""

from __future__ import annotations

from itertools import pairwise

from kvconnector_kernels.relayout.dispatch import relayout
from kvconnector_kernels.relayout.errors import GeometryMismatchError
from kvconnector_kernels.relayout.sides import PackedSide, PagedSide, Side


def receive_block_size(
    src: PagedSide,
    dst: PagedSide,
    *,
    num_parts: int,
    num_heads: int,
    num_tokens: int,
    max_programs: int | None = None,
    scratch: PackedSide | None = None,
) -> None:
    """Blocks of another size, stored in the same order.

    Raises:
        GeometryMismatchError: the block sizes are equal, or the orders differ. RelayoutError: see `relayout`.
    """
    _expect(src, dst, same_block_size=False, same_order=True)
    _receive(src, dst, num_parts, num_heads, num_tokens, max_programs, scratch)


def receive_layout(
    src: PagedSide,
    dst: PagedSide,
    *,
    num_parts: int,
    num_heads: int,
    num_tokens: int,
    max_programs: int | None = None,
    scratch: PackedSide | None = None,
) -> None:
    """Blocks of the same size, stored in another order (HND to NHD, NHD to HND, or from and to transposed).

    Raises:
        GeometryMismatchError: the block sizes differ, or the orders are equal. RelayoutError: see `relayout`.
    """
    _expect(src, dst, same_block_size=True, same_order=False)
    _receive(src, dst, num_parts, num_heads, num_tokens, max_programs, scratch)


def receive_block_size_and_layout(
    src: PagedSide,
    dst: PagedSide,
    *,
    num_parts: int,
    num_heads: int,
    num_tokens: int,
    max_programs: int | None = None,
    scratch: PackedSide | None = None,
) -> None:
    """Blocks of another size and stored in another order, in one copy.

    Raises:
        GeometryMismatchError: the block sizes or the orders are equal. RelayoutError: see `relayout`.
    """
    _expect(src, dst, same_block_size=False, same_order=False)
    _receive(src, dst, num_parts, num_heads, num_tokens, max_programs, scratch)


def _expect(src: PagedSide, dst: PagedSide, *, same_block_size: bool, same_order: bool) -> None:
    for what, received, local, same in (
        ("block size", src.table.block_size, dst.table.block_size, same_block_size),
        ("order", src.table.order, dst.table.order, same_order),
    ):
        if (received == local) != same:
            raise GeometryMismatchError(
                f"this transform expects {'one' if same else 'another'} {what} on both sides: "
                f"received {received}, local {local}"
            )


def _receive(
    src: PagedSide,
    dst: PagedSide,
    num_parts: int,
    num_heads: int,
    num_tokens: int,
    max_programs: int | None,
    scratch: PackedSide | None,
) -> None:
    hops: list[Side] = [src, dst] if scratch is None else [src, scratch, dst]
    for source, destination in pairwise(hops):
        relayout(
            source,
            destination,
            num_parts=num_parts,
            num_heads=num_heads,
            num_tokens=num_tokens,
            max_programs=max_programs,
        )
