"""The process that `tests.support.forked` forks from: torch, numba, ucxx and what uses them are imported and compiled.

Run as a program it serves a listening socket, whose descriptor is its argument, until its standard input ends. A
request is JSON with descriptors; the answers are the new process's id and then its exit status. A process whose
connection is closed is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.util
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
from typing import Any, NoReturn

from kvconnector_kernels.pump import copy_cpu

MAX_REQUEST_BYTES = 1 << 20
MAX_FDS = 16
_FIRST_SPARE_FD = 500
# Nothing of this may start a thread or open a device when it is imported.
_PRELOADED = (
    "kvconnector.bench.rank_process",
    "kvconnector.datapath.pump.selftest",
    "minillm.router",
    "minillm.server",
    "minillm.worker",
    "tests.support.fakes",
    "tests.support.transport_suite",
)


def _preload() -> None:
    for module in _PRELOADED:
        importlib.import_module(module)
    if importlib.util.find_spec("ucxx") is not None:
        importlib.import_module("ucxx")
    copy_cpu.compile_copy()


def _serve(listener: socket.socket) -> None:
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ, "parent")
    selector.register(listener, selectors.EVENT_READ, "listener")
    while True:
        for key, _ in selector.select():
            if key.data == "parent":
                return
            if key.data == "listener":
                connection, _ = listener.accept()
                pid = _fork(connection)
                pidfd = os.pidfd_open(pid)
                selector.register(pidfd, selectors.EVENT_READ, (pid, pidfd, connection))
                selector.register(connection, selectors.EVENT_READ, (pid, pidfd, None))
                continue
            pid, pidfd, connection = key.data
            if connection is None:
                selector.unregister(key.fileobj)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                continue
            _, status = os.waitpid(pid, 0)
            selector.unregister(pidfd)
            os.close(pidfd)
            with contextlib.suppress(KeyError):
                selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def _fork(connection: socket.socket) -> int:
    """Fork what the connection asks for; returns in the server alone."""
    request, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_FDS)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # the server's own descriptors stay in objects that live to the end, and nobody closes their numbers again
            status = _become(fds, **json.loads(request))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for fd in fds:
        os.close(fd)
    connection.send(str(pid).encode())
    return pid


def _become(
    fds: list[int], *, arguments: list[str], targets: list[int], environment: dict[str, str]
) -> int:
    """Do what `python arguments...` does. Returns the exit status."""
    os.setsid()
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_SPARE_FD) for fd in fds]
    os.closerange(3, _FIRST_SPARE_FD)
    for fd, target in zip(spare, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    random.seed()
    status = _run(arguments)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _run(arguments: list[str]) -> int:
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.modules.pop(arguments[1], None)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return _status_of(end.code)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _status_of(code: Any) -> int:
    if isinstance(code, str):
        sys.stderr.write(code + "\n")
    return code if isinstance(code, int) else int(code is not None)


def main() -> NoReturn:
    _preload()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
