"""A transport in a second process, behind a proxy that fulfils the same contract: calls go over the child's pipes.

Run as a program it is the child: it reads calls from stdin and answers on stdout until stdin ends.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec

from kvconnector import errors
from kvconnector.transport.base import (
    NO_FILENO,
    Buffer,
    Completion,
    ControlEvent,
    ControlFailed,
    ControlMessage,
    ControlRefused,
    MessageSizeError,
)
from kvconnector.transport.ucx import open_ucx_transport
from tests.support import forked
from tests.support.transport_suite import HostMemory

_LENGTH = struct.Struct("<I")


def _write(stream: BinaryIO, value: object) -> None:
    """Errors travel as their class's name and their text, dataclasses by their fields."""
    encoded = msgspec.msgpack.encode(
        value, enc_hook=lambda error: [type(error).__name__, str(error)]
    )
    stream.write(_LENGTH.pack(len(encoded)) + encoded)
    stream.flush()


def _read(stream: BinaryIO) -> Any:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    return msgspec.msgpack.decode(stream.read(_LENGTH.unpack(header)[0]))


def _decode_error(encoded: list[str] | None) -> errors.KVConnectorError | None:
    if encoded is None:
        return None
    name, text = encoded
    kind = MessageSizeError if name == "MessageSizeError" else getattr(errors, name)
    error = kind(text)
    assert isinstance(error, errors.KVConnectorError)
    return error


def _decode_control(fields: dict[str, Any]) -> ControlEvent:
    if "payload" in fields:
        return ControlMessage(**fields)
    if "error" not in fields:
        return ControlRefused(**fields)
    error = _decode_error(fields["error"])
    assert error is not None
    return ControlFailed(fields["endpoint"], error)


class RemoteMemory:
    """Memory of the child. `buffer.address` is the child's."""

    def __init__(self, remote: RemoteTransport, nbytes: int) -> None:
        self._remote = remote
        self._key, address = remote.call("allocate", nbytes)
        self.buffer = Buffer(address, nbytes, "cpu", self)

    def write(self, content: bytes) -> None:
        self._remote.call("write", self._key, content)

    def read(self) -> bytes:
        content = self._remote.call("read", self._key)
        assert isinstance(content, bytes)
        return content


class RemoteTransport:
    """A `UcxTransport` in a child process, with its settings. `prefix` is the command that runs the child elsewhere."""

    def __init__(self, settings: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        argv = [*prefix, sys.executable, __file__]
        start = subprocess.Popen if prefix else forked.Process
        self.child = start(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=forked.environment()
        )
        self._closing = self._closed = False
        try:
            self.call("open", settings)
        except errors.KVConnectorError:
            self.release()
            raise

    def call(self, method: str, *args: object) -> Any:
        self.begin(method, *args)
        return self._answer()

    def begin(self, method: str, *args: object) -> None:
        """Let the child start something, without waiting for its end."""
        assert self.child.stdin is not None
        _write(self.child.stdin, [method, *args])

    def _answer(self) -> Any:
        assert self.child.stdout is not None
        error, value = _read(self.child.stdout)
        failure = _decode_error(error)
        if failure is not None:
            raise failure
        return value

    @property
    def address(self) -> bytes:
        address = self.call("address")
        assert isinstance(address, bytes)
        return address

    def connect(self, address: bytes) -> int:
        return int(self.call("connect", address))

    def disconnect(self, endpoint: int) -> None:
        self.call("disconnect", endpoint)

    def send(self, endpoint: int, tag: int, buffer: Buffer) -> int:
        return int(self.call("send", endpoint, tag, replace(buffer, owner=None)))

    def recv(self, tag: int, buffer: Buffer) -> int:
        return int(self.call("recv", tag, replace(buffer, owner=None)))

    def cancel(self, ticket: int) -> None:
        self.call("cancel", ticket)

    def progress(self) -> list[Completion]:
        ended = self.call("progress")
        return [Completion(each["ticket"], _decode_error(each["error"])) for each in ended]

    def send_control(self, endpoint: int, tag: int, payload: bytes) -> None:
        self.call("send_control", endpoint, tag, payload)

    def receive_control(
        self, limits: Mapping[int, int], *, progress: bool = False
    ) -> list[ControlEvent]:
        events = self.call("receive_control", dict(limits), progress)
        return [_decode_control(event) for event in events]

    def discard_unexpected(self, awaited: Collection[int], mask: int) -> int:
        return int(self.call("discard_unexpected", list(awaited), mask))

    def fileno(self) -> int:
        return NO_FILENO

    def begin_close(self) -> None:
        """Let the child close; `close` waits for it."""
        if not self._closing and not self._closed:
            self._closing = True
            self.begin("close")

    def close(self) -> None:
        self.begin_close()
        if not self._closed:
            self._closed = True
            self._answer()

    def allocate(self, nbytes: int) -> RemoteMemory:
        return RemoteMemory(self, nbytes)

    def release(self) -> None:
        """End the child, after `close`."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.close()
        self.child.stdout.close()
        self.child.wait(30)

    def kill(self) -> None:
        """End the child as a crash does."""
        self._closed = True
        self.child.kill()


class _Child:
    """The other end: one method per call that is not the transport's own."""

    def __init__(self) -> None:
        self._memory: dict[int, HostMemory] = {}
        self._transport: Any = None

    def dispatch(self, method: str, args: list[Any]) -> object:
        own = getattr(self, f"do_{method}", None)
        buffers = [
            Buffer(**arg) if isinstance(arg, dict) and "address" in arg else arg for arg in args
        ]
        return own(*args) if own else getattr(self._transport, method)(*buffers)

    def do_open(self, settings: dict[str, Any]) -> None:
        self._transport = open_ucx_transport(**settings)

    def do_address(self) -> object:
        return self._transport.address

    def do_allocate(self, nbytes: int) -> tuple[int, int]:
        memory = HostMemory(nbytes)
        self._memory[len(self._memory)] = memory
        return len(self._memory) - 1, memory.buffer.address

    def do_write(self, key: int, content: bytes) -> None:
        self._memory[key].write(content)

    def do_read(self, key: int) -> bytes:
        return self._memory[key].read()

    def do_receive_control(self, limits: dict[int, int], progress: bool) -> object:
        return self._transport.receive_control(limits, progress=progress)

    def do_drive(self, seconds: float) -> int:
        """Progress for a while; the number of completions."""
        count, end_s = 0, time.monotonic() + seconds
        while time.monotonic() < end_s:
            count += len(self._transport.progress())
            time.sleep(0.0005)
        return count

    def do_wakeups(self, seconds: float) -> int:
        """Sleep as a driver does, for a while; how often the transport woke it."""
        count, end_s = 0, time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._transport.fileno(), select.POLLIN)
        self._transport.progress()
        while time.monotonic() < end_s:
            if poller.poll(20):
                count += 1
                self._transport.progress()
        return count


def main() -> None:
    # UCX logs to standard output: keep that for answers, and let the log go to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    child = _Child()
    while True:
        try:
            method, *args = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = [None, child.dispatch(method, args)]
        except errors.KVConnectorError as exc:
            reply = [exc, None]
        _write(answers, reply)


if __name__ == "__main__":
    main()
