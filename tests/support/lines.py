"""Counting how much work a call is, on any machine."""

import sys


def lines_of(*calls):
    """Return the number of Python lines that some calls execute."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event == "line"
        return see

    sys.settrace(see)
    try:
        for call in calls:
            call()
    finally:
        sys.settrace(None)
    return count
