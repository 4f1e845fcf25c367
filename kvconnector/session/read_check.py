"""A peer's read request, checked against the lease before anything is touched."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnector.errors import RemoteProtocolError
from kvconnector.layout import GroupBlocks, Stripe, Watermark, is_held
from kvconnector.planning import CHUNK_DTYPE
from kvconnector.topology import GroupGeometry, RankGeometry
from kvconnector.wire import messages as m

MAX_ROUTES = 256
MAX_ROUTE_SEGMENTS = 32
"""With more segments than that, each is looked at in every read."""
_CHUNK = struct.Struct("<5i")  # as `CHUNK_DTYPE`


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a segment that was accepted allows, whatever the request. A block id of its group stands for `block_tokens`
    tokens, `token_bytes` is one token of one row.
    """

    group: int
    block_tokens: int
    stripe: Stripe
    layers: tuple[int, ...]
    num_parts: int
    token_bytes: int

    def bounds(
        self, leased: Sequence[GroupBlocks], watermark: Watermark
    ) -> tuple[int, range, int, int, int]:
        """How many rows, and which tokens of the stripe, chunks can be read of; bytes of a row's token. And up to which
        rows and tokens in the newest step, whose first layers are there.
        """
        room = leased[self.group].token_range(self.block_tokens)
        tokens = self.stripe.members(range(room.start, min(room.stop, watermark.num_tokens)))
        ahead_rows = ahead_stop = 0
        if watermark.ahead_layers:
            ahead_rows = bisect_left(self.layers, watermark.ahead_layers) * self.num_parts
            ahead_stop = self.stripe.count_below(min(room.stop, watermark.ahead_tokens))
        num_rows = len(self.layers) * self.num_parts
        return num_rows, tokens, self.token_bytes, ahead_rows, ahead_stop


class ReadCheck:
    """The check for one worker. A consumer rank's reads have the same segments, which are looked at once."""

    def __init__(self, mine: RankGeometry, *, max_chunk_bytes: int) -> None:
        self._mine = mine
        self._max_chunk_bytes = max_chunk_bytes
        self._routes: dict[tuple[m.ReadSegment, ...], tuple[_Limits, ...]] = {}

    def check(
        self,
        read: m.Read,
        leased: Sequence[GroupBlocks],
        watermark: Watermark,
        *,
        is_streamed: bool = False,
    ) -> npt.NDArray[np.void]:
        """The chunks of a read, all of which stay inside the lease and the staging slots. One of a lease that
        `is_streamed` may leave its blocks to us.

        Raises:
            RemoteProtocolError: naming what is outside: a group, family, layer, head, part, token, block id, a token
                that another rank of our context parallel group holds, or a chunk that is larger than a slot.
        """
        if read.blocks or not is_streamed:
            _check_blocks(read.blocks, leased)
        route = self._routes.get(read.segments) or self._add_route(read.segments)
        records = decode_chunks(read.chunks)
        bounds = [limits.bounds(leased, watermark) for limits in route]
        # tens of chunks mostly: numpy would take longer to begin than Python takes for all of them
        for chunk in _CHUNK.iter_unpack(read.chunks):
            segment, row, num_rows, token, num_tokens = chunk
            if not 0 <= segment < len(bounds):
                raise RemoteProtocolError(
                    "a segment index is out of range", segment=segment, segments=len(bounds)
                )
            rows, tokens, token_bytes, ahead_rows, ahead_stop = bounds[segment]
            row_stop, token_stop = row + num_rows, token + num_tokens
            if (
                not 0 <= row < row_stop
                or not tokens.start <= token < token_stop
                or (
                    (row_stop > rows or token_stop > tokens.stop)
                    and (row_stop > ahead_rows or token_stop > ahead_stop)
                )
                or num_rows * num_tokens * token_bytes > self._max_chunk_bytes
            ):
                raise RemoteProtocolError(
                    "a chunk is outside the lease or larger than a staging slot",
                    record=chunk,
                    rows=rows,
                    tokens=(tokens.start, tokens.stop),
                    nbytes=num_rows * num_tokens * token_bytes,
                    max_chunk_bytes=self._max_chunk_bytes,
                )
        return records

    def _add_route(self, segments: tuple[m.ReadSegment, ...]) -> tuple[_Limits, ...]:
        if not segments:
            raise RemoteProtocolError("a read needs segments")
        route = tuple(_limits_of(segment, self._mine) for segment in segments)
        if len(segments) <= MAX_ROUTE_SEGMENTS:
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            self._routes[segments] = route
        return route


