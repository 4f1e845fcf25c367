"""Processes forked from one that has imported torch, numba and ucxx, which a new interpreter needs seconds for."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from minillm import processes

_SERVER = "TESTS_FORK_SERVER"


def environment() -> dict[str, str]:
    """The environment of a new interpreter that finds what pytest has put on this one's path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _connect() -> socket.socket:
    """A connection to the server, which the first process to need one starts; it ends with that process."""
    if _SERVER not in os.environ:
        _start_server()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + os.environ[_SERVER])
    return connection


def _start_server() -> None:
    name = f"kvconnector-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=environment(),
        )
    atexit.register(server.communicate)
    os.environ[_SERVER] = name


class Process:
    """What tests use of `subprocess.Popen`, for `python arguments...`; it is killed when this process ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        assert command[0] == sys.executable
        self.returncode: int | None = None
        with contextlib.ExitStack() as exits:
            self.stdin, child_in = _stream(stdin, 0, exits)
            self.stdout, child_out = _stream(stdout, 1, exits)
            child_err = child_out if stderr is subprocess.STDOUT else _stream(stderr, 2, exits)[1]
            fds = [child_in, child_out, child_err, *pass_fds]
            environment = dict(os.environ if env is None else env)
            environment[_SERVER] = os.environ.get(_SERVER, "")
            self.connection = _connect()
            environment[_SERVER] = os.environ[_SERVER]
            request = {
                "arguments": list(command[1:]),
                "targets": [0, 1, 2, *pass_fds],
                "environment": environment,
            }
            socket.send_fds(self.connection, [json.dumps(request).encode()], fds)
        self.pid = int(self.connection.recv(64))

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self._finish()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self.connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._finish()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _finish(self) -> None:
        self.returncode = int(self.connection.recv(64) or -signal.SIGKILL)
        self.connection.close()


def _stream(given: Any, number: int, exits: contextlib.ExitStack) -> tuple[IO[Any] | None, int]:
    """Our end of a pipe if one is asked for, and the descriptor that the process gets."""
    if given is subprocess.PIPE:
        reader, writer = os.pipe()
        ours, theirs = (writer, reader) if number == 0 else (reader, writer)
        exits.callback(os.close, theirs)
        return os.fdopen(ours, "wb" if number == 0 else "rb"), theirs
    if given is subprocess.DEVNULL:
        theirs = os.open(os.devnull, os.O_RDWR)
        exits.callback(os.close, theirs)
        return None, theirs
    return None, number if given is None else given.fileno()


class _AsyncProcess:
    """What minillm uses of `asyncio.subprocess.Process`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid, self.send_signal, self.kill = process.pid, process.send_signal, process.kill
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(process.connection, self._note_end)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._process.connection)
        self._ended.set_result(self._process.wait())


class ForkedChild(processes.Child):
    """A server or a rank of minillm. A server's ranks are forked too."""

    @classmethod
    async def start(
        cls, name: str, module: str, arguments: Sequence[str], log_path: Path
    ) -> processes.Child:
        """As `Child.start`."""
        command = [sys.executable, "-m", "tests.support.forked", module, *arguments]
        with log_path.open("ab") as log:
            process = Process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        started: Any = _AsyncProcess(process)
        return cls(name, started, log_path)


def _main() -> None:
    import runpy

    processes.Child.start = ForkedChild.start  # type: ignore[method-assign]
    del sys.argv[0]
    sys.modules.pop(sys.argv[0], None)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
