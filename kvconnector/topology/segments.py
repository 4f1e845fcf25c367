"""Segments: boxes of layers, heads and tokens that two ranks have in common."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnector.ids import Rank
from kvconnector.layout import ALL_TOKENS, Stripe, own_stripe
from kvconnector.layout.watermark import MAX_LAYERS
from kvconnector.topology.geometry import GroupGeometry

Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
ElementOrder = Annotated[str, Meta(pattern=r"\A(HND|NHD|HDN)\Z")]

MAX_SEGMENTS = 1 << 12
"""The most segments of a route. Each costs time in every read; real engines need one or a few per cache group."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """The common holding of two ranks in one part family of a cache group. A consumer's greeting lists its segments.

    `layers` are global indices, adjacent in both ranks' holdings; `[head_start, head_stop)` are global heads; `stripe`
    selects the tokens. A layer has `num_parts` parts (2 for K and V), and `head_token_bytes` is the size of one head of
    one token of a part in a message, which has the narrower elements if the two ranks' differ. `order` is the element
    order inside a chunk, which the rank that reads chooses.
    """

    group: Index
    family: Index
    layers: Annotated[tuple[Index, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    num_parts: Index
    head_start: Index
    head_stop: Index
    head_token_bytes: Index
    stripe: Stripe = ALL_TOKENS
    order: ElementOrder = "HND"

    @property
    def part_token_bytes(self) -> int:
        """Size in bytes of one token of one part of one layer."""
        return (self.head_stop - self.head_start) * self.head_token_bytes

    def rows_of(self, layers: range) -> range:
        """Return the (layer, part) pairs, numbered layer by layer, of our layers that are in the range."""
        first, stop = bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.stop)
        return range(first * self.num_parts, stop * self.num_parts)


@dataclass(frozen=True, slots=True)
class Target:
    """A remote rank to read from, and the segments to read."""

    rank: Rank
    segments: tuple[Segment, ...]


def differ(ours: GroupGeometry, theirs: GroupGeometry, segment: Segment) -> bool:
    """Return True if the blocks of two ranks hold different elements of a segment, or hold them in another order."""
    blocks = [
        (
            group.block_size,
            group.families[segment.family].head_range,
            own_stripe(group.context_parallel),
        )
        for group in (ours, theirs)
    ]
    orders = [
        {ours.parts[index].block_order, theirs.parts[index].block_order} - {""}
        for index in ours.families[segment.family].part_indices
    ]
    return blocks[0] != blocks[1] or any(len(stated) > 1 for stated in orders)
