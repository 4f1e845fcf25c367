"""Transfers that are over: what traces and statistics report of them, and the log line of a slow load."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvconnector.session import Phase, RequestTrace, TransferStats
from kvconnector.session import commands as cmd
from kvconnector.session.commands import LinkId
from kvconnector.session.events import DIRECT_PATH

logger = logging.getLogger(__name__)

TCP_FALLBACK = "-tcp-fallback"
"""Ends the path of what came by TCP although RDMA ports are active on this host."""


def finished_load(
    command: cmd.FinishLoad,
    now: float,
    slow_load_s: float,
    is_tcp_fallback: Callable[[LinkId], bool],
) -> tuple[RequestTrace | None, TransferStats | None]:
    """Return when the parts of a load happened, and what it moved if it read anything. Log it if it was slow.

    Args:
        command: How the load ended.
        now: The sessions' time, in seconds.
        slow_load_s: A load whose blocks waited for longer is logged; 0 logs none.
        is_tcp_fallback: Returns True if a producer worker is reached by TCP although RDMA ports are active here.
    """
    load = command.trace
    if load is None:
        return None, None
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
    if 0.0 < slow_load_s < waited_s:
        logger.warning("a load took %.3f s: %s", waited_s, trace)
    if not path:
        return trace, None
    return trace, TransferStats(
        request_id=command.request_id, nbytes=load.nbytes, seconds=load.seconds, path=path
    )


def ended_lease(command: cmd.ReleaseBlocks, now: float) -> RequestTrace:
    """Return when the parts of a lease happened. `now`: the sessions' time, in seconds."""
    return RequestTrace(
        request_id=command.request_id,
        kind="hold",
        outcome=command.outcome,
        phases=_dated(command.trace.phases(now)),
    )


def _dated(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Return the phases in seconds since 1970, which the hosts of an engine share."""
    offset_s = time.time() - time.monotonic()
    return tuple([Phase(p.name, p.start_s + offset_s, p.end_s + offset_s) for p in phases])
