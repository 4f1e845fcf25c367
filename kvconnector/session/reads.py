"""The reads of one consumer worker: who was asked for what, and which of them still hold receive slots."""

from __future__ import annotations

from itertools import count

from kvconnector.ids import EngineAddress
from kvconnector.planning import SourceRead
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import NEVER, Command, LinkId, StartReceive
from kvconnector.session.load import Load
from kvconnector.session.remote_engine import Worker
from kvconnector.wire import messages as m


class OpenReads(dict[int, StartReceive]):
    """All reads that hold or wait for receive slots, by their ids."""

    def __init__(self, *, drain_timeout_s: float) -> None:
        super().__init__()
        self._drain_timeout_s = drain_timeout_s
        self._numbers = count(1)

    def open(self, load: Load, worker: Worker, source: SourceRead, now: float) -> StartReceive:
        """A new read of what is at a worker, under a number of its own."""
        assert load.asked is not None  # nothing is read before
        read = StartReceive(
            next(self._numbers),
            load.request_id,
            load.engine,
            worker.link,
            worker.incarnation,
            worker.segments,
            source,
            load.asked.local_blocks,
            load.key,
            load.progress[worker.link].blocks if load.is_followed else load.asked.remote_blocks,
            load.is_followed,
        )
        load.reads[read.read_id] = source.plan.source
        load.trace.began(read.read_id, source.total_bytes, now)
        self[read.read_id] = read
        return read

    def any_at(self, engine: EngineAddress) -> bool:
        """Whether a read of this engine is left, which may be draining."""
        return any(read.engine == engine for read in self.values())

    def at_peer(self, link: LinkId, read_id: int) -> StartReceive | None:
        """The read that a peer's message on `link` is about, if it is one of that peer's and under way there."""
        read = self.get(read_id)
        if read is None or read.link != link or not read.is_asked or read.is_peer_over:
            return None
        return read

    def stop(self, read: StartReceive, now: float) -> list[Command]:
        """Write no more for a read, and tell its peer if that is still sending."""
        read.is_stopped = True
        commands: list[Command] = [cmd.StopReceive(read.read_id)]
        if read.is_asked and not read.is_peer_over:
            read.deadline = now + self._drain_timeout_s
            commands.append(cmd.SendMessage(read.link, m.CancelRead(read_id=read.read_id)))
        return commands

    def peer_over(self, read: StartReceive, sent_chunks: int | None, now: float) -> list[Command]:
        """Nothing more will come than the first `sent_chunks` chunks; None: the peer is gone, nothing comes at all."""
        read.is_peer_over = True
        read.deadline = NEVER if sent_chunks is None else now + self._drain_timeout_s
        return [cmd.DrainReceive(read.read_id, sent_chunks)]


def read_message(read: StartReceive, posted: ev.ReceivePosted) -> m.Read:
    """What a producer rank is asked, now that its chunks have slots. Blocks of a followed prompt it knows itself."""
    return m.Read(
        transfer_id=read.transfer.transfer_id,
        secret=read.transfer.secret,
        read_id=read.read_id,
        incarnation=read.incarnation,
        segments=read.segments,
        chunks=read.source.chunks.tobytes(),
        blocks=() if read.is_followed else read.remote_blocks,
        window=posted.window,
        first_tag=posted.first_tag,
    )
