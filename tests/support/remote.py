"""Objects in processes of their own, whose methods are called from here.

Run as a program it is such a process: it makes what its argument names, "module:callable", with the arguments of the
first call, and serves calls until its standard input ends.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from kvconnector.errors import KVConnectorError
from tests.support import forked

END_S = 40.0


class RemoteObject:
    """What `maker` makes of these arguments, in a forked process, or in one that the command `prefix` starts elsewhere.

    Errors of the package that its methods raise are raised here.
    """

    def __init__(self, maker: str, *arguments: object, prefix: Sequence[str] = ()) -> None:
        start: Any = subprocess.Popen if prefix else forked.Process
        self.child = start(
            [*prefix, sys.executable, "-m", "tests.support.remote", maker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=forked.environment(),
        )
        self._calls = Connection(_taken(self.child.stdin), readable=False)
        self._answers = Connection(_taken(self.child.stdout), writable=False)
        try:
            self.call("", *arguments)
        except KVConnectorError:
            self.release()
            raise

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self.call, name)

    def call(self, name: str, *arguments: object) -> Any:
        """What a method returns, or an attribute's value."""
        self.begin(name, *arguments)
        return self.answer()

    def begin(self, name: str, *arguments: object) -> None:
        """Let the child start something; `answer` waits for its end."""
        self._calls.send((name, arguments))

    def answer(self) -> Any:
        """The answer to the oldest call that was begun."""
        error, value = self._answers.recv()
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        """End the child as a crash does."""
        self.child.kill()
        self.child.wait(END_S)

    def release(self) -> None:
        """Let the child end, if it has not, and wait for that. Idempotent."""
        self._calls.close()
        self._answers.close()
        self.child.wait(END_S)


def _taken(stream: IO[bytes]) -> int:
    with stream:
        return os.dup(stream.fileno())


def main() -> None:
    """The child."""
    # UCX logs to standard output: keep that for answers, and let the log go to standard error.
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    calls = Connection(os.dup(0), writable=False)
    module, _, maker = sys.argv[1].partition(":")
    target: Any = None
    while True:
        try:
            name, arguments = calls.recv()
        except EOFError:
            return
        try:
            found = getattr(target if name else importlib.import_module(module), name or maker)
            value = found(*arguments) if callable(found) else found
            if not name:
                target, value = value, None
            answers.send((None, value))
        except KVConnectorError as error:
            answers.send((error, None))


if __name__ == "__main__":
    main()
