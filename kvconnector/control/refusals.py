"""What peers and strangers were refused: counted, and logged at most once per peer and minute."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

LOG_INTERVAL_S = 60.0
MAX_PEERS = 256
"""Peers that are told apart; the others share one entry, so that many of them cost no memory."""
_OTHERS = "others"


class Refusals:
    """`counts` are by reason. One thread at a time."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._logger = logger
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def note(self, peer: str, reason: str, details: object, times: int = 1) -> None:
        """Count a refusal, and log it unless `peer` had one logged within the last minute."""
        self.counts[reason] += times
        now = self._clock()
        if peer not in self._logged_at and len(self._logged_at) >= MAX_PEERS:
            self._forget(now)
            if len(self._logged_at) >= MAX_PEERS:
                peer = _OTHERS
        if now - self._logged_at.get(peer, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            self._unlogged[peer] += times
            return
        self._logged_at[peer] = now
        more = self._unlogged.pop(peer, 0)
        since = f" (and {more} times before, since it was last logged)" if more else ""
        self._logger.warning("refused %s: %s: %s%s", peer, reason, details, since)

    def _forget(self, now: float) -> None:
        for peer, at in list(self._logged_at.items()):
            if now - at >= LOG_INTERVAL_S:
                del self._logged_at[peer]
                self._unlogged.pop(peer, None)
