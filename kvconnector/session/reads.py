"""The reads of one consumer worker: who was asked for what, and which of them still hold receive slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import msgspec

from kvconnector.ids import RequestId
from kvconnector.planning import GroupBlocks, Segment, SourceRead
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import Command, LinkId
from kvconnector.session.events import EngineAddress
from kvconnector.wire import messages as m

NEVER = float("inf")


class OpenRead(msgspec.Struct):
    """One read at one producer rank.

    It is forgotten when it is complete, or, once stopped, when the data plane awaits nothing more of it. `is_asked`:
    the peer was told. `is_peer_over`: the peer sends no more than the data plane knows of. `deadline` bounds the peer's
    answer to a cancellation.
    """

    read_id: int
    request_id: RequestId
    engine: EngineAddress
    link: LinkId
    source: SourceRead
    is_stopped: bool = False
    is_asked: bool = False
    is_peer_over: bool = False
    deadline: float = NEVER


class OpenReads:
    """All reads that hold or wait for receive slots."""

    def __init__(self, *, drain_timeout_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._reads: dict[int, OpenRead] = {}
        self._numbers = count(1)

    def open(
        self, request_id: RequestId, engine: EngineAddress, link: LinkId, source: SourceRead
    ) -> OpenRead:
        """A new read, under a number of its own."""
        read = OpenRead(next(self._numbers), request_id, engine, link, source)
        self._reads[read.read_id] = read
        return read

    def __getitem__(self, read_id: int) -> OpenRead:
        return self._reads[read_id]

    def __contains__(self, read_id: int) -> bool:
        return read_id in self._reads

    def __iter__(self) -> Iterator[OpenRead]:
        return iter(list(self._reads.values()))

    def __len__(self) -> int:
        return len(self._reads)

    def any_at(self, engine: EngineAddress) -> bool:
        """Whether a read of this engine is left, which may be draining."""
        return any(read.engine == engine for read in self._reads.values())

    def at_peer(self, link: LinkId, read_id: int) -> OpenRead | None:
        """The read that a peer's message on `link` is about, if it is one of that peer's and under way there."""
        read = self._reads.get(read_id)
        if read is None or read.link != link or not read.is_asked or read.is_peer_over:
            return None
        return read

    def forget(self, read_id: int) -> OpenRead:
        """The data plane has done with a read."""
        return self._reads.pop(read_id)

    def next_deadline(self) -> float:
        """When the first peer is late with its answer to a cancellation."""
        return min([read.deadline for read in self._reads.values()], default=NEVER)

    def stop(self, read: OpenRead, now: float) -> list[Command]:
        """Write no more for a read, and tell its peer if that is still sending."""
        read.is_stopped = True
        commands: list[Command] = [cmd.StopReceive(read.read_id)]
        if read.is_asked and not read.is_peer_over:
            read.deadline = now + self._drain_timeout_s
            commands.append(cmd.SendMessage(read.link, m.CancelRead(read_id=read.read_id)))
        return commands

    def peer_over(self, read: OpenRead, sent_chunks: int | None, now: float) -> list[Command]:
        """Nothing more will come than the first `sent_chunks` chunks; None: the peer is gone, nothing comes at all."""
        read.is_peer_over = True
        read.deadline = NEVER if sent_chunks is None else now + self._drain_timeout_s
        return [cmd.DrainReceive(read.read_id, sent_chunks)]


def as_sent(segment: Segment, order: str) -> m.ReadSegment:
    """A planned segment as it travels."""
    return m.ReadSegment(
        group=segment.group,
        family=segment.family,
        first_layer=segment.layers[0],
        num_layers=len(segment.layers),
        head_start=segment.head_start,
        head_stop=segment.head_stop,
        order=order,
        token_first=segment.stripe.first,
        token_run=segment.stripe.run,
        token_period=segment.stripe.period,
    )


def as_read_blocks(blocks: Sequence[GroupBlocks]) -> tuple[m.ReadBlocks, ...]:
    """Blocks as they travel."""
    return tuple(
        m.ReadBlocks(first_block=b.first_block, block_ids=b.block_ids.astype("<i4").tobytes())
        for b in blocks
    )


def read_message(
    posted: ev.ReceivePosted,
    key: m.TransferKey,
    *,
    incarnation: str,
    source: SourceRead,
    remote_blocks: Sequence[GroupBlocks],
    orders: Mapping[tuple[int, int], str],
) -> m.Read:
    """What a producer rank is asked, now that its chunks have slots. `remote_blocks` are those that a router told."""
    segments = tuple(as_sent(s, orders[s.group, s.family]) for s in source.segments)
    return m.Read(
        transfer_id=key.transfer_id,
        secret=key.secret,
        read_id=posted.read_id,
        incarnation=incarnation,
        segments=segments,
        chunks=source.chunks.tobytes(),
        blocks=as_read_blocks(remote_blocks),
        window=posted.window,
        first_tag=posted.first_tag,
    )
