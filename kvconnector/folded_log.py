"""Warnings that may come in bursts: a few of each kind are logged per minute, and the next one counts the others."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from kvconnector.errors import one_line

LOG_INTERVAL_S = 60.0
MAX_KEYS = 256
"""Number of kinds that are counted separately. All others share one entry, so that many kinds cost no memory."""
_OTHERS = "others"


class FoldedLog:
    """Warnings by `key`, such as a peer or a cause: at most `burst` of a key in a minute. One thread at a time."""

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        burst: int = 1,
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._burst = burst
        self._logged: dict[str, tuple[float, int]] = {}
        """The time when a key's minute began, and how many of its warnings were logged in it."""
        self._unlogged: Counter[str] = Counter()

    def __repr__(self) -> str:
        unlogged = self._unlogged.total()
        return f"<{type(self).__name__}: {len(self._logged)} keys, {unlogged} not logged>"

    def warn(self, key: str, text: str, times: int = 1) -> None:
        """Log `text`, which stands for `times` events, unless the key's minute has had its warnings."""
        now = self._clock()
        if key not in self._logged and len(self._logged) >= MAX_KEYS:
            self.flush()
            if len(self._logged) >= MAX_KEYS:
                key = _OTHERS
        began_at, num_logged = self._logged.get(key, (now, 0))
        if now - began_at >= LOG_INTERVAL_S:
            began_at, num_logged = now, 0
        if num_logged >= self._burst:
            self._unlogged[key] += times
            return
        self._logged[key] = began_at, num_logged + 1
        more = self._unlogged.pop(key, 0)
        since = f" (and {more} times before, since it was last logged)" if more else ""
        self._logger.warning("%s%s", one_line(text), since)

    def flush(self, *, is_last: bool = False) -> None:
        """Log the number of warnings that were not logged, of keys whose minute is over; if `is_last`, of all keys."""
        now = self._clock()
        for key, (began_at, _) in list(self._logged.items()):
            if is_last or now - began_at >= LOG_INTERVAL_S:
                del self._logged[key]
                if more := self._unlogged.pop(key, 0):
                    self._logger.warning("%s: %d more like these", one_line(key), more)


class Refusals(FoldedLog):
    """Refusals of peers and strangers. `counts` are by reason."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logger, clock)
        self.counts: Counter[str] = Counter()

    def note(self, peer: str, reason: str, details: object, times: int = 1) -> None:
        """Count a refusal, and log it unless one of `peer` was logged within the last minute."""
        self.counts[reason] += times
        self.warn(peer, f"refused {peer}: {reason}: {details}", times)
