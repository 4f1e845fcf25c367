"""The records of a consumer rank: its loads, the reads of each, and the producer engines that it reads from.

They stand together because they know each other: a load its engine and its reads, a read its load and its worker, an
engine its workers, loads and reads. The tables of their states are where events move them: in `consumer` and `engines`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import NamedTuple

import msgspec

from kvconnector.agenda import AT_ONCE, NEVER
from kvconnector.errors import (
    BlockIdError,
    KVConnectorError,
    RemoteProtocolError,
    TransferAbortedError,
    TransferTimeoutError,
)
from kvconnector.ids import EngineAddress, Rank
from kvconnector.layout import GroupBlocks
from kvconnector.layout.watermark import ALL_LAYERS, MIN_PIECE_BYTES, Watermark
from kvconnector.planning import Route, SourceRead, plan_reads
from kvconnector.session.completion import LoadInFlight
from kvconnector.session.link import Link
from kvconnector.session.machine import Table, Tracked
from kvconnector.session.orders import LoadRequest, WantRequest
from kvconnector.session.trace import LoadTrace
from kvconnector.topology import RankGeometry
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error
from kvconnector.wire.export import PoolExport


class LoadState(StrEnum):
    """States of a consumer's request."""

    WANTED = "wanted"
    CONNECTING = "connecting"
    FOLLOWING = "following"
    READING = "reading"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


_S = LoadState
_LACKS = {
    _S.WANTED: "the producer did not start the prompt before the load's deadline",
    _S.CONNECTING: "the producer was not greeted before the load's deadline",
    _S.FOLLOWING: "the producer computed no more of the prompt before the load's deadline",
    _S.READING: "the load made no progress before its deadline",
}
"""The text of the error if a load's deadline passes in this state."""


class Piece(NamedTuple):
    """A part of a load that is read at once: these tokens of each cache group (rows, if the group is compressed) in
    these layers (global indices).
    """

    token_ranges: tuple[range, ...]
    layers: range = ALL_LAYERS


