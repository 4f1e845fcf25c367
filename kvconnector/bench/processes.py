"""Processes that answer calls through a pipe: one per engine, and below it one per rank.

A call is a method and its arguments as msgpack, which the method's annotations decode. Nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import msgspec

from kvconnector.bench.options import THREAD_VARIABLES
from kvconnector.errors import KVConnectorError

LOG_TAIL_BYTES = 3000
ANSWER_TIMEOUT_S = 300.0
"""Long enough for the first start of all, which compiles kernels."""
STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1

Usage: TypeAlias = tuple[float, float, int, int]
"""Resident MiB of a process's own and shared with others (pools that a peer reads are), open descriptors, threads."""


class CallFailedError(KVConnectorError):
    """A call raised in the other process, or that process is gone. The text is the error's, or the end of the log."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The answer to a call that did not return."""

    text: str


def encode_call(method: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Return the call as bytes for `answer`."""
    return msgspec.msgpack.encode((method.__name__, arguments))


def answer(target: object, request: bytes, methods: Sequence[str]) -> bytes:
    """Call one of `methods` of `target`. Returns its result, or its error, as bytes for `decode_answer`."""
    try:
        name, arguments = msgspec.msgpack.decode(request, type=tuple[str, list[msgspec.Raw]])
        if name not in methods:
            raise CallFailedError("there is no such method", method=name)
        method = getattr(target, name)
        hints = get_type_hints(method)
        parameters = inspect.signature(method).parameters
        pairs = zip(parameters, arguments, strict=True)
        result = (
            method(*(msgspec.msgpack.decode(each, type=hints[name]) for name, each in pairs)),
        )
    except CallFailedError as error:  # in a process below this one, which the error names
        return failure(f"failed: {error}")
    except KVConnectorError as error:
        return failure(f"failed: {type(error).__name__}: {error}")
    except Exception as error:
        # the caller must get every error instead of waiting
        return failure("failed: " + "".join(traceback.format_exception(error)))
    return msgspec.msgpack.encode(result)


def failure(text: str) -> bytes:
    """Return an answer that says why there is no result."""
    return msgspec.msgpack.encode(Failed(text.strip()))


def decode_answer(name: str, method: Callable[..., Any], answered: bytes) -> Any:
    """Return the method's result. Raises CallFailedError: it raised in the process `name`."""
    result: Any = get_type_hints(method)["return"]
    decoded = msgspec.msgpack.decode(answered, type=Failed | tuple[result])
    if isinstance(decoded, Failed):
        raise CallFailedError(f"{name} {decoded.text}")
    return decoded[0]


class Child:
    """A process that runs `kvconnector.bench.<module>` and answers calls, see `serve_calls`. It decodes `options` from
    JSON. Its stdout and stderr go to a file, whose end explains a failure.
    """

    host = "127.0.0.1"

    def __init__(self, module: str, options: object, environment: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        with theirs:
            self._process = subprocess.Popen(
                [
                    # -P: what it imports does not depend on where this process was started
                    *(sys.executable, "-P", "-m", f"kvconnector.bench.{module}"),
                    *(str(theirs.fileno()), msgspec.json.encode(options).decode()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    **dict.fromkeys(THREAD_VARIABLES, "1"),
                    "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                    **environment,
                },
            )

    def send(self, call: bytes) -> None:
        with suppress(OSError):  # `receive` reports the end of the process
            self._connection.send_bytes(call)

    def receive(self) -> bytes:
        """Wait for the answer. Returns a failure if the process ended, or did not answer in time."""
        try:
            if not self._connection.poll(ANSWER_TIMEOUT_S):
                return failure(f"did not answer in {ANSWER_TIMEOUT_S:.0f} s")
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            log = self._log.read().decode(errors="replace").strip()
            return failure(f"ended; its output: {log or 'none'}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the process by closing its connection, or kill it after `STOP_TIMEOUT_S`."""
        self.signal(signal.SIGCONT)
        self._connection.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._log.close()


def serve_calls(descriptor: int, make: Callable[[], Any]) -> None:
    """Make an object, and answer calls of its public methods through a pipe until the parent closes the pipe or is
    gone; then close the object. If it cannot be made, the process ends with the error's text.
    """
    # a process that is stopped between its turns cannot see that the connection is closed
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    try:
        target = make()
    except KVConnectorError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    methods = [name for name in vars(type(target)) if not name.startswith("_")]
    with Connection(descriptor) as connection:
        try:
            while True:
                connection.send_bytes(answer(target, connection.recv_bytes(), methods))
        except (EOFError, OSError):
            return
        finally:
            target.close()


def process_usage() -> Usage:
    """Return the memory, descriptors and threads of this process."""
    status = dict(
        re.findall(r"(Rss\w+):\s+(\d+) kB", Path("/proc/self/status").read_text("ascii", "replace"))
    )
    own_mib, shared_mib = (int(status[name]) / 1024 for name in ("RssAnon", "RssShmem"))
    descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return own_mib, shared_mib, descriptors, threads
