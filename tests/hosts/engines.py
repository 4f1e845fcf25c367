"""minillm's servers on hosts: each engine with CURVE keys of its own, on the address of its host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from kvconnector.cli import main
from minillm.metrics import read_metrics
from minillm.processes import ChildFailedError, log_tail
from tests.hosts.network import Host, HostProcess, Network

HTTP_PORT = 8000
START_TIMEOUT_S = 150.0
STOP_GRACE_S = 15.0
QUICK: dict[str, dict[str, Any]] = {
    "peer": {
        "heartbeat_interval_s": 0.5,
        "timeout_s": 3,
        "transfer_timeout_s": 4,
        "backoff_initial_s": 0.1,
        "backoff_max_s": 0.5,
    },
    "lease": {"duration_s": 6, "early_read_s": 1},
}
"""Settings under which a fault shows within seconds."""


class Server:
    """One server on a host."""

    def __init__(self, host: Host, name: str, process: HostProcess, log: Path) -> None:
        self.host, self.name, self.process, self.log = host, name, process, log
        self.url = f"http://{host.address}:{HTTP_PORT}"

    def ranks(self) -> list[int]:
        """The process ids of an engine's ranks, as seen from outside."""
        return self.process.pids()[1:]

    def failure(self, what: str) -> ChildFailedError:
        """An error that says `what` happened, and how the log ends."""
        return ChildFailedError(f"{self.name} {what}\n--- {self.log} ---\n{log_tail(self.log)}")


class Servers:
    """The servers of a test, stopped at its end. Their keys are made by `kvconnector keygen`, as by an operator."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self._keys: dict[str, Path] = {}
        self._servers: list[Server] = []

    async def __aenter__(self) -> Servers:
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.session.close()
        await asyncio.gather(*(self.stop(server) for server in self._servers))

    async def stop(self, server: Server) -> None:
        """SIGTERM, and SIGKILL if that does not end it."""
        server.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        while server.process.is_running():
            if time.monotonic() > deadline:
                server.process.signal(signal.SIGKILL, all_below=True)
            await asyncio.sleep(0.02)

    def keys(self, *names: str) -> None:
        """Make a key pair for each engine, and let all of them talk to one another."""
        for name in names:
            self._keys[name] = self.folder / f"keys-{name}"
            assert main(["keygen", str(self._keys[name])]) == 0
        publics = [(path / "curve.public").read_text().strip() for path in self._keys.values()]
        for path in self._keys.values():
            (path / "authorized_clients").write_text("\n".join(publics) + "\n")

    def engine(self, host: Host, name: str, role: str, *arguments: str) -> Server:
        """Start an engine; `role` is prefill or decode."""
        control = {
            "host": host.address,
            "secret_key_file": str(self._keys[name] / "curve.secret"),
            "authorized_clients_file": str(self._keys[name] / "authorized_clients"),
        }
        options = ["--engine-id", name, "--log-dir", str(self.folder)]
        options += ["--connector", json.dumps({**QUICK, "control": control}), *arguments]
        return self._start(host, name, f"minillm.{role}_server", options)

    def router(
        self, host: Host, name: str, prefill: Sequence[Server], decode: Sequence[Server]
    ) -> Server:
        """Start a router."""
        options = [word for server in prefill for word in ("--prefill", server.url)]
        options += [word for server in decode for word in ("--decode", server.url)]
        return self._start(host, name, "minillm.router", options)

    def _start(self, host: Host, name: str, module: str, options: list[str]) -> Server:
        log = self.folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-m", module, "--host", host.address, "--port", str(HTTP_PORT)]
        with log.open("ab") as output:
            process = host.start(
                [*argv, *options], stdout=output, stderr=output, env=environment, cwd=self.folder
            )
        self._servers.append(server := Server(host, name, process, log))
        return server

    async def healthy(self, *servers: Server) -> None:
        """Wait until all of these serve.

        Raises:
            ChildFailedError: one ended or is late.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        for server in servers:
            while not await self.is_healthy(server):
                if not server.process.is_running():
                    raise server.failure("ended while starting")
                if time.monotonic() > deadline:
                    raise server.failure("was not healthy in time")
                await asyncio.sleep(0.05)

    async def is_healthy(self, server: Server) -> bool:
        """Whether the server answers."""
        try:
            async with self.session.get(f"{server.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def wait_blocks_free(self, timeout_s: float, *servers: Server) -> None:
        """Wait until every engine has all its blocks back."""
        deadline = time.monotonic() + timeout_s
        for server in servers:
            while True:
                values = await read_metrics(self.session, server.url)
                if values["minillm_free_blocks"] == values["minillm_blocks"]:
                    break
                assert time.monotonic() < deadline, f"{server.name} still holds blocks: {values}"
                await asyncio.sleep(0.05)
