"""Processes forked from one that has imported torch and ucxx: these imports take a new interpreter seconds."""

import asyncio
import atexit
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from kvconnector.bench import processes as bench_processes
from minillm import processes

forkserver.set_forkserver_preload(["tests.support.preloaded"])


def environment():
    """Return the environment of a new interpreter with this one's import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_python(*arguments, **variables):
    """Run a new interpreter with this one's import path. Returns its output; fails unless it succeeds."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Process(ForkServerProcess):
    """The part of `subprocess.Popen` that tests use, for `python arguments...`. It is killed when this process ends.

    It has no standard input. Descriptors passed to it have other numbers there, also in its arguments.
    """

    def __init__(
        self, command, *, stdin=subprocess.DEVNULL, stdout=None, stderr=None, pass_fds=(), env=None
    ):
        assert (command[0], stdin) == (sys.executable, subprocess.DEVNULL)
        outputs = [each.fileno() for each in (stdout or sys.__stdout__, stderr or sys.__stderr__)]
        # a connection sent to another process has a new descriptor there
        fds = {fd: Connection(os.dup(fd)) for fd in (*outputs, *pass_fds)}
        environ = dict(os.environ if env is None else env)
        with mock.patch.dict(os.environ, environment()):
            forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_address
        super().__init__(target=_become, args=(command[1:], environ, outputs, fds, server))
        self.start()

    @property
    def returncode(self):
        return self.exitcode

    def poll(self):
        return self.exitcode

    def wait(self, timeout=None):
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.exitcode

    def send_signal(self, number):
        """Send a signal, unless the process has ended."""
        if self.exitcode is None:
            os.kill(self.pid, number)


POPEN = SimpleNamespace(
    Popen=Process, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
)
"""The part of `subprocess` that `kvconnector.bench.processes` uses."""


def forked_by(pid):
    """Return the processes that process `pid` has had forked. They are not its children: one server forks them all.

    They are known by files in the folder that TMPDIR names, so by none without it.
    """
    folder = os.environ.get("TMPDIR")
    found = Path(folder).glob(f"{pid}.*.forked") if folder else ()
    return [int(path.name.split(".")[1]) for path in found]


def _become(command, environ, outputs, fds, server):
    """Run `python command...` in this process. Its child processes are forked from the same `server`."""
    os.setsid()
    forkserver._forkserver._forkserver_address = server
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for target, fd in enumerate(outputs, 1):
        os.dup2(fds[fd].fileno(), target)
    os.environ.clear()
    os.environ.update(environ)
    if folder := environ.get("TMPDIR"):
        Path(folder, f"{multiprocessing.parent_process().pid}.{os.getpid()}.forked").touch()
    tempfile.tempdir = None
    random.seed()
    processes.Child.start = ForkedChild.start
    bench_processes.subprocess = POPEN
    numbers = {str(number): str(os.dup(fd.fileno())) for number, fd in fds.items()}
    sys.argv = [numbers.get(argument, argument) for argument in command if argument != "-P"]
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            sys.modules.pop(sys.argv[0], None)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _end_with_parent():
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class _AsyncProcess(Process):
    """The part of `asyncio.subprocess.Process` that minillm uses."""

    async def wait(self):
        while self.exitcode is None:
            await asyncio.sleep(0.01)
        return self.exitcode


class ForkedChild(processes.Child):
    """A forked server or rank of minillm. A server's ranks are forked too."""

    @classmethod
    async def start(cls, name, module, arguments, log_path):
        command = [sys.executable, "-m", module, *arguments]
        with log_path.open("ab") as log:
            return cls(name, _AsyncProcess(command, stdout=log, stderr=log), log_path)
