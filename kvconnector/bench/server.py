"""`bench serve`: an engine's processes on another host, called over the control channel with its keys.

Each connection has the one engine that it opens, to which its calls are handed on, and which ends with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from kvconnector import __version__
from kvconnector.bench.between_hosts import perftest_server, serve_stream
from kvconnector.bench.deployment import Deployment
from kvconnector.bench.engine_process import Engine, EngineProcess
from kvconnector.bench.options import TUNING, control_settings
from kvconnector.bench.peers import peer_variables
from kvconnector.bench.processes import (
    ANSWER_TIMEOUT_S,
    CallFailedError,
    answer,
    decode_answer,
    encode_call,
)
from kvconnector.bench.results import ShowProgress
from kvconnector.config import ConnectorConfig, ControlConfig, PeerConfig, is_loopback
from kvconnector.control.address import parse_address
from kvconnector.control.base import Disconnected, PeerHandle, Received
from kvconnector.control.zmq import ControlChannel
from kvconnector.errors import ConfigError
from kvconnector.ids import new_secret
from kvconnector.runtime.channels import open_control

POLL_S = 0.5
HELLO_TIMEOUT_S = 3.0
SESSION = new_secret()
"""The secret name of this process: a server measures with one process at a time."""
REMOTE = ("open", "forward", "serve_stream", "serve_perftest")


class _Client(ExitStack):
    """A connection, which may call the methods in `REMOTE`. `others` are the clients of all connections."""

    session = ""
    _engine: EngineProcess

    def __init__(self, host: str, others: Mapping[PeerHandle, _Client]) -> None:
        super().__init__()
        self._host, self._others = host, others
        self._perftest = self.enter_context(ExitStack())

    def open(
        self,
        version: str,
        session: str,
        deployment: Deployment,
        peer: int | None,
        variables: dict[str, str],
    ) -> None:
        """Start a producer's processes, with the client's variables for tuning. Raises ConfigError: the versions differ
        or another process measures here.
        """
        if version != __version__:
            raise ConfigError("versions differ", server=__version__, client=version)
        if {each.session for each in self._others.values()} - {"", session}:
            raise ConfigError("the server measures with somebody else at this moment")
        self.session = session
        tuning = {name: value for name, value in variables.items() if name.startswith(TUNING)}
        environment = tuning | peer_variables(peer, deployment.options.tls)
        self._engine = self.enter_context(EngineProcess(deployment, "prefill", environment))

    def forward(self, call: bytes) -> bytes:
        """Call a method of the engine. Returns its answer."""
        return self._engine.forward(call)()

    def serve_stream(self, nbytes: int) -> int:
        """See `EngineProcess.serve_stream`."""
        return serve_stream(self._host, nbytes)

    def serve_perftest(self, library: str, variables: dict[str, str]) -> int:
        """Start a `perftest_server` with the client's UCX variables, after ending the one before. Returns the port."""
        self._perftest.close()
        of_ucx = {name: value for name, value in variables.items() if name.startswith("UCX_")}
        return self._perftest.enter_context(perftest_server(library, of_ucx))


def serve(progress: ShowProgress) -> None:
    """Answer until interrupted. Raises ConfigError: the environment's address or keys cannot be used."""
    control = control_settings()
    clients: dict[PeerHandle, _Client] = {}
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
                        if event.handle not in clients:
                            clients[event.handle] = _Client(control.host, clients)
                        answered = answer(clients[event.handle], event.payload, REMOTE)
                        channel.send(event.handle, answered)
                    elif event.handle in clients:
                        clients.pop(event.handle).close()
        finally:
            for client in clients.values():
                client.close()


class ServedEngine(EngineProcess):
    """The producer at a `bench serve`. Raises CallFailedError: it cannot be reached, or refuses."""

    def __init__(self, deployment: Deployment, peer: int | None) -> None:
        ExitStack.__init__(self)
        self._side, self._ranks = "prefill", deployment.options.prefill.ranks
        address, _, key = deployment.options.connect.partition(",")
        self._where = f"the server at {address}"
        self.host = parse_address(f"tcp://{address}").host
        self._channel = _open_channel(control_settings(), 0)
        self.callback(self._channel.close)
        try:
            self._peer = self._channel.connect(f"tcp://{address}", key or self._channel.server_key)
            variables = {name: each for name, each in os.environ.items() if name.startswith(TUNING)}
            self._begin_call(_Client.open, __version__, SESSION, deployment, peer, variables)()
        except BaseException:
            self.close()
            raise

    def forward(self, call: bytes) -> Callable[[], bytes]:
        return self._begin_call(_Client.forward, call)

    def serve_stream(self, nbytes: int) -> int:
        port: int = self._begin_call(_Client.serve_stream, nbytes)()
        return port

    def serve_perftest(self, library: str, variables: dict[str, str]) -> int:
        """See `_Client.serve_perftest`."""
        port: int = self._begin_call(_Client.serve_perftest, library, variables)()
        return port

    def pause(self) -> None:
        """Keep the ranks from running, until `resume`."""
        self.call(Engine.pause)

    def resume(self) -> None:
        self.call(Engine.resume)

    def _begin_call(self, method: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Call a method of the server's. The returned function waits for the result, and raises CallFailedError: it
        raised there, the connection is lost, or no answer came in time.
        """
        self._channel.send(self._peer, encode_call(method, arguments))
        return lambda: decode_answer(self._where, method, self._receive())

    def _receive(self) -> bytes:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            for event in self._channel.poll(left_s):
                if isinstance(event, Disconnected):
                    raise CallFailedError(
                        f"{self._where} cannot be reached: {event.error}; is `kvconnector bench serve`"
                        " running there, are its keys ours, and is the port open between the hosts?"
                    ) from event.error
                return event.payload
        raise CallFailedError(f"{self._where} did not answer in {ANSWER_TIMEOUT_S:.0f} s")


def _open_channel(control: ControlConfig, port: int) -> ControlChannel:
    peer = PeerConfig(hello_timeout_s=HELLO_TIMEOUT_S)
    return open_control(ConnectorConfig(engine_id="bench", control=control, peer=peer), port)
