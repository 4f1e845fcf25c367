"""A producer engine on another host: `bench serve` there, and this host's side of it.

Each engine of the connecting side has a connection of its own, over the control channel with its keys. It begins with
`_Server.open`; the engine's methods in `REMOTE` are called through it, and the engine ends with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from kvconnector import __version__
from kvconnector.bench.calls import CallFailedError, answer, decode_answer, encode_call
from kvconnector.bench.engine import Engine
from kvconnector.bench.nixl import NIXL_SETTINGS
from kvconnector.bench.options import BenchOptions, control_settings
from kvconnector.bench.processes import ANSWER_TIMEOUT_S
from kvconnector.bench.rank_process import EngineSpec
from kvconnector.bench.results import Progress
from kvconnector.config import ConnectorConfig
from kvconnector.control.address import parse_address
from kvconnector.control.base import ControlChannel, Disconnected, PeerHandle, Received
from kvconnector.errors import ConfigError
from kvconnector.ids import new_secret
from kvconnector.runtime.channels import open_control

POLL_S = 0.5
HELLO_TIMEOUT_S = 3.0
SESSION = new_secret()
"""Of this process: a server measures with one at a time."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Server:
    """The engines of the connections."""

    def __init__(self, control: Mapping[str, Any]) -> None:
        # the port is the server's own
        self._control = {**control, "port": 0}
        self._session = ""
        self._opened: list[Engine] = []
        self.engines: dict[PeerHandle, Engine] = {}

    def answer(self, handle: PeerHandle, request: bytes) -> bytes:
        """What a connection asked: first to open its engine, then of that."""
        if handle in self.engines:
            return answer(self.engines[handle], request, REMOTE)
        answered = answer(self, request, (_Server.open,))
        if self._opened:
            self.engines[handle] = self._opened.pop()
        return answered

    def open(
        self,
        version: str,
        session: str,
        spec: EngineSpec,
        settings: dict[str, Any] | None,
        nixl: tuple[int, str],
    ) -> None:
        """Start an engine: with the connector where there are `settings`, else for NIXL in that one of its settings,
        with that UCX_TLS.

        Raises:
            ConfigError: the versions differ, settings that do not exist, or another process measures here.
        """
        if version != __version__:
            raise ConfigError("versions differ", server=__version__, client=version)
        if self.engines and session != self._session:
            raise ConfigError("the server measures with somebody else at this moment")
        self._session = session
        if settings is None:
            self._opened.append(Engine(spec, None, NIXL_SETTINGS[nixl[0]].variables(nixl[1])))
            return
        own = {"engine_id": spec.engine_id, "role": "producer", "control": self._control}
        self._opened.append(Engine(spec, ConnectorConfig.from_mapping({**settings, **own})))


def serve(progress: Progress) -> None:
    """Answer until interrupted.

    Raises:
        ConfigError: the environment's address or keys cannot be used.
    """
    control = control_settings()
    server = _Server(control)
    with ExitStack() as exits:
        channel = _open_channel(control, control["port"])
        exits.callback(channel.close)
        key = f",{channel.server_key}" if channel.server_key else ""
        address = channel.address.removeprefix("tcp://")
        progress(f"on the other host: kvconnector bench transfer --connect {address}{key}")
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


def _remote(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """The method, called on the server's engine."""

    def call(engine: Any, /, *arguments: Parameters.args, **_: Parameters.kwargs) -> Result:
        found: Result = engine.call(method, *arguments)
        return found

    return call


class RemoteEngine(Engine):
    """An engine of a `bench serve`, with what a producer needs. Leaving it ends the engine.

    Raises:
        CallFailedError: the server cannot be reached, or refuses.
    """

    def __init__(
        self, options: BenchOptions, spec: EngineSpec, config: ConnectorConfig | None, nixl: int
    ) -> None:
        ExitStack.__init__(self)
        self.spec = spec
        self.started = []
        address, _, key = options.connect.partition(",")
        self._where = f"the server at {address}"
        self.host = parse_address(f"tcp://{address}").host
        self._channel = _open_channel(control_settings(), 0)
        self.callback(self._channel.close)
        settings = None
        if config is not None:
            settings = msgspec.to_builtins(config)
            for own in ("engine_id", "role", "control"):
                del settings[own]
        try:
            self._peer = self._channel.connect(f"tcp://{address}", key or self._channel.server_key)
            self.call(_Server.open, __version__, SESSION, spec, settings, (nixl, options.tls))
        except BaseException:
            self.close()
            raise

    write = _remote(Engine.write)
    offer = _remote(Engine.offer)
    queue = _remote(Engine.queue)
    compute = _remote(Engine.compute)
    await_sent = _remote(Engine.await_sent)
    pause = _remote(Engine.pause)
    resume = _remote(Engine.resume)
    lanes = _remote(Engine.lanes)
    open_agents = _remote(Engine.open_agents)
    serve_stream = _remote(Engine.serve_stream)

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """What the method returns there.

        Raises:
            CallFailedError: it raised, the connection is lost, or no answer came in time.
        """
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


REMOTE = tuple(
    getattr(Engine, name)
    for name in vars(RemoteEngine)
    if name in vars(Engine) and not name.startswith("_")
)
"""What a server's engine can be asked."""


def _open_channel(control: Mapping[str, Any], port: int) -> ControlChannel:
    peer = {"hello_timeout_s": HELLO_TIMEOUT_S}
    base = {"engine_id": "bench", "control": control, "peer": peer}
    return open_control(ConnectorConfig.from_mapping(base), port)
