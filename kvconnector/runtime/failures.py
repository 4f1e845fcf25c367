"""Failed requests in an engine's log: once each, no matter how many ranks it has, and a burst in one line."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from kvconnector.errors import TransferAbortedError
from kvconnector.folded_log import FoldedLog

logger = logging.getLogger(__name__)

MAX_IN_A_LINE = 5
"""Most requests that one line names."""
UNKNOWN = "no worker said why"
LINES_A_MINUTE = 10
"""Of each cause."""


class FailureLog:
    """The scheduler half's log of failures in an engine's aggregated outputs. Aborts are not failures."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._log = FoldedLog(logger, burst=LINES_A_MINUTE)

    def note(self, what: str, reasons: Mapping[str, str]) -> None:
        """Log why requests failed, those with one cause together.

        Args:
            what: The kind of operation that failed, such as "load".
            reasons: By request, as in `WorkerOutput`: an error's class, a colon and its text, with the remedy.
        """
        if not reasons:
            return
        by_cause: defaultdict[str, list[str]] = defaultdict(list)
        for request_id, reason in reasons.items():
            by_cause[reason.partition(" [")[0]].append(request_id)
        for cause, requests in by_cause.items():
            named = ", ".join(requests[:MAX_IN_A_LINE])
            if len(requests) > MAX_IN_A_LINE:
                named += f" and {len(requests) - MAX_IN_A_LINE} more"
            text = f"{self._engine_id}: {what} of {named} failed: {reasons[requests[0]] or UNKNOWN}"
            if cause.startswith(TransferAbortedError.__name__):
                logger.debug("%s", text)
            else:
                self._log.warn(f"{what} {cause}", text, len(requests))
