"""A producer engine's ranks on another host: `bench serve` there, and this host's side of it.

Each engine of the connecting side has a connection of its own, over the control channel with its keys. It begins with
`_Server.open`; the methods in `REMOTE` of its processes are called through it, and they end with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from kvconnector import __version__
from kvconnector.bench.options import BenchOptions, control_settings
from kvconnector.bench.peers import peer_variables
from kvconnector.bench.processes import ANSWER_TIMEOUT_S, EngineProcesses
from kvconnector.bench.rank_process import (
    CallFailedError,
    EngineSpec,
    answer,
    decode_answer,
    encode_call,
)
from kvconnector.bench.results import ShowProgress
from kvconnector.config import ConnectorConfig, ControlConfig, is_loopback
from kvconnector.control.address import parse_address
from kvconnector.control.base import ControlChannel, Disconnected, PeerHandle, Received
from kvconnector.errors import ConfigError
from kvconnector.ids import new_secret
from kvconnector.runtime.channels import open_control

POLL_S = 0.5
HELLO_TIMEOUT_S = 3.0
SESSION = new_secret()
"""Of this process: a server measures with one at a time."""
REMOTE = ("exchange", "serve_stream", "serve_perftest", "pause", "resume")
"""What a server's engine is asked in the place of one here."""


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
    peer = {"hello_timeout_s": HELLO_TIMEOUT_S}
    base = {"engine_id": "bench", "control": msgspec.to_builtins(control), "peer": peer}
    return open_control(ConnectorConfig.from_mapping(base), port)
