"""One request that a consumer rank loads: the state table and the record."""

from __future__ import annotations

from enum import StrEnum

from kvconnector.errors import KVConnectorError
from kvconnector.ids import Rank, RequestId
from kvconnector.session import events as ev
from kvconnector.session.machine import Table, Tracked
from kvconnector.wire.messages import TransferKey


class LoadState(StrEnum):
    """States of a consumer's request."""

    WANTED = "wanted"
    CONNECTING = "connecting"
    READING = "reading"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


_S = LoadState
_ENDED = frozenset({_S.FAILED, _S.ABORTED})

LOAD_TABLE: Table[LoadState] = Table(
    "load",
    _S.WANTED,
    {
        _S.WANTED: {
            ev.LoadAsked: frozenset({_S.CONNECTING, _S.READING, _S.DONE, _S.FAILED}),
            ev.LoadWithdrawn: frozenset({_S.ABORTED}),
        },
        _S.CONNECTING: {
            ev.EngineReady: frozenset({_S.READING, _S.DONE, _S.FAILED}),
            ev.EngineLost: frozenset({_S.FAILED}),
            ev.LoadWithdrawn: frozenset({_S.ABORTED}),
            ev.Tick: frozenset({_S.FAILED}),
        },
        _S.READING: {
            ev.ReceivePosted: frozenset({_S.READING}),
            ev.ReceiveFinished: frozenset({_S.READING, _S.DONE}),
            ev.ReceiveFailed: frozenset({_S.DRAINING, _S.FAILED}),
            ev.ReadCutShort: frozenset({_S.DRAINING}),
            ev.EngineLost: frozenset({_S.DRAINING}),
            ev.LoadWithdrawn: frozenset({_S.DRAINING}),
            ev.Tick: frozenset({_S.DRAINING}),
        },
        _S.DRAINING: {
            ev.ReceiveFinished: _ENDED | {_S.DRAINING},
            ev.ReceiveFailed: _ENDED | {_S.DRAINING},
            ev.ReceiveStopped: _ENDED | {_S.DRAINING},
            ev.LoadWithdrawn: frozenset({_S.DRAINING}),
        },
        _S.DONE: {},
        _S.FAILED: {},
        _S.ABORTED: {},
    },
)


class Load(Tracked[LoadState]):
    """A request's transfer, what was asked of it, and which reads are not over."""

    __slots__ = ("asked", "deadline", "engine", "error", "key", "reads", "request_id")

    def __init__(self, wanted: ev.Wanted) -> None:
        super().__init__(LOAD_TABLE, f"request {wanted.request_id}")
        self.request_id: RequestId = wanted.request_id
        self.engine: ev.EngineAddress = wanted.engine
        self.key = TransferKey(transfer_id=wanted.transfer_id, secret=wanted.secret)
        self.asked: ev.LoadAsked | None = None
        self.reads: dict[int, Rank] = {}
        self.deadline = float("inf")
        self.error: KVConnectorError | None = None
