"""Processes forked from one that has imported torch, numba and ucxx, which a new interpreter needs seconds for."""

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
from multiprocessing import forkserver, reduction
from multiprocessing.connection import wait
from unittest import mock

from minillm import processes

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.preloaded"])


def environment():
    """The environment of a new interpreter that finds what pytest has put on this one's path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Process:
    """What tests use of `subprocess.Popen`, for `python arguments...`; it is killed when this process ends.

    It reads nothing. Descriptors that it is passed have other numbers there, also among its arguments.
    """

    def __init__(
        self, command, *, stdin=subprocess.DEVNULL, stdout=None, stderr=None, pass_fds=(), env=None
    ):
        assert (command[0], stdin) == (sys.executable, subprocess.DEVNULL)
        with mock.patch.dict(os.environ, environment()):
            forkserver.ensure_running()
        outputs = (stdout or sys.__stdout__, stderr or sys.__stderr__)
        fds = _Descriptors([each.fileno() for each in outputs if each], pass_fds)
        environ = dict(os.environ if env is None else env)
        self._process = _CONTEXT.Process(target=_become, args=(command[1:], environ, fds))
        self._process.start()
        self.pid, self.sentinel = self._process.pid or 0, self._process.sentinel
        self.kill = self._process.kill

    @property
    def returncode(self):
        """The exit status, or None while it runs."""
        return self._process.exitcode

    def poll(self):
        """The same."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """The exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode

    def send_signal(self, number):
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class _Descriptors:
    """Of a new process, which has them once this is pickled for it and unpickled there."""

    def __init__(self, outputs, others):
        self.outputs, self.others = outputs, dict.fromkeys(others, 0)

    def __getstate__(self):
        others = {number: reduction.DupFd(number) for number in self.others}
        return [reduction.DupFd(number) for number in self.outputs], others

    def __setstate__(self, state):
        self.outputs = [each.detach() for each in state[0]]
        self.others = {number: each.detach() for number, each in state[1].items()}


def _become(command, environ, fds):
    """Do what `python command...` does."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for target, fd in enumerate(fds.outputs, 1):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    random.seed()
    processes.Child.start = ForkedChild.start
    numbers = {str(number): str(fd) for number, fd in fds.others.items()}
    sys.argv = [numbers.get(argument, argument) for argument in command]
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
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class _AsyncProcess:
    """What minillm uses of `asyncio.subprocess.Process`."""

    def __init__(self, process):
        self.pid, self.send_signal, self.kill = process.pid, process.send_signal, process.kill
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._loop.add_reader(process.sentinel, self._note_end)

    @property
    def returncode(self):
        return self._ended.result() if self._ended.done() else None

    async def wait(self):
        return await asyncio.shield(self._ended)

    def _note_end(self):
        self._loop.remove_reader(self._process.sentinel)
        self._ended.set_result(self._process.wait())


class ForkedChild(processes.Child):
    """A server or a rank of minillm. A server's ranks are forked too."""

    @classmethod
    async def start(cls, name, module, arguments, log_path):
        """As `Child.start`."""
        command = [sys.executable, "-m", module, *arguments]
        with log_path.open("ab") as log:
            process = Process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        started = _AsyncProcess(process)
        return cls(name, started, log_path)
