"""Objects in other processes, with methods that are called from here.

Run as a program, this is such a process. Its arguments are the descriptor of a pipe, and "module:callable", which makes
the object with the arguments of the first call. It serves calls until the other end of the pipe is closed.
"""

import functools
import importlib
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from kvconnector.errors import KVConnectorError
from tests.support import forked
from tests.support.libraries import has_ucx

END_S = 40.0


class RemoteObject:
    """An object, made by `maker` in a forked process or in one that the command `prefix` starts.

    The package's errors that its methods raise are raised here.
    """

    def __init__(self, maker, *arguments, prefix=(), **options):
        start = subprocess.Popen if prefix else forked.Process
        self._pipe, theirs = Pipe()
        with theirs:
            program = [sys.executable, "-m", "tests.support.remote", str(theirs.fileno()), maker]
            self.child = start(
                [*prefix, *program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=forked.environment(),
            )
        try:
            self.call("", *arguments, **options)
        except KVConnectorError:
            self.release()
            raise

    def __getattr__(self, name):
        return functools.partial(self.call, name)

    def call(self, name, *arguments, **options):
        """Return the result of a method, or the value of an attribute."""
        self.begin(name, *arguments, **options)
        return self.answer()

    def begin(self, name, *arguments, **options):
        """Start a call in the child; `answer` waits for its result."""
        self._pipe.send((name, arguments, options))

    def answer(self):
        """Return the answer to the oldest call that was begun."""
        error, value = self._pipe.recv()
        if error is not None:
            raise error
        return value

    def kill(self):
        """End the child as a crash does."""
        self.child.kill()
        self.child.wait(END_S)

    def release(self):
        """End the child, if it runs, and wait for it. Idempotent."""
        self._pipe.close()
        self.child.wait(END_S)


def main():
    has_ucx()
    pipe = Connection(int(sys.argv[1]))
    module, _, maker = sys.argv[2].partition(":")
    target = None
    while True:
        try:
            name, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            found = getattr(target if name else importlib.import_module(module), name or maker)
            value = found(*arguments, **options) if callable(found) else found
            if not name:
                target, value = value, None
            pipe.send((None, value))
        except KVConnectorError as error:
            pipe.send((error, None))


if __name__ == "__main__":
    main()
