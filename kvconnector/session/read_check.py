"""Checks of a peer: of its route when it greets, and of its reads."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnector.errors import IncompatiblePeerError, RemoteProtocolError
from kvconnector.ids import Rank
from kvconnector.layout import GroupBlocks, is_held
from kvconnector.planning import Route, Segment, SourceRead, make_route, plan_read
from kvconnector.session.lease import Lease
from kvconnector.topology import GroupGeometry, RankGeometry
from kvconnector.wire import messages as m


def check_route(hello: m.Hello, mine: RankGeometry) -> Route:
    """Return this rank's end of the route whose segments a consumer worker names in its greeting.

    Raises:
        IncompatiblePeerError: a segment names a cache group, parts, layers, heads or tokens that this rank or, by its
            own geometry, the consumer's does not hold, or there are too many of them.
    """
    peer = Rank(hello.pp_rank, hello.tp_rank)
    theirs = hello.geometry.groups_of(peer)
    for segment in hello.segments:
        _check_segment(segment, mine.groups, theirs, "this rank")
        _check_segment(segment, theirs, mine.groups, "the consumer's rank")
    return make_route(peer, hello.segments, mine.groups, theirs)


def check_read(
    read: m.Read,
    route: Route,
    groups: Sequence[GroupGeometry],
    lease: Lease,
    max_chunk_bytes: int,
) -> SourceRead:
    """Return the read that a peer requests, if all of it is inside the lease and its chunks fit into staging slots.

    Args:
        read: The untrusted request.
        route: This rank's end of the peer's route, which was checked when the peer greeted.
        groups: This rank's cache groups.
        lease: The lease of the transfer that the read names. Reads of a streamed lease need not name its blocks.
        max_chunk_bytes: The bytes of a staging slot.

    Raises:
        RemoteProtocolError: it names blocks, tokens or layers outside the lease, chunks larger than a slot, nothing
            at all, or a number of chunks that its ranges do not have.
        GeometryError: its ranges or its `chunk_bytes` make no sense, see `plan_read`.
    """
    if read.blocks or not lease.is_streamed:
        _check_blocks(read.blocks, lease.blocks)
    if read.chunk_bytes > max_chunk_bytes:
        raise RemoteProtocolError(
            "a chunk is larger than a staging slot",
            chunk_bytes=read.chunk_bytes,
            max_chunk_bytes=max_chunk_bytes,
        )
    ranges = [range(*tokens) for tokens in read.token_ranges]
    source = plan_read(route, ranges, chunk_bytes=read.chunk_bytes, layers=range(*read.layers))
    if source is None:
        raise RemoteProtocolError("a read asks for nothing that this rank holds")
    if source.layer_stop > lease.watermark.layer_stop(source.token_stop):
        raise RemoteProtocolError(
            "a read is ahead of the lease",
            token_stop=source.token_stop,
            layer_stop=source.layer_stop,
            watermark=lease.watermark,
        )
    for segment, members in zip(route.segments, source.members, strict=True):
        room = lease.blocks[segment.group].token_range(groups[segment.group].virtual_block_tokens)
        held = segment.stripe.members(room)
        if members and not held.start <= members.start < members.stop <= held.stop:
            raise RemoteProtocolError(
                "a read is outside the lease's blocks",
                group=segment.group,
                tokens=read.token_ranges[segment.group],
                held=(room.start, room.stop),
            )
    if read.num_chunks != source.num_chunks:
        raise RemoteProtocolError(
            "the two sides cut a read into different chunks",
            asked=read.num_chunks,
            cut=source.num_chunks,
        )
    return source


def _check_segment(
    segment: Segment, groups: Sequence[GroupGeometry], others: Sequence[GroupGeometry], whose: str
) -> None:
    """Raises IncompatiblePeerError: a rank with these cache groups does not hold the segment. `others` are those of the
    rank at the other end of the route.
    """
    if segment.group >= len(groups):
        raise IncompatiblePeerError(
            f"{whose} has no such cache group", group=segment.group, have=len(groups)
        )
    group = groups[segment.group]
    if segment.family >= len(group.families):
        raise IncompatiblePeerError(
            f"{whose} has no such part family", family=segment.family, have=len(group.families)
        )
    family = group.families[segment.family]
    head_token_bytes = family.head_token_bytes
    if segment.group < len(others) and segment.family < len(others[segment.group].families):
        other = others[segment.group].families[segment.family]
        head_token_bytes = min(head_token_bytes, other.head_token_bytes)
    shape = (segment.num_parts, segment.head_token_bytes)
    if shape != (family.num_parts, head_token_bytes):
        raise IncompatiblePeerError(
            f"the number or size of the parts of this family is different on {whose}",
            asked=shape,
            have=(family.num_parts, head_token_bytes),
        )
    if not family.head_start <= segment.head_start < segment.head_stop <= family.head_stop:
        raise IncompatiblePeerError(
            f"{whose} does not hold these heads",
            heads=(segment.head_start, segment.head_stop),
            have=(family.head_start, family.head_stop),
        )
    if not is_held(segment.stripe, group.context_parallel):
        raise IncompatiblePeerError(
            f"{whose} does not hold these tokens",
            stripe=segment.stripe,
            dcp_size=group.dcp_size,
            dcp_rank=group.dcp_rank,
            interleave_tokens=group.interleave_tokens,
        )
    first = group.layers.index(segment.layers[0]) if segment.layers[0] in group.layers else 0
    if segment.layers != group.layers[first : first + len(segment.layers)]:
        raise IncompatiblePeerError(
            f"{whose} does not hold these layers as one contiguous run",
            layers=segment.layers,
            have=group.layers,
        )


def _check_blocks(asked: Sequence[GroupBlocks], leased: Sequence[GroupBlocks]) -> None:
    """Check that the peer names the leased blocks: it got them through a router that we do not control."""
    if len(asked) != len(leased):
        raise RemoteProtocolError(
            "a read names blocks for a different number of cache groups",
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
