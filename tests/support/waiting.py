"""Waits for conditions, with a deadline."""

import time

DEADLINE_S = 40.0
"""The longest wait, in seconds. It is generous: it ends a hung test and measures nothing."""


def until(condition, step=lambda: time.sleep(1e-3), seen=lambda: "no details"):
    """Take steps until a condition is true, and return its value. After the deadline, fail with the value of `seen`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not in time: {seen()}"
        step()
    return found
