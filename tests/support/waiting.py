"""Waiting for what must happen: never for a time, and never for ever."""

import time

DEADLINE_S = 40.0
"""Longest wait for anything. Generous: it ends a hung test, and measures nothing."""


def until(condition, step=lambda: time.sleep(1e-3), seen=lambda: "nothing came of it"):
    """Take steps until a condition holds, and return its value. A wait that is too long fails with what was seen."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not in time: {seen()}"
        step()
    return found
