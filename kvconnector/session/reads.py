"""The reads of one consumer worker, until none of their receive slots is awaited."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvconnector.planning import SourceRead
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.agenda import Agenda
from kvconnector.session.commands import NEVER, Command, LinkId, StartReceive
from kvconnector.session.load import Load
from kvconnector.wire import messages as m


class OpenReads(dict[int, StartReceive]):
    """All reads that hold or wait for receive slots, by their ids."""

    def __init__(self, agenda: Agenda[Any], *, drain_timeout_s: float) -> None:
        super().__init__()
        self._drain_timeout_s = drain_timeout_s
        self._numbers = count(1)
        self._agenda = agenda

    def open(self, load: Load, source: SourceRead, now: float) -> StartReceive:
        """A new read of what is at a worker, under a number of its own."""
        assert load.asked is not None  # nothing is read before
        worker = load.engine.workers[source.route.peer]
        read = StartReceive(
            next(self._numbers),
            load,
            worker,
            worker.link,
            source,
            load.asked.local_blocks,
            load.progress[worker.link].blocks if load.is_followed else load.asked.remote_blocks,
        )
        load.trace.began(source.total_bytes, now)
        for book in (self, load.reads, load.engine.reads):
            book[read.read_id] = read
        return read

    def close(self, read_id: int) -> StartReceive:
        """Nothing more of this read is awaited."""
        read = self.pop(read_id)
        self._agenda.forget(read)
        del read.load.engine.reads[read_id]
        return read

    def at_peer(self, link: LinkId, read_id: int) -> StartReceive | None:
        """The read that a peer's message on `link` is about, if it is one of that peer's and under way there."""
        read = self.get(read_id)
        if read is None or read.link != link or not read.is_asked or read.is_peer_over:
            return None
        return read

    def stop(self, read: StartReceive, now: float) -> list[Command]:
        """Write no more for a read, and cancel it at its peer if that is still sending. Idempotent."""
        if read.is_stopped:
            return []
        read.is_stopped = True
        commands: list[Command] = [cmd.StopReceive(read.read_id)]
        if read.is_asked and not read.is_peer_over:
            self._await_end(read, now)
            commands.append(cmd.SendMessage(read.link, m.CancelRead(read_id=read.read_id)))
        return commands

    def peer_over(self, read: StartReceive, sent_chunks: int | None, now: float) -> list[Command]:
        """Nothing more will come than the first `sent_chunks` chunks; None: the peer is gone, nothing comes at all."""
        read.is_peer_over = True
        if sent_chunks is None:
            read.deadline = NEVER
        else:
            self._await_end(read, now)
        return [cmd.DrainReceive(read.read_id, sent_chunks)]

    def _await_end(self, read: StartReceive, now: float) -> None:
        read.deadline = now + self._drain_timeout_s
        self._agenda.plan(read, read.deadline)


def read_message(read: StartReceive, posted: ev.ReceivePosted) -> m.Read:
    """The request to a producer rank, once its chunks have slots. Blocks of a followed prompt it knows itself."""
    source, key = read.source, read.load.key
    return m.Read(
        transfer_id=key.transfer_id,
        secret=key.secret,
        read_id=read.read_id,
        incarnation=read.worker.incarnation,
        token_ranges=tuple([(tokens.start, tokens.stop) for tokens in source.token_ranges]),
        layers=(source.layers.start, source.layers.stop),
        chunk_bytes=source.chunk_bytes,
        num_chunks=source.num_chunks,
        blocks=() if read.load.is_followed else read.remote_blocks,
        window=posted.window,
        first_tag=posted.first_tag,
    )