class Load(Tracked[LoadState]):
    """A request's transfer, the engine's order, and its unfinished reads.

    `unread_tokens[group]` are the tokens, or rows, that no read covers yet; of `partial_piece` only some layers are
    covered. The first `filled_tokens` tokens are in our blocks. If it `is_followed`, `progress` has the latest report
    of each producer worker, by its link's number, `extra` the bytes that the producer's engine added to the end of the
    prompt, and once `producer_started` the engine may ask for the load, by its `order`. It is given up at `deadline`,
    unless it makes progress before. Once `is_reported` the engine knows its end. Its transfer's name has `name_bytes`.
    """

    def __init__(
        self, table: Table[LoadState], wanted: WantRequest, engine: RemoteEngine, now: float
    ) -> None:
        super().__init__(table, f"request {wanted.request_id}")
        self.request_id = wanted.request_id
        self.engine = engine
        self.key = m.TransferKey(transfer_id=wanted.transfer_id, secret=wanted.secret)
        self.name_bytes = len(wanted.transfer_id.encode())
        self.is_followed = wanted.is_followed
        self.producer_started = False
        self.order: LoadRequest | None = None
        self.unread_tokens: tuple[range, ...] = ()
        self.filled_tokens: int | None = None
        self.partial_piece: Piece | None = None
        self.progress: dict[int, m.Progress] = {}
        self.extra = b""
        self.reads: dict[int, RankRead] = {}
        self.deadline = NEVER
        self.error: KVConnectorError | None = None
        self.is_reported = False
        self.trace = LoadTrace(wanted.engine.engine_id, wanted.is_followed, now)

    def __repr__(self) -> str:
        left = (
            ""
            if self.order is None
            else f", left {[(r.start, r.stop) for r in self.unread_tokens]}"
        )
        return (
            f"<Load {self.request_id} of {self.key.transfer_id} at {self.engine.name.engine_id}:"
            f" {self.state.value}{left}, reads {sorted(self.reads)}, until {self.deadline}>"
        )

    def record_progress(self, link: int, reported: m.Progress) -> bool:
        """Record a producer worker's progress. Ignores stale messages.

        Returns:
            True if it has progressed, or had reported nothing yet.

        Raises:
            KVConnectorError: The worker gave up the prompt, or its report makes no sense.
        """
        if reported.refusal is not None:
            raise refusal_error(reported.refusal, reported.text, request=self.request_id)
        if len(reported.blocks) != self.engine.num_groups:
            raise RemoteProtocolError(
                "a producer's progress does not name blocks of every cache group",
                transfer=reported.transfer_id,
                groups=self.engine.num_groups,
            )
        known = self.progress.get(link)
        is_new = known is None or _extent(reported) > _extent(known)
        if is_new:
            self.progress[link] = reported
            self.extra = self.extra or reported.extra
        return is_new

    def should_notify(self, link: int, *, is_streamed: bool) -> bool:
        """Returns True if the engine may ask for the load: the producer worker has blocks for the prompt and starts
        it or, if loads are not streamed, has finished it.
        """
        reported = self.progress[link]
        return _producer_started(reported) if is_streamed else reported.is_complete

    def take_ready(
        self, routes: Iterable[Route], sources: Collection[int], *, chunk_bytes: int
    ) -> tuple[SourceRead, ...]:
        """Return reads of all tokens and layers that these producer workers have and no read covers yet.

        Raises:
            GeometryError: see `plan_read`.
            RemoteProtocolError: the producer has another number of cache groups than the load names blocks of.
        """
        num_groups = self.engine.num_groups
        if len(self.unread_tokens) > num_groups:
            # an optional group that the producer lacks has nothing to load
            lacking = len(self.unread_tokens) - num_groups
            self.unread_tokens = self.unread_tokens[:num_groups] + (_NO_RANGE,) * lacking
        if not self.is_followed:
            named = 0 if self.order is None else len(self.order.remote_blocks)
            if any(self.unread_tokens) and named != num_groups:
                raise RemoteProtocolError(
                    "a load names blocks of a different number of cache groups than its producer has",
                    request=self.request_id,
                    named=named,
                    groups=num_groups,
                )
            planned = plan_reads(routes, self.unread_tokens, chunk_bytes=chunk_bytes)
            self.unread_tokens = ()
            return planned
        if not sources:  # no producer rank has anything for this one
            self.unread_tokens = ()
            return ()
        reads: tuple[SourceRead, ...] = ()
        while any((piece := self._ready(sources)).token_ranges):
            planned = plan_reads(
                routes, piece.token_ranges, layers=piece.layers, chunk_bytes=chunk_bytes
            )
            is_last = piece.layers.stop == ALL_LAYERS.stop
            total_bytes = sum(read.total_bytes for read in planned)
            if not is_last and total_bytes < MIN_PIECE_BYTES * max(1, len(planned)):
                break  # more layers are still to come, or all of them
            self.unread_tokens = tuple(
                range(taken.stop, tokens.stop)
                for taken, tokens in zip(piece.token_ranges, self.unread_tokens, strict=True)
            )
            self.partial_piece = None if is_last else piece
            reads += planned
        return reads

    def _ready(self, sources: Collection[int]) -> Piece:
        """Return the next piece: more layers of `partial_piece`, tokens in all layers, or first layers of the newest
        step.
        """
        reports = [self.progress.get(link, _NOTHING) for link in sources]
        stop = min(each.watermark.num_tokens for each in reports)
        if self.partial_piece is not None:
            ranges, first = self.partial_piece.token_ranges, self.partial_piece.layers.stop
        else:
            ranges, first = self._up_to(stop, reports), 0
            if not any(ranges):
                stop = min(each.watermark.token_stop for each in reports)
                ranges = self._up_to(stop, reports)
        ends = zip(ranges, self.engine.row_tokens, strict=False)
        stop = max((tokens.stop * m for tokens, m in ends if tokens), default=0)
        layer_stop = min(each.watermark.layer_stop(stop) for each in reports)
        return Piece(ranges, range(first, layer_stop))

    def _up_to(self, stop: int, reports: Sequence[m.Progress]) -> tuple[range, ...]:
        """Return the unread tokens below `stop`, but none of groups that cannot be read from all workers yet."""
        ranges = []
        for group, tokens in enumerate(self.unread_tokens):
            is_there = tokens and all(_has(report, group) for report in reports)
            limit = stop // self.engine.row_tokens[group] if is_there else 0
            ranges.append(range(tokens.start, max(tokens.start, min(tokens.stop, limit))))
        return tuple(ranges)

    def ask(self, asked: LoadRequest, now: float) -> KVConnectorError | None:
        """Record the engine's order. If a worker's check has refused its blocks, `filled_tokens` remains unknown.

        Returns:
            The reason why it cannot be loaded, if already known.
        """
        self.order, self.trace.asked_s = asked, now
        if asked.error is not None:
            return asked.error
        self.forget_reads(asked)
        if (
            self.error is None
            and any(self.unread_tokens)
            and not (self.is_followed or asked.remote_blocks)
        ):
            return BlockIdError("a load names no blocks of its producer", request=self.request_id)
        return self.error

    def forget_reads(self, asked: LoadRequest) -> None:
        """Count none of the requested tokens as read or filled."""
        self.unread_tokens, self.partial_piece = (
            tuple([range(*tokens) for tokens in asked.token_ranges]),
            None,
        )
        self.note_filled()

    def note_filled(self) -> None:
        """Update `filled_tokens` when no read is open: all tokens that reads covered are in the blocks. It stays None
        where groups keep only some tokens, as those that are loaded are the ones needed at the load's end.
        """
        if self.partial_piece is None and self.order is not None and self.order.keeps_all:
            row_tokens = self.engine.row_tokens or (1,) * len(self.unread_tokens)
            left = [*zip(self.unread_tokens, row_tokens, strict=False)]
            starts = [tokens.start * m for tokens, m in left if tokens]
            everything = [tokens.stop * m for tokens, m in left]
            # rows end before the tokens that no row holds yet
            everything.append(self.order.token_stop)
            self.filled_tokens = min(starts) if starts else max(everything, default=0)

    def remove_read(self, read: RankRead) -> None:
        """Remove a read that no longer writes to our blocks, no matter how it ended. What counts even of a failed read
        is added to the trace here, if the read was still listed. Idempotent.
        """
        self.reads.pop(read.read_id, None)

    def timeout_error(self, *, waits_for_slots: bool) -> TransferTimeoutError:
        """Return the error of a load whose deadline passed. It names what the load was waiting for."""
        context: dict[str, object] = {"state": self.state.value}
        if self.reads:
            context["waiting_for"] = [str(read.source.source) for read in self.reads.values()]
        elif self.is_followed:
            context["reported_tokens"] = [
                each.watermark.num_tokens for each in self.progress.values()
            ]
        return TransferTimeoutError(
            "the load got no slots before its deadline" if waits_for_slots else _LACKS[self.state],
            request=self.request_id,
            engine=self.engine.name.engine_id,
            **context,
        )

    def end(self, error: KVConnectorError | None) -> m.Done | m.Abort:
        """Move to the end state. Returns the message that ends the transfer at the producer's workers."""
        kind: type[m.Done | m.Abort] = m.Done
        state = _S.DONE
        if error is not None:
            kind = m.Abort
            state = _S.ABORTED if isinstance(error, TransferAbortedError) else _S.FAILED
        self.move(state)
        return kind(transfer_id=self.key.transfer_id, secret=self.key.secret)

    def abort(self) -> m.Abort:
        """Return the message that gives up the transfer at the producer's workers."""
        return m.Abort(transfer_id=self.key.transfer_id, secret=self.key.secret)

    def in_flight(self, rank: str, now: float) -> LoadInFlight:
        """Return the load's progress in bytes. Any thread may call this."""
        trace = self.trace
        arrived = [read.source.total_bytes * read.share for read in [*self.reads.values()]]
        return LoadInFlight(
            request_id=self.request_id,
            rank=rank,
            peer=trace.peer,
            path="packed" if trace.is_packed else "direct",
            nbytes=trace.nbytes + int(sum(arrived)),
            total_bytes=trace.total_bytes,
            seconds=0.0 if trace.first_read_s is None else now - trace.first_read_s,
        )

    @property
    def is_read(self) -> bool:
        """Returns True if reads cover everything that was requested."""
        return self.partial_piece is None and not any(self.unread_tokens)

    def is_complete(self, sources: Collection[int]) -> bool:
        """Returns True if all of these producer workers have computed the whole prompt."""
        return not self.is_followed or all(
            self.progress.get(link, _NOTHING).is_complete for link in sources
        )


