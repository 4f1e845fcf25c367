"""`bench serve`: an engine's processes on another host, called over the control channel with its keys.

Each connection has the one engine that it opens, to which its calls are handed on, and which ends with it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from kvconnector import __version__
from kvconnector.bench.deployment import Deployment
from kvconnector.bench.options import TUNING, control_settings
from kvconnector.bench.peers import peer_variables
from kvconnector.bench.processes import (
    ANSWER_TIMEOUT_S,
    CallFailedError,
    Child,
    answer,
    decode_answer,
    encode_call,
)
from kvconnector.bench.results import ShowProgress
from kvconnector.config import ConnectorConfig, ControlConfig, PeerConfig, is_loopback
from kvconnector.control.address import parse_address
from kvconnector.control.base import Disconnected, PeerHandle, Received
from kvconnector.errors import ConfigError
from kvconnector.ids import new_secret
from kvconnector.runtime.channels import open_control

if TYPE_CHECKING:
    from kvconnector.control.zmq import ControlChannel

POLL_S = 0.5
HELLO_TIMEOUT_S = 3.0
SESSION = new_secret()
"""The secret name of this process: a server measures with one process at a time."""


class _Client(ExitStack):
    """A connection, which opens an engine and then calls it. `others` are the clients of all connections."""

    session = ""
    _engine: Child | None = None

    def __init__(self, others: Mapping[PeerHandle, _Client]) -> None:
        super().__init__()
        self._others = others

    def answer(self, call: bytes) -> bytes:
        """Return the answer to a call: the first is `open`, the others are of `Engine`."""
        if self._engine is None:
            return answer(self, call, ["open"])
        self._engine.send(call)
        return self._engine.receive()

    def open(
        self,
        version: str,
        session: str,
        deployment: Deployment,
        peer: int | None,
        variables: dict[str, str],
    ) -> None:
        """Start a producer's processes, with the client's variables for tuning. Raises ConfigError: the versions
        differ, another process measures here, or this host has no memory for the caches.
        """
        if version != __version__:
            raise ConfigError("versions differ", server=__version__, client=version)
        if {each.session for each in self._others.values()} - {"", session}:
            raise ConfigError("the server is busy with another measurement")
        deployment.check_memory(["prefill"])
        self.session = session
        tuning = {name: value for name, value in variables.items() if name.startswith(TUNING)}
        environment = tuning | peer_variables(peer, deployment.options.tls)
        self._engine = Child("engine_process", (deployment, "prefill"), environment)
        self.callback(self._engine.stop)


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
                            clients[event.handle] = _Client(clients)
                        answered = clients[event.handle].answer(event.payload)
                        channel.send(event.handle, answered)
                    elif event.handle in clients:
                        clients.pop(event.handle).close()
        finally:
            for client in clients.values():
                client.close()


class ServedProcess:
    """A producer's process at a `bench serve`, called like a `Child`. Raises CallFailedError: the server cannot be
    reached, or refuses.
    """

    def __init__(self, deployment: Deployment, peer: int | None) -> None:
        address, _, key = deployment.options.connect.partition(",")
        self._where = f"the server at {address}"
        self.host = parse_address(f"tcp://{address}").host
        self._channel = _open_channel(control_settings(), 0)
        try:
            self._server = self._channel.connect(
                f"tcp://{address}", key or self._channel.server_key
            )
            variables = {name: each for name, each in os.environ.items() if name.startswith(TUNING)}
            opening = (__version__, SESSION, deployment, peer, variables)
            self.send(encode_call(_Client.open, opening))
            decode_answer(self._where, _Client.open, self.receive())
        except BaseException:
            self.stop()
            raise

    def send(self, call: bytes) -> None:
        self._channel.send(self._server, call)

    def receive(self) -> bytes:
        """Wait for the answer. Raises CallFailedError: the connection is lost, or no answer came in time."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            for event in self._channel.poll(left_s):
                if isinstance(event, Disconnected):
                    raise CallFailedError(
                        f"{self._where} cannot be reached: {event.error.statement}; is `kvconnector bench serve`"
                        " running there, are its keys ours, and is the port open between the hosts?"
                    ) from event.error
                return event.payload
        raise CallFailedError(f"{self._where} did not answer in {ANSWER_TIMEOUT_S:.0f} s")

    def signal(self, number: signal.Signals) -> None:
        """Send no signal: the processes that `Engine.pause` does not stop are few, and the server needs them."""

    def stop(self) -> None:
        """End the engine by closing its connection."""
        self._channel.close()


def _open_channel(control: ControlConfig, port: int) -> ControlChannel:
    peer = PeerConfig(hello_timeout_s=HELLO_TIMEOUT_S)
    return open_control(ConnectorConfig(engine_id="bench", control=control, peer=peer), port)
