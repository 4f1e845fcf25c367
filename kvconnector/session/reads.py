"""One read of a consumer worker: its record, which lives until its slots are free, and its end."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from kvconnector.layout import GroupBlocks
from kvconnector.planning import SourceRead
from kvconnector.session.agenda import Agenda
from kvconnector.session.port import NEVER, Ports
from kvconnector.session.program import Receive
from kvconnector.wire import messages as m

if TYPE_CHECKING:
    from kvconnector.session.load import Load
    from kvconnector.session.remote_engine import RemoteWorker


class RankRead(Receive, eq=False):
    """A part of a load that is read from one producer worker: `source`, from its `remote_blocks` into our `blocks`.
    Session, port and data path pass this record to each other.

    `is_stopped`: no further chunk may be written. `is_asked`: the peer knows of the read. `is_peer_over`: the peer
    ended it, or is gone, and the data path knows how many chunks it sent. `deadline` is the time at which a peer that
    has not answered a cancellation is given up.
    """

    read_id: int
    load: Load
    worker: RemoteWorker
    source: SourceRead
    blocks: tuple[GroupBlocks, ...]
    remote_blocks: tuple[GroupBlocks, ...]
    is_stopped: bool = False
    is_asked: bool = False
    is_peer_over: bool = False
    deadline: float = NEVER

    def __repr__(self) -> str:
        state = "stopped" if self.is_stopped else "asked" if self.is_asked else "begun"
        return f"<RankRead {self.read_id} by link {self.worker.link.number}, {state}>"

    def message(self) -> m.Read:
        """Return the request to the producer worker, once slots are reserved. It knows a followed prompt's blocks."""
        source, key = self.source, self.load.key
        return m.Read(
            transfer_id=key.transfer_id,
            secret=key.secret,
            read_id=self.read_id,
            incarnation=self.worker.incarnation,
            token_ranges=tuple([(tokens.start, tokens.stop) for tokens in source.token_ranges]),
            layers=(source.layers.start, source.layers.stop),
            chunk_bytes=source.chunk_bytes,
            num_chunks=source.num_chunks,
            blocks=() if self.load.is_followed else self.remote_blocks,
            window=self.window,
            first_tag=self.first_tag,
        )


class Reads:
    """Begins and ends reads. Its load and its engine list each of them."""

    def __init__(self, ports: Ports, agenda: Agenda[Any], *, drain_timeout_s: float) -> None:
        self._data, self._links = ports.data, ports.links
        self._drain_timeout_s = drain_timeout_s
        self._numbers = count(1)
        self._agenda = agenda

    def begin(self, load: Load, source: SourceRead, now: float) -> None:
        """Begin a read from the worker that `source` names."""
        assert load.order is not None  # nothing is read before
        worker = load.engine.workers[source.route.peer]
        theirs = (
            load.progress[worker.link.number].blocks
            if load.is_followed
            else load.order.remote_blocks
        )
        read = RankRead(next(self._numbers), load, worker, source, load.order.local_blocks, theirs)
        trace = load.trace
        trace.first_read_s, trace.last_read_s = trace.first_read_s or now, now
        trace.total_bytes += source.total_bytes
        load.reads[read.read_id] = load.engine.reads[read.read_id] = read
        self._data.start_receive(read)

    def close(self, read: RankRead) -> None:
        """Forget a read whose slots are free. Idempotent."""
        self._agenda.forget(read)
        read.load.engine.reads.pop(read.read_id, None)

    def stop(self, read: RankRead, now: float) -> None:
        """Stop writing a read's chunks, and cancel it at its peer if that may still be sending. Idempotent."""
        if read.is_stopped:
            return
        read.is_stopped = True
        self._data.stop_receive(read)
        if read.is_asked and not read.is_peer_over:
            self._await_end(read, now)
            self._links.send(read.worker.link, m.CancelRead(read_id=read.read_id))

    def peer_over(self, read: RankRead, sent_chunks: int | None, now: float) -> None:
        """Drain a read of which the peer sends the first `sent_chunks` chunks; None: the peer is lost."""
        read.is_peer_over = True
        if sent_chunks is None:
            read.deadline = NEVER
        else:
            self._await_end(read, now)
        self._data.drain_receive(read, sent_chunks)

    def _await_end(self, read: RankRead, now: float) -> None:
        read.deadline = now + self._drain_timeout_s
        self._agenda.plan(read, read.deadline)