_NOTHING = m.Progress(transfer_id="none")
_NO_RANGE = range(0)


def _producer_started(reported: m.Progress) -> bool:
    return reported.watermark.num_tokens > 0 or any(blocks.wire_ids for blocks in reported.blocks)


def _extent(reported: m.Progress) -> tuple[bool, Watermark, bool]:
    """Return a value that increases from each report of a worker to the next."""
    return reported.is_complete, reported.watermark, _producer_started(reported)


def _has(reported: m.Progress, group: int) -> bool:
    """Returns True if a group can be read up to the watermark, as groups without blocks can at the prompt's end."""
    blocks = reported.blocks
    return group < len(blocks) and (reported.is_complete or bool(blocks[group].wire_ids))


class RankRead(msgspec.Struct, eq=False):
    """A part of a load that is read from one producer worker: `source`, from its `remote_blocks` into our `blocks`.
    Session, port and data path pass this record to each other.

    `is_stopped`: no further chunk may be written. `is_asked`: the peer knows of the read. `is_peer_over`: the peer
    ended it, or is gone, and the data path knows how many chunks it sent. `deadline` is the time at which a peer that
    has not answered a cancellation is given up.

    *Set by the data path:* a packed read that has slots has a `window` of them, and its chunks have consecutive tags
    from `first_tag` on. A read that `is_moving` moves bytes; otherwise it waits for its turn. `share` is the fraction
    of its bytes that has arrived, 0 if unknown.
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
    window: int = 0
    first_tag: int = 0
    is_moving: bool = False
    share: float = 0.0

    def __repr__(self) -> str:
        state = "stopped" if self.is_stopped else "asked" if self.is_asked else "open"
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


MIN_HEARTBEAT_INTERVAL_S = 0.05
"""The shortest interval of heartbeats in seconds, no matter how short a peer's timeout or leases are."""