def decode_chunks(data: bytes) -> npt.NDArray[np.void]:
    """The chunks of a read, records of `CHUNK_DTYPE`.

    Raises:
        RemoteProtocolError: a length that is not a multiple of a record's, no record, or more than `MAX_CHUNKS`.
    """
    if not data or len(data) % CHUNK_DTYPE.itemsize:
        raise RemoteProtocolError(
            "the length of the chunks is not a multiple of a record's", nbytes=len(data)
        )
    records = np.frombuffer(data, dtype=CHUNK_DTYPE)
    if len(records) > m.MAX_CHUNKS:
        raise RemoteProtocolError("a read has too many chunks", chunks=len(records))
    return records


def _limits_of(segment: m.ReadSegment, mine: RankGeometry) -> _Limits:
    if segment.group >= len(mine.groups):
        raise RemoteProtocolError("no such cache group", group=segment.group, have=len(mine.groups))
    group = mine.groups[segment.group]
    if segment.family >= len(group.families):
        raise RemoteProtocolError(
            "no such part family", family=segment.family, have=len(group.families)
        )
    family = group.families[segment.family]
    if not family.head_start <= segment.head_start < segment.head_stop <= family.head_stop:
        raise RemoteProtocolError(
            "this rank does not hold these heads",
            heads=(segment.head_start, segment.head_stop),
            have=(family.head_start, family.head_stop),
        )
    if not is_held(segment.stripe, group.context_parallel):
        raise RemoteProtocolError(
            "this rank does not hold these tokens",
            stripe=segment.stripe,
            dcp_size=group.dcp_size,
            dcp_rank=group.dcp_rank,
            interleave_tokens=group.interleave_tokens,
        )
    first_row(segment, group)
    position = group.layers.index(segment.first_layer)
    return _Limits(
        group=segment.group,
        block_tokens=group.virtual_block_tokens,
        stripe=segment.stripe,
        layers=group.layers[position : position + segment.num_layers],
        num_parts=family.num_parts,
        token_bytes=(segment.head_stop - segment.head_start) * family.head_token_bytes,
    )


def first_row(segment: m.ReadSegment, group: GroupGeometry) -> int:
    """Row of the segment's first layer in the group's part table.

    Raises:
        RemoteProtocolError: this rank does not hold the layers.
    """
    layers = group.layers
    position = layers.index(segment.first_layer) if segment.first_layer in layers else len(layers)
    if segment.num_layers < 1 or position + segment.num_layers > len(layers):
        raise RemoteProtocolError(
            "this rank does not hold these layers",
            first_layer=segment.first_layer,
            num_layers=segment.num_layers,
            have=layers,
        )
    return position * group.families[segment.family].num_parts


def _check_blocks(asked: Sequence[GroupBlocks], leased: Sequence[GroupBlocks]) -> None:
    """The peer's idea of our blocks must be ours: it came through a router we do not control."""
    if len(asked) != len(leased):
        raise RemoteProtocolError(
            "a read names blocks for another number of cache groups",
            asked=len(asked),
            leased=len(leased),
        )
    for index, (theirs, ours) in enumerate(zip(asked, leased, strict=True)):
        if theirs != ours:
            raise RemoteProtocolError(
                "the read's block ids are not the leased ones",
                group=index,
                asked_bytes=len(theirs.wire_ids),
                leased_bytes=len(ours.wire_ids),
                asked_first=theirs.first_block,
                leased_first=ours.first_block,
            )
