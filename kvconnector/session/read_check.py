"""A peer's read request, checked against the lease before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvconnector.errors import RemoteProtocolError
from kvconnector.planning import CHUNK_DTYPE, GroupBlocks
from kvconnector.topology import GroupGeometry, RankGeometry
from kvconnector.topology.stripes import is_held
from kvconnector.wire import messages as m


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
    family = group.families[segment.family]
    room = leased[segment.group].token_range(group.virtual_block_tokens)
    members = segment.stripe.members(range(room.start, min(room.stop, num_tokens)))
    return (
        segment.num_layers * family.num_parts,
        (segment.head_stop - segment.head_start) * family.head_token_bytes,
        members.start,
        members.stop,
    )


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