MAX_NAMED_BYTES = 24 << 10
"""The most bytes of transfers' names in a heartbeat, so that the whole heartbeat fits into any peer's longest message.
"""
LONGEST_NAME_BYTES = 2 << 10
"""Of 512 characters."""


class EngineState(StrEnum):
    """States of a remote engine."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    RESOLVING = "resolving"
    HELLO = "hello"
    READY = "ready"
    BACKOFF = "backoff"


@dataclass(slots=True, eq=False)
class RemoteWorker:
    """One rank of a remote engine that we greeted. `alive_at` is when we sent the newest message that it has answered:
    it had not given us up then, and will not within `timeout_s`, the shorter of both sides' timeouts for silent peers.
    `export` is how its pools may be mapped now. Its leases last `lease_s` unless they are renewed. `unanswered` has
    number and time of each unanswered heartbeat.
    """

    engine: RemoteEngine
    link: Link
    geometry: RankGeometry
    alive_at: float
    timeout_s: float
    answered: bool = False
    greeted_at: float = 0.0
    warm: bool = False
    incarnation: str = ""
    max_chunk_bytes: int = 0
    lease_s: float = NEVER
    export: PoolExport | None = None
    num_heartbeats: int = 0
    unanswered: deque[tuple[int, float]] = field(default_factory=deque)

    def greeted_by(self, reply: m.HelloReply, now: float) -> None:
        """Record its answer to our `Hello`."""
        self.answered = True
        self.greeted_at = now
        self.incarnation = reply.incarnation
        self.export = reply.export
        self.max_chunk_bytes = reply.max_chunk_bytes
        self.timeout_s = m.shorter_timeout_s(self.timeout_s, reply.timeout_ms)
        self.lease_s = m.shorter_timeout_s(NEVER, reply.lease_ms)

    @property
    def deadline(self) -> float:
        """The time until which it has certainly not given us up."""
        return self.alive_at + self.timeout_s

    @property
    def silent_at(self) -> float:
        """The time at which we give it up if it stays silent. Its greeting may have taken longer than its timeout."""
        return max(self.alive_at, self.greeted_at) + self.timeout_s

    def heartbeat_sent(self, now: float) -> int:
        """Record that a heartbeat is sent. Returns its number."""
        self.num_heartbeats += 1
        self.unanswered.append((self.num_heartbeats, now))
        return self.num_heartbeats

    def heartbeat_answered(self, number: int) -> None:
        """Record an answer. Duplicates and answers to nothing are ignored. Unnumbered ones come in order."""
        while self.unanswered and (not number or self.unanswered[0][0] <= number):
            sent, at = self.unanswered.popleft()
            if sent == number or not number:
                self.alive_at = at
                return


class EngineLoads:
    """The loads from one engine that are not over and have not failed. The cost of each method does not grow with them.

    `heartbeat_queue` has the loads that heartbeats name, the next one first; the first `num_due_now` should be named at
    once. `fail_on_loss` are the loads that fail if the engine is lost, and that begin, if they wait for it, when it is
    ready.
    """

    def __init__(self) -> None:
        self.heartbeat_queue: OrderedDict[Load, None] = OrderedDict()
        self.num_due_now = 0
        self._names_bytes = 0
        self.fail_on_loss: dict[Load, None] = {}
        self._followed: dict[str, dict[Load, None]] = {}

    def add(self, load: Load) -> None:
        """Add a new load. If it is followed, a heartbeat that names it is due at once."""
        self.heartbeat_queue[load] = None
        self._names_bytes += load.name_bytes
        if load.is_followed:
            self.heartbeat_queue.move_to_end(load, last=False)
            self.num_due_now += 1
            self.fail_on_loss[load] = None
            self._followed.setdefault(load.key.transfer_id, {})[load] = None

    def remove(self, load: Load) -> None:
        """Remove a load that is over or has failed. Idempotent."""
        if load not in self.heartbeat_queue:
            return
        del self.heartbeat_queue[load]
        self._names_bytes -= load.name_bytes
        if self.num_due_now:
            self.num_due_now = min(self.num_due_now, len(self.heartbeat_queue))
        self.fail_on_loss.pop(load, None)
        if load.is_followed:
            same = self._followed[load.key.transfer_id]
            del same[load]
            if not same:
                del self._followed[load.key.transfer_id]

    @property
    def num_heartbeats(self) -> int:
        """The number of heartbeats needed to name all loads. Long names need more of them."""
        # the last name of each may be the one that no longer fits
        by_bytes = self._names_bytes / (MAX_NAMED_BYTES - LONGEST_NAME_BYTES)
        return max(1, ceil(len(self.heartbeat_queue) / m.MAX_NAMED), ceil(by_bytes))

    def following(self, transfer_id: str) -> list[Load]:
        """Return the loads that follow one transfer."""
        return [*self._followed.get(transfer_id, ())]

    def take_turn(
        self, limit: int, links: Collection[int]
    ) -> tuple[tuple[m.TransferKey, ...], tuple[m.Follow, ...]]:
        """Return the next transfers for a heartbeat to name, at most `limit` of them or `MAX_NAMED_BYTES`, and move
        them to the end of the queue: first those to renew, then the followed ones on which some worker at `links` has
        not reported yet.
        """
        renewed: list[m.TransferKey] = []
        followed: list[m.Follow] = []
        left_bytes, sources = MAX_NAMED_BYTES, {*links}
        for _ in range(min(limit, len(self.heartbeat_queue))):
            load = next(iter(self.heartbeat_queue))
            left_bytes -= load.name_bytes
            if left_bytes < 0:
                break
            self.heartbeat_queue.move_to_end(load)
            self.num_due_now = max(0, self.num_due_now - 1)
            key = load.key
            if not load.is_followed or load.progress.keys() >= sources:
                renewed.append(key)
            else:
                followed.append(m.Follow(transfer_id=key.transfer_id, secret=key.secret))
        return tuple(renewed), tuple(followed)


class RemoteEngine(Tracked[EngineState]):
    """A producer engine: its address, its workers, and the `routes` on which we read from them. From its directory on,
    `row_tokens` has those of each of its cache groups. Once it is ready,
    `chunk_bytes` is the longest chunk that we and all of its workers take, and it `was_ready`, even if it is lost.

    `until` ends the present attempt or pause. Its directory was last asked at `asked_at`, and `has_named_ranks` if that
    was for the very workers that we need. A transfer last ended at `idle_since`. `ungreeted` are those that have not
    answered or are not warm yet. All are looked at when it is `silent_at`, before which none is given up. The next
    heartbeat is due at `heartbeat_at`. `unsent_endings` are sent once it has greeted us. `reads` are those whose slots
    are not free yet. `loss` is why it was lost last.
    """

    def __init__(self, table: Table[EngineState], name: EngineAddress) -> None:
        super().__init__(table, f"engine {name.engine_id} at {name.address}")
        self.name = name
        self.attempts = 0
        self.was_ready = False
        self.until = 0.0
        self.asked_at = 0.0
        self.heartbeat_at = 0.0
        self.idle_since = 0.0
        self.directory_link: Link | None = None
        self.has_named_ranks = False
        self.routes: tuple[Route, ...] = ()
        self.row_tokens: tuple[int, ...] = ()
        self.chunk_bytes = 0
        self.workers: dict[Rank, RemoteWorker] = {}
        self.ungreeted: set[RemoteWorker] = set()
        self.silent_at = NEVER
        self.unsent_endings: deque[m.Done | m.Abort] = deque()
        self.loads = EngineLoads()
        self.reads: dict[int, RankRead] = {}
        self.loss: KVConnectorError | None = None

    @property
    def num_groups(self) -> int:
        """Number of its cache groups."""
        return len(self.row_tokens)

    @property
    def is_ready(self) -> bool:
        """Returns True if it can be read from now."""
        return self.state is EngineState.READY

    @property
    def deadline(self) -> float:
        """The time at which a heartbeat is due, silent workers are looked for, an attempt is given up, or a pause ends.
        Every event of a link asks for it, so it costs the same for any number of workers.
        """
        if self.state is EngineState.HELLO:
            return min(self.until, self.heartbeat_at)
        if self.state is not EngineState.READY:
            return self.until if self.state is not EngineState.UNKNOWN else NEVER
        if self.unsent_endings or self.loads.num_due_now:
            return AT_ONCE  # the next tick goes on with them
        return min(self.heartbeat_at, self.silent_at)

    def find_silent(self, now: float) -> Rank | None:
        """Return the rank of a worker that has been silent for too long, or None. The workers are checked only once per
        timeout, because answers that come in between can only extend it.
        """
        if now < self.silent_at:
            return None
        self.silent_at = min([worker.silent_at for worker in self.workers.values()], default=NEVER)
        if now < self.silent_at:
            return None
        return next(rank for rank, worker in self.workers.items() if worker.silent_at <= now)

    def heartbeat_interval_s(self, ours_s: float) -> float:
        """Return the seconds within which each transfer is named: our setting, or less, so that three heartbeats fit
        into the timeout and the leases of every worker.
        """
        times = [min(worker.timeout_s, worker.lease_s) for worker in self.workers.values()]
        return min(ours_s, max(min(times, default=NEVER) / 3, MIN_HEARTBEAT_INTERVAL_S))
