"""One request that a consumer rank loads: its state table and its record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kvconnector.errors import (
    BlockIdError,
    KVConnectorError,
    RemoteProtocolError,
    TransferAbortedError,
    TransferTimeoutError,
)
from kvconnector.layout.watermark import ALL_LAYERS, MIN_PIECE_BYTES, Watermark
from kvconnector.planning import Route, SourceRead, plan_reads
from kvconnector.session import events as ev
from kvconnector.session.agenda import NEVER
from kvconnector.session.completion import LoadInFlight
from kvconnector.session.machine import Table, Tracked, staying
from kvconnector.session.orders import DropRequest, LoadRequest, WantRequest
from kvconnector.session.reads import RankRead
from kvconnector.session.trace import LoadTrace
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error

if TYPE_CHECKING:
    from kvconnector.session.remote_engine import RemoteEngine


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
_ENDED = frozenset({_S.FAILED, _S.ABORTED})
_LACKS = {
    _S.WANTED: "the producer did not begin with the prompt before the load's deadline",
    _S.CONNECTING: "the producer was not greeted before the load's deadline",
    _S.FOLLOWING: "the producer did not go on with the prompt before the load's deadline",
    _S.READING: "the load made no progress before its deadline",
}
"""The text of the error if a load's deadline passes in this state."""

LOAD_TABLE: Table[LoadState] = Table(
    "load",
    _S.WANTED,
    {
        _S.WANTED: {
            LoadRequest: frozenset(
                {_S.CONNECTING, _S.FOLLOWING, _S.READING, _S.DONE, _S.FAILED, _S.ABORTED}
            ),
            DropRequest: frozenset({_S.ABORTED}),
            **staying(_S.WANTED, m.Progress, ev.EngineLost, ev.Tick),
        },
        _S.CONNECTING: {
            ev.EngineReady: frozenset({_S.FOLLOWING, _S.READING, _S.DONE, _S.FAILED}),
            ev.EngineLost: frozenset({_S.FAILED}),
            m.Progress: frozenset({_S.CONNECTING, _S.FAILED, _S.ABORTED}),
            DropRequest: frozenset({_S.ABORTED}),
            ev.Tick: frozenset({_S.FAILED}),
        },
        _S.FOLLOWING: {
            m.Progress: frozenset({_S.FOLLOWING, _S.READING, _S.DONE, _S.FAILED, _S.ABORTED}),
            ev.EngineLost: frozenset({_S.FAILED}),
            DropRequest: frozenset({_S.ABORTED}),
            ev.Tick: frozenset({_S.FAILED}),
        },
        _S.READING: {
            ev.ReceivePosted: frozenset({_S.READING}),
            m.Progress: frozenset({_S.READING, _S.DRAINING}),
            ev.ReceiveFinished: frozenset({_S.READING, _S.FOLLOWING, _S.DONE, _S.FAILED}),
            ev.ReceiveFailed: frozenset({_S.DRAINING, _S.FAILED}),
            m.ReadRefused: frozenset({_S.DRAINING}),
            m.ReadEnded: frozenset({_S.DRAINING}),
            ev.EngineLost: frozenset({_S.DRAINING}),
            DropRequest: frozenset({_S.DRAINING}),
            ev.Tick: frozenset({_S.DRAINING}),
        },
        _S.DRAINING: {
            ev.ReceiveFinished: _ENDED | {_S.DRAINING},
            ev.ReceiveFailed: _ENDED | {_S.DRAINING},
            ev.ReceiveStopped: _ENDED | {_S.DRAINING},
            DropRequest: frozenset({_S.DRAINING}),
        },
        _S.DONE: {},
        _S.FAILED: {},
        _S.ABORTED: {},
    },
)


class Piece(NamedTuple):
    """A part of a load that is read at once: these tokens of each cache group, or rows of one that is compressed, in
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
    unless it makes progress before. Once `is_reported` the engine knows its end.
    """

    def __init__(self, wanted: WantRequest, engine: RemoteEngine, now: float) -> None:
        super().__init__(LOAD_TABLE, f"request {wanted.request_id}")
        self.request_id = wanted.request_id
        self.engine = engine
        self.key = m.TransferKey(transfer_id=wanted.transfer_id, secret=wanted.secret)
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
        """Returns True if the engine may ask for the load: the producer worker has blocks for the prompt and begins to
        compute it or, if loads are not streamed, has finished it.
        """
        reported = self.progress[link]
        return _has_begun(reported) if is_streamed else reported.is_complete

    def take_ready(
        self, routes: Iterable[Route], sources: Collection[int], *, chunk_bytes: int
    ) -> tuple[SourceRead, ...]:
        """Return reads of all tokens and layers that these producer workers have and no read covers yet.

        Raises:
            GeometryError: see `plan_read`.
            RemoteProtocolError: the producer has another number of cache groups than the load names blocks of.
        """
        num_groups = self.engine.num_groups
        self.unread_tokens = tuple(
            # an optional group that the producer lacks has nothing to load
            [
                tokens if group < num_groups else _NO_RANGE
                for group, tokens in enumerate(self.unread_tokens)
            ]
        )
        if not self.is_followed:
            named = 0 if self.order is None else len(self.order.remote_blocks)
            if any(self.unread_tokens) and named != num_groups:
                raise RemoteProtocolError(
                    "a load names blocks of another number of cache groups than its producer has",
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
        """Return what is left of the tokens below `stop`, nothing of groups that some workers cannot be read of
        yet.
        """
        ranges = []
        for group, tokens in enumerate(self.unread_tokens):
            is_there = tokens and all(_has(report, group) for report in reports)
            limit = stop // self.engine.row_tokens[group] if is_there else 0
            ranges.append(range(tokens.start, max(tokens.start, min(tokens.stop, limit))))
        return tuple(ranges)

    def ask(self, asked: LoadRequest, now: float) -> KVConnectorError | None:
        """Record the engine's order. If a worker's check refused its blocks, `filled_tokens` stays unknown.

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


def _has_begun(reported: m.Progress) -> bool:
    return reported.watermark.num_tokens > 0 or any(blocks.wire_ids for blocks in reported.blocks)


def _extent(reported: m.Progress) -> tuple[bool, Watermark, bool]:
    """Return a value that grows from one report of a worker to the next."""
    return reported.is_complete, reported.watermark, _has_begun(reported)


def _has(reported: m.Progress, group: int) -> bool:
    """Returns True if a group can be read up to the watermark, as groups without blocks can at the prompt's end."""
    blocks = reported.blocks
    return group < len(blocks) and (reported.is_complete or bool(blocks[group].wire_ids))
