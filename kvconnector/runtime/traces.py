"""When the parts of each transfer happened: for spans, and for the log line of a slow load.

The driver shows every session event and every command, in order, with the time of its clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import ClassVar

from kvconnector.session import LoadInFlight, Phase, RequestTrace, TransferStats
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.session.orders import (
    DropRequest,
    HoldRequest,
    LoadRequest,
    WantRequest,
    WithdrawRequest,
)

logger = logging.getLogger(__name__)

TCP_FALLBACK = "-tcp-fallback"
"""Ends the path of what came by TCP although RDMA ports are active on this host."""
_NOWHERE = "", LinkId(0)
SendKey = tuple[LinkId, int]


class _Load:
    """A load that is not over. A time is None until it is reached."""

    def __init__(self, engine_id: str, is_followed: bool, now: float) -> None:
        self.engine_id = engine_id
        self.is_followed = is_followed
        self.wanted_s = now
        self.asked_s: float | None = None
        self.first_read_s: float | None = None
        self.last_read_s: float | None = None
        self.read_ids: list[int] = []
        self.nbytes = 0
        self.total_bytes = 0
        self.arriving: dict[int, tuple[int, float]] = {}
        self.is_packed = False
        self.seconds = 0.0
        self.paths: set[str] = set()
        self.parts: dict[str, Phase] = {}

    def phases(self, now: float) -> tuple[Phase, ...]:
        """All that it went through by now."""
        times = [self.wanted_s, self.asked_s, self.first_read_s]
        reached = [at for at in times if at is not None]
        waits = map(Phase, ("want", "greeting", "read"), reached, [*reached[1:], now])
        return (*waits, *self.parts.values())

    def count(self, phases: tuple[Phase, ...]) -> None:
        """Parts of one of its reads: those of all its reads together are one phase."""
        for new in phases:
            old = self.parts.get(new.name, new)
            times = min(old.start_s, new.start_s), max(old.end_s, new.end_s)
            self.parts[new.name] = Phase(new.name, *times)

    def waited_s(self, now: float) -> float:
        """How long blocks waited for it. Those of a prompt that is followed wait for its last part."""
        since = self.last_read_s if self.is_followed else self.asked_s
        return 0.0 if since is None else now - since


class _Hold:
    """A lease that is not over: it fills while its prompt is computed, and then waits for its consumers."""

    def __init__(self, transfer_id: str, now: float) -> None:
        self.transfer_id = transfer_id
        self.granted_s = now
        self.complete_s: float | None = None
        self.sends: list[Phase] = []

    def phases(self, now: float) -> tuple[Phase, ...]:
        """All that it went through by now."""
        complete_s = now if self.complete_s is None else self.complete_s
        fill = [Phase("fill", self.granted_s, complete_s)] if complete_s > self.granted_s else []
        return (*fill, Phase("hold", complete_s, now), *self.sends)


class Traces:
    """The transfers of one worker that are under way.

    A load that keeps its blocks waiting for longer than `slow_load_s` is logged; 0 logs none. `trace` takes each
    transfer that is over. `tcp_fallbacks` are the producer workers that UCX has no RDMA lane to although RDMA ports are
    active here.
    """

    def __init__(
        self, slow_load_s: float, trace: Callable[[RequestTrace], None], rank: str = ""
    ) -> None:
        self._slow_load_s = slow_load_s
        self._rank = rank
        self._trace = trace
        self._loads: dict[str, _Load] = {}
        self._origin_of_read: dict[int, tuple[str, LinkId]] = {}
        self.tcp_fallbacks: set[LinkId] = set()
        self._holds: dict[str, _Hold] = {}
        self._sends: dict[SendKey, tuple[str, float]] = {}
        self._hold_of: dict[str, _Hold] = {}

    def note(self, happened: object, now: float) -> None:
        """An event that is handled, or a command that is carried out."""
        handler = self._HANDLERS.get(type(happened))
        if handler is not None:
            handler(self, happened, now)

    def finish_load(self, command: cmd.FinishLoad, now: float) -> TransferStats | None:
        """A load is over. What it has moved; None if it read nothing."""
        load = self._loads.pop(command.request_id, None)
        if load is None:
            return None
        for read_id in load.read_ids:
            del self._origin_of_read[read_id]
        path = "+".join(sorted(load.paths))
        waited_s = load.waited_s(now)
        trace = RequestTrace(
            request_id=command.request_id,
            kind="load",
            peer=load.engine_id,
            nbytes=load.nbytes,
            path=path,
            outcome="done" if command.error is None else type(command.error).__name__,
            phases=_dated(load.phases(now)),
            waited_s=waited_s,
        )
        self._trace(trace)
        if 0.0 < self._slow_load_s < waited_s:
            logger.warning("a load took %.3f s: %s", waited_s, trace)
        if not path:
            return None
        return TransferStats(
            request_id=command.request_id, nbytes=load.nbytes, seconds=load.seconds, path=path
        )

    def in_flight(self, now: float) -> tuple[LoadInFlight, ...]:
        """The loads that are read now. Any thread may ask."""
        return tuple(
            LoadInFlight(
                request_id=request_id,
                rank=self._rank,
                peer=load.engine_id,
                path="packed" if load.is_packed else "direct",
                nbytes=load.nbytes + int(sum(n * share for n, share in [*load.arriving.values()])),
                total_bytes=load.total_bytes,
                seconds=now - load.first_read_s,
            )
            for request_id, load in list(self._loads.items())
            if load.first_read_s is not None
        )

    def release(self, command: cmd.ReleaseBlocks, now: float) -> None:
        """A lease is over."""
        hold = self._forget(command.request_id)
        if hold is not None:
            trace = RequestTrace(
                request_id=command.request_id,
                kind="hold",
                outcome=command.outcome,
                phases=_dated(hold.phases(now)),
            )
            self._trace(trace)

    def _wanted(self, event: WantRequest, now: float) -> None:
        self._loads[event.request_id] = _Load(event.engine.engine_id, event.is_followed, now)

    def _load_asked(self, event: LoadRequest, now: float) -> None:
        load = self._loads.get(event.request_id)
        if load is not None:
            load.asked_s = now

    def _load_withdrawn(self, event: DropRequest, now: float) -> None:
        load = self._loads.get(event.request_id)
        if load is not None and load.asked_s is None:
            del self._loads[event.request_id]  # nobody waits for its end

    def _reading(self, command: cmd.StartReceive, now: float) -> None:
        load = self._loads.get(command.request_id)
        if load is not None:
            load.first_read_s = load.first_read_s or now
            load.last_read_s = now
            nbytes = command.source.total_bytes
            load.total_bytes += nbytes
            load.arriving[command.read_id] = nbytes, 0.0
            load.read_ids.append(command.read_id)
            self._origin_of_read[command.read_id] = command.request_id, command.link

    def _posted(self, event: ev.ReceivePosted, now: float) -> None:
        request_id, _ = self._origin_of_read.get(event.read_id, _NOWHERE)
        load = self._loads.get(request_id)
        if load is not None:
            load.is_packed = True

    def _advanced(self, event: ev.ReceiveAdvanced, now: float) -> None:
        request_id, _ = self._origin_of_read.get(event.read_id, _NOWHERE)
        load = self._loads.get(request_id)
        if load is not None:
            load.arriving[event.read_id] = load.arriving[event.read_id][0], event.share

    def _finished(self, event: ev.ReceiveFinished, now: float) -> None:
        request_id, link = self._origin_of_read.get(event.read_id, _NOWHERE)
        load = self._loads.get(request_id)
        if load is not None:
            load.nbytes += load.arriving.pop(event.read_id)[0]
            load.seconds = max(load.seconds, event.seconds)
            load.count(event.phases)
            falls_back = link in self.tcp_fallbacks and event.path != ev.DIRECT_PATH
            load.paths.add(event.path + TCP_FALLBACK * falls_back)

    def _granted(self, event: HoldRequest, now: float) -> None:
        if event.request_id not in self._holds:
            hold = self._holds[event.request_id] = _Hold(event.transfer_id, now)
            self._hold_of[event.transfer_id] = hold
        if event.is_complete:
            self._holds[event.request_id].complete_s = now

    def _withdrawn(self, event: WithdrawRequest, now: float) -> None:
        hold = self._holds.get(event.request_id)
        if hold is not None and hold.complete_s is None:
            self._forget(event.request_id)  # its blocks are the engine's, which waits for nothing

    def _sending(self, command: cmd.StartSend, now: float) -> None:
        key = command.link, command.read.read_id
        self._sends[key] = command.read.transfer_id, now

    def _sent(self, event: ev.SendFinished | ev.SendStopped, now: float) -> None:
        transfer_id, since = self._sends.pop((event.link, event.read_id), ("", 0.0))
        hold = self._hold_of.get(transfer_id)
        if hold is not None:
            hold.sends += (Phase("send", since, now), *event.phases)

    def _forget(self, request_id: str) -> _Hold | None:
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            del self._hold_of[hold.transfer_id]
        return hold

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        WantRequest: _wanted,
        LoadRequest: _load_asked,
        DropRequest: _load_withdrawn,
        cmd.StartReceive: _reading,
        ev.ReceivePosted: _posted,
        ev.ReceiveAdvanced: _advanced,
        ev.ReceiveFinished: _finished,
        HoldRequest: _granted,
        WithdrawRequest: _withdrawn,
        cmd.StartSend: _sending,
        ev.SendFinished: _sent,
        ev.SendStopped: _sent,
    }


def _dated(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The same in seconds since 1970, which the hosts of an engine share."""
    offset_s = time.time() - time.monotonic()
    return tuple([Phase(p.name, p.start_s + offset_s, p.end_s + offset_s) for p in phases])
