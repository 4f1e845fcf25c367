"""An engine's ranks as processes, here or at a `bench serve`: starting them, calling their methods, and ending them.

Here each rank has a pipe. A producer on another host has a connection of its own, over the control channel with its
keys: it begins with `_Server.open`, the methods in `REMOTE` are called through it, and the ranks end with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from kvconnector import __version__
from kvconnector.bench.between_hosts import perftest_server, serve_stream
from kvconnector.bench.options import THREAD_VARIABLES, BenchOptions, control_settings
from kvconnector.bench.peers import peer_variables
from kvconnector.bench.rank_process import (
    CallFailedError,
    EngineSpec,
    RankProcess,
    answer,
    decode_answer,
    encode_call,
    failure,
)
from kvconnector.bench.results import ShowProgress
from kvconnector.config import ConnectorConfig, ControlConfig, PeerConfig, is_loopback
from kvconnector.control.address import parse_address
from kvconnector.control.base import Disconnected, PeerHandle, Received
from kvconnector.control.zmq import ControlChannel
from kvconnector.errors import ConfigError
from kvconnector.ids import new_secret
from kvconnector.runtime.channels import open_control

LOG_TAIL_BYTES = 3000
ANSWER_TIMEOUT_S = 300.0
"""The first start of all compiles kernels."""
STOP_TIMEOUT_S = 10.0
POLL_S = 0.5
HELLO_TIMEOUT_S = 3.0
SESSION = new_secret()
"""Of this process: a server measures with one at a time."""
REMOTE = ("exchange", "serve_stream", "serve_perftest", "pause", "resume")
"""What a server's engine is asked in the place of one here."""

Result = TypeVar("Result")


class Child:
    """A process that runs `kvconnector.bench.<module>` and answers calls, see `serve_calls`. It decodes `options` from
    JSON. Its stdout and stderr go to a file, whose end explains a failure.
    """

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
        with suppress(OSError):  # what became of it is reported where the answer is missing
            self._connection.send_bytes(call)

    def receive(self) -> bytes:
        """Its answer, or that it ended or did not answer in time."""
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
        """Close its connection, which ends it; killed after `STOP_TIMEOUT_S`."""
        self.signal(signal.SIGCONT)
        self._connection.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._log.close()


