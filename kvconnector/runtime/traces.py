"""Transfers that are over: as spans' data, as statistics, and for the log line of a slow load."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvconnector.session import Phase, RequestTrace, TransferStats, WorkerStats
from kvconnector.session import commands as cmd
from kvconnector.session.commands import LinkId
from kvconnector.session.events import DIRECT_PATH

logger = logging.getLogger(__name__)

TCP_FALLBACK = "-tcp-fallback"
"""Ends the path of what came by TCP although RDMA ports are active on this host."""


class Traces:
    """A load that keeps its blocks waiting for longer than `slow_load_s` is logged; 0 logs none."""

    def __init__(self, slow_load_s: float) -> None:
        self._slow_load_s = slow_load_s

    def finish_load(
        self, command: cmd.FinishLoad, now: float, is_tcp_fallback: Callable[[LinkId], bool]
    ) -> WorkerStats:
        """A load is over: when its parts happened, and what it has moved, if it read anything. `is_tcp_fallback` is
        asked of producer workers: are they reached by TCP although RDMA ports are active here?
        """
        load = command.trace
        if load is None:
            return WorkerStats()
        paths = {
            path + TCP_FALLBACK * (path != DIRECT_PATH and is_tcp_fallback(LinkId(link)))
            for path, link in load.paths
        }
        path = "+".join(sorted(paths))
        waited_s = load.waited_s(now)
        trace = RequestTrace(
            request_id=command.request_id,
            kind="load",
            peer=load.peer,
            nbytes=load.nbytes,
            path=path,
            outcome="done" if command.error is None else type(command.error).__name__,
            phases=_dated(load.phases(now)),
            waited_s=waited_s,
        )
        if 0.0 < self._slow_load_s < waited_s:
            logger.warning("a load took %.3f s: %s", waited_s, trace)
        moved = TransferStats(
            request_id=command.request_id, nbytes=load.nbytes, seconds=load.seconds, path=path
        )
        return WorkerStats(transfers=(moved,) if path else (), traces=(trace,))

    def release(self, command: cmd.ReleaseBlocks, now: float) -> WorkerStats:
        """A lease is over."""
        trace = RequestTrace(
            request_id=command.request_id,
            kind="hold",
            outcome=command.outcome,
            phases=_dated(command.trace.phases(now)),
        )
        return WorkerStats(traces=(trace,))


def _dated(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The same in seconds since 1970, which the hosts of an engine share."""
    offset_s = time.time() - time.monotonic()
    return tuple([Phase(p.name, p.start_s + offset_s, p.end_s + offset_s) for p in phases])
