"""A peer's read request, checked against the lease before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnector.errors import RemoteProtocolError
from kvconnector.planning import CHUNK_DTYPE, GroupBlocks
from kvconnector.topology import GroupGeometry, RankGeometry, Stripe
from kvconnector.topology.stripes import is_held
from kvconnector.wire import messages as m

MAX_ROUTES = 256
MAX_ROUTE_SEGMENTS = 32
"""With more segments than that, each is looked at in every read."""
# Fields of `CHUNK_DTYPE`: the segment, then parts and tokens, of each the first and the number.
_STARTS, _COUNTS, _NUM_FIELDS = slice(1, None, 2), slice(2, None, 2), 5


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a checked segment allows, whatever the request. A block id of its group stands for `block_tokens`."""

    group: int
    block_tokens: int
    stripe: Stripe
    num_rows: int
    bytes_per_token: int

    def allow(self, chunks: npt.NDArray[np.int64], tokens: range, *, max_chunk_bytes: int) -> bool:
        """Whether all chunks, one a column, read these tokens only, and none is too large. May deny what is right."""
        _, part_start, num_parts, token_start, num_tokens = np.minimum.reduce(chunks, 1).tolist()
        _, _, max_parts, _, max_tokens = np.maximum.reduce(chunks, 1).tolist()
        stops = chunks[_STARTS] + chunks[_COUNTS]
        part_stop, token_stop = np.maximum.reduce(stops, 1).tolist()
        return bool(
            part_start >= 0
            and num_parts >= 1
            and part_stop <= self.num_rows
            and token_start >= tokens.start
            and num_tokens >= 1
            and token_stop <= tokens.stop
            and max_parts * max_tokens * self.bytes_per_token <= max_chunk_bytes
        )


class ReadCheck:
    """`check_read` for one worker, quick where a read is right: a consumer rank asks for the same segments in each of
    its reads, so these are looked at once, and only a read that seems wrong is looked at piece by piece.
    """

    def __init__(self, mine: RankGeometry, *, max_chunk_bytes: int) -> None:
        self._mine = mine
        self._max_chunk_bytes = max_chunk_bytes
        self._routes: dict[tuple[m.ReadSegment, ...], tuple[_Limits, ...]] = {}

    def check(self, read: m.Read, leased: Sequence[GroupBlocks], num_tokens: int) -> None:
        """Accept a read that stays inside the lease and the staging slots.

        Raises:
            RemoteProtocolError: see `check_read`.
        """
        route = self._routes.get(read.segments)
        if (
            route is not None
            and _are_leased(read.blocks, leased)
            and self._are_allowed(read.chunks, route, leased, num_tokens)
        ):
            return
        check_read(read, self._mine, leased, num_tokens, max_chunk_bytes=self._max_chunk_bytes)
        if route is None and len(read.segments) <= MAX_ROUTE_SEGMENTS:
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            self._routes[read.segments] = self._route_of(read.segments)

    def _route_of(self, segments: tuple[m.ReadSegment, ...]) -> tuple[_Limits, ...]:
        """Of segments that were accepted."""
        limits = []
        for segment in segments:
            group = self._mine.groups[segment.group]
            sizes = _sizes(segment, group)
            block_tokens = group.virtual_block_tokens
            limits.append(_Limits(segment.group, block_tokens, segment.stripe, *sizes))
        return tuple(limits)

    def _are_allowed(
        self,
        data: bytes,
        route: tuple[_Limits, ...],
        leased: Sequence[GroupBlocks],
        num_tokens: int,
    ) -> bool:
        """Whether all chunks are inside, as `check_read` says. May deny what is right."""
        count, rest = divmod(len(data), CHUNK_DTYPE.itemsize)
        if rest or not 0 < count <= m.MAX_CHUNKS:
            return False
        records = np.frombuffer(data, "<i4").reshape(-1, _NUM_FIELDS)
        chunks = records.T.astype(np.int64, order="C")
        for index, limits in enumerate(route):
            is_mine = chunks[0] == index
            mine = chunks if is_mine.all() else chunks[:, is_mine]
            count -= mine.shape[1]
            tokens = _members(limits.stripe, leased[limits.group], limits.block_tokens, num_tokens)
            if mine.size and not limits.allow(mine, tokens, max_chunk_bytes=self._max_chunk_bytes):
                return False
        return count == 0  # none of another segment


def _are_leased(asked: Sequence[m.ReadBlocks], leased: Sequence[GroupBlocks]) -> bool:
    return len(asked) == len(leased) and all(
        theirs.first_block == ours.first_block
        and theirs.block_ids == ours.block_ids.astype("<i4", copy=False).tobytes()
        for theirs, ours in zip(asked, leased, strict=True)
    )


def decode_chunks(data: bytes) -> npt.NDArray[np.void]:
    """The chunk records of a read.

    Raises:
        RemoteProtocolError: not a whole number of records, none, or more than `MAX_CHUNKS`.
    """
    if not data or len(data) % CHUNK_DTYPE.itemsize:
        raise RemoteProtocolError("chunks are no whole number of records", nbytes=len(data))
    chunks = np.frombuffer(data, dtype=CHUNK_DTYPE)
    if len(chunks) > m.MAX_CHUNKS:
        raise RemoteProtocolError("a read has too many chunks", chunks=len(chunks))
    return chunks


