"""The process that made an object with threads, sockets and mappings, of which a forked child has only the names."""

from __future__ import annotations

import os

from kvconnector.errors import LocalError


class OwnProcess:
    """The process of an object, `what` in errors. Checks take well below a microsecond."""

    def __init__(self, what: str) -> None:
        self._what, self._id = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the object, False in a child that it has forked."""
        return os.getpid() == self._id

    def check(self) -> None:
        """Raise LocalError in a forked child. Its calls would wait for threads that only the other process has, and
        write into memory and sockets that both share.
        """
        if os.getpid() != self._id:
            raise LocalError(
                f"this {self._what} belongs to the process that made it, from which this one was forked: make one here,"
                " or start the process with the method spawn",
                made_in=self._id,
                process=os.getpid(),
            )