class EngineProcesses(ExitStack):
    """All ranks of one engine, in rank order; the first call says whether they started. `close` ends them."""

    def __init__(
        self, spec: EngineSpec, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.spec = spec
        self.host = spec.control.host if spec.control else "127.0.0.1"
        self._children: list[Child] = []
        self._perftest = self.enter_context(ExitStack())
        try:
            for index in range(len(spec.shape.ranks)):
                child = Child("rank_process", (spec, index), environment)
                self.callback(child.stop)
                self._children.append(child)
        except BaseException:
            self.close()
            raise

    def begin(self, method: Callable[..., Result], *arguments: Any) -> Callable[[], list[Result]]:
        """Call a method of `RankProcess` in every rank at once. The function that comes back waits for the results, and
        raises CallFailedError: a rank failed or ended. All have answered before that, or never will.
        """
        answers = self._send(encode_call(method, arguments))
        names = [f"{self.spec.engine_id} {rank}" for rank in self.spec.shape.ranks]
        return lambda: [
            decode_answer(name, method, answer)
            for name, answer in zip(names, answers(), strict=True)
        ]

    def call(self, method: Callable[..., Result], *arguments: Any) -> list[Result]:
        """`begin`, and wait: each rank's result."""
        return self.begin(method, *arguments)()

    def _send(self, call: bytes) -> Callable[[], list[bytes]]:
        for child in self._children:
            child.send(call)
        return lambda: [child.receive() for child in self._children]

    def exchange(self, call: bytes) -> list[bytes]:
        return self._send(call)()

    def serve_stream(self, nbytes: int) -> int:
        """Answer one client of a raw socket with up to `nbytes`: the port on `host`."""
        return serve_stream(self.host, nbytes)

    def serve_perftest(self, library: str, variables: dict[str, str]) -> int:
        """Start `ucx_perftest` for one client, in the place of the one before: its port. See `perftest_server`."""
        self._perftest.close()
        return self._perftest.enter_context(perftest_server(library, variables))

    def kill(self) -> None:
        """End all ranks at once, without a word to anybody."""
        for child in self._children:
            child.signal(signal.SIGKILL)
        self.close()

    def pause(self) -> None:
        """Keep all ranks from running, until `resume`: idle threads may use the processor, too."""
        for child in self._children:
            child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all ranks run; returns when they do."""
        for child in self._children:
            child.signal(signal.SIGCONT)
        self.call(RankProcess.ready)


class _Server:
    """The engines of the connections."""

    def __init__(self, control: ControlConfig) -> None:
        # the port is the server's own
        self._control = msgspec.structs.replace(control, port=0)
        self._session = ""
        self._asking: PeerHandle
        self.engines: dict[PeerHandle, EngineProcesses] = {}

    def answer(self, handle: PeerHandle, request: bytes) -> bytes:
        """What a connection asked: first to open its engine, then of that."""
        if handle in self.engines:
            return answer(self.engines[handle], request, REMOTE)
        self._asking = handle
        return answer(self, request, ("open",))

    def open(
        self, version: str, session: str, spec: EngineSpec, peer: int | None, tls: str
    ) -> None:
        """Start an engine's ranks. Raises ConfigError: the versions differ, or another process measures here."""
        if version != __version__:
            raise ConfigError("versions differ", server=__version__, client=version)
        if self.engines and session != self._session:
            raise ConfigError("the server measures with somebody else at this moment")
        self._session = session
        spec = msgspec.structs.replace(spec, control=self._control)
        self.engines[self._asking] = EngineProcesses(spec, peer_variables(peer, tls))


def serve(progress: ShowProgress) -> None:
    """Answer until interrupted. Raises ConfigError: the environment's address or keys cannot be used."""
    control = control_settings()
    server = _Server(control)
    with suppress(KeyboardInterrupt), ExitStack() as exits:
        channel = _open_channel(control, control.port)
        exits.callback(channel.close)
        key = f",{channel.server_key}" if channel.server_key else ""
        address = channel.address.removeprefix("tcp://")
        where = "on the other host"
        if is_loopback(parse_address(channel.address).host):
            where = "on this host (KVCONNECTOR_CONTROL_HOST, and keys, let others in)"
        progress(f"{where}: kvconnector bench transfer --connect {address}{key}")
        try:
            while True:
                for event in channel.poll(POLL_S):
                    if isinstance(event, Received):
                        channel.send(event.handle, server.answer(event.handle, event.payload))
                    elif event.handle in server.engines:
                        server.engines.pop(event.handle).close()
        finally:
            for engine in server.engines.values():
                engine.close()


class RemoteProcesses(EngineProcesses):
    """An engine's ranks at a `bench serve`. Raises CallFailedError: it cannot be reached, or refuses."""

    def __init__(self, options: BenchOptions, spec: EngineSpec, peer: int | None) -> None:
        ExitStack.__init__(self)
        self.spec = spec
        address, _, key = options.connect.partition(",")
        self._where = f"the server at {address}"
        self.host = parse_address(f"tcp://{address}").host
        self._channel = _open_channel(control_settings(), 0)
        self.callback(self._channel.close)
        try:
            self._peer = self._channel.connect(f"tcp://{address}", key or self._channel.server_key)
            self._ask(_Server.open, __version__, SESSION, spec, peer, options.tls)
        except BaseException:
            self.close()
            raise

    def _send(self, call: bytes) -> Callable[[], list[bytes]]:
        answers = self.exchange(call)
        return lambda: answers

    def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Raises CallFailedError: it raised there, the connection is lost, or no answer came in time."""
        self._channel.send(self._peer, encode_call(method, arguments))
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            for event in self._channel.poll(left_s):
                if isinstance(event, Disconnected):
                    raise CallFailedError(
                        f"{self._where} cannot be reached: {event.error}; is `kvconnector bench serve`"
                        " running there, are its keys ours, and is the port open between the hosts?"
                    ) from event.error
                return decode_answer(self._where, method, event.payload)
        raise CallFailedError(f"{self._where} did not answer in {ANSWER_TIMEOUT_S:.0f} s")


def _asked(name: str) -> Callable[..., Any]:
    method = getattr(EngineProcesses, name)
    return lambda self, *arguments: self._ask(method, *arguments)


for _name in REMOTE:
    setattr(RemoteProcesses, _name, _asked(_name))


def _open_channel(control: ControlConfig, port: int) -> ControlChannel:
    peer = PeerConfig(hello_timeout_s=HELLO_TIMEOUT_S)
    return open_control(ConnectorConfig(engine_id="bench", control=control, peer=peer), port)