def check_read(
    read: m.Read,
    mine: RankGeometry,
    leased: Sequence[GroupBlocks],
    num_tokens: int,
    *,
    max_chunk_bytes: int,
) -> None:
    """Accept a read that stays inside the lease and the staging slots.

    Raises:
        RemoteProtocolError: naming what is outside: a group, family, layer, head, part, token, block id, a token that
            another rank of our context parallel group holds, or a chunk that is larger than a slot.
    """
    _check_blocks(read.blocks, leased)
    if not read.segments:
        raise RemoteProtocolError("a read needs segments")
    for segment in read.segments:
        _check_segment(segment, mine)
    chunks = decode_chunks(read.chunks)
    _check_range("segment", chunks["segment"], 0, len(read.segments))
    rows, bytes_per_token, token_start, token_stop = (
        np.array(column, dtype=np.int64)
        for column in zip(
            *(_segment_limits(s, mine, leased, num_tokens) for s in read.segments), strict=True
        )
    )
    of = chunks["segment"]
    part_stop = chunks["part_start"].astype(np.int64) + chunks["num_parts"]
    stop = chunks["token_start"].astype(np.int64) + chunks["num_tokens"]
    nbytes = chunks["num_parts"].astype(np.int64) * chunks["num_tokens"] * bytes_per_token[of]
    inside = (
        (chunks["part_start"] >= 0)
        & (chunks["num_parts"] >= 1)
        & (part_stop <= rows[of])
        & (chunks["num_tokens"] >= 1)
        & (chunks["token_start"] >= token_start[of])
        & (stop <= token_stop[of])
        & (nbytes <= max_chunk_bytes)
    )
    if not inside.all():
        worst = int(np.flatnonzero(~inside)[0])
        raise RemoteProtocolError(
            "a chunk is outside the lease or larger than a staging slot",
            chunk=worst,
            record=chunks[worst].tolist(),
            rows=int(rows[of[worst]]),
            tokens=(int(token_start[of[worst]]), int(token_stop[of[worst]])),
            nbytes=int(nbytes[worst]),
            max_chunk_bytes=max_chunk_bytes,
        )


def _segment_limits(
    segment: m.ReadSegment, mine: RankGeometry, leased: Sequence[GroupBlocks], num_tokens: int
) -> tuple[int, int, int, int]:
    """Rows, bytes of one token of one row, and which tokens of its stripe a checked segment can read."""
    group = mine.groups[segment.group]
    blocks, block_tokens = leased[segment.group], group.virtual_block_tokens
    members = _members(segment.stripe, blocks, block_tokens, num_tokens)
    return (*_sizes(segment, group), members.start, members.stop)


def _sizes(segment: m.ReadSegment, group: GroupGeometry) -> tuple[int, int]:
    """Rows of a checked segment, and bytes of one token of one row."""
    family = group.families[segment.family]
    num_heads = segment.head_stop - segment.head_start
    return segment.num_layers * family.num_parts, num_heads * family.head_token_bytes


def _members(stripe: Stripe, blocks: GroupBlocks, block_tokens: int, num_tokens: int) -> range:
    """Which tokens of a stripe can be read."""
    room = blocks.token_range(block_tokens)
    return stripe.members(range(room.start, min(room.stop, num_tokens)))


def _check_segment(segment: m.ReadSegment, mine: RankGeometry) -> None:
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


def first_row(segment: m.ReadSegment, group: GroupGeometry) -> int:
    """Row of the segment's first layer in the group's part table.

    Raises:
        RemoteProtocolError: this rank does not hold the layers.
    """
    if segment.first_layer not in group.layers or segment.num_layers < 1:
        raise RemoteProtocolError(
            "this rank does not hold these layers",
            first_layer=segment.first_layer,
            have=group.layers,
        )
    position = group.layers.index(segment.first_layer)
    if position + segment.num_layers > len(group.layers):
        raise RemoteProtocolError(
            "this rank does not hold these layers",
            first_layer=segment.first_layer,
            num_layers=segment.num_layers,
            have=group.layers,
        )
    families = group.families
    return position * families[segment.family].num_parts


def _check_range(what: str, values: npt.NDArray[np.integer], start: int, stop: int) -> None:
    if len(values) and (int(values.min()) < start or int(values.max()) >= stop):
        raise RemoteProtocolError(
            f"a {what} index is out of range",
            lowest=int(values.min()),
            highest=int(values.max()),
            stop=stop,
        )


def _check_blocks(asked: Sequence[m.ReadBlocks], leased: Sequence[GroupBlocks]) -> None:
    """The peer's idea of our blocks must be ours: it came through a router we do not control."""
    if len(asked) != len(leased):
        raise RemoteProtocolError(
            "a read names blocks for another number of cache groups",
            asked=len(asked),
            leased=len(leased),
        )
    for index, (theirs, ours) in enumerate(zip(asked, leased, strict=True)):
        if len(theirs.block_ids) % 4:
            raise RemoteProtocolError("block ids are no whole number of int32", group=index)
        ids = np.frombuffer(theirs.block_ids, dtype="<i4")
        if theirs.first_block != ours.first_block or not np.array_equal(ids, ours.block_ids):
            raise RemoteProtocolError(
                "the read's block ids are not the leased ones",
                group=index,
                asked_blocks=len(ids),
                leased_blocks=len(ours.block_ids),
                asked_first=theirs.first_block,
                leased_first=ours.first_block,
            )
