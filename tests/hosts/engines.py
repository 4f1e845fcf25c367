"""minillm's servers on hosts: each engine with CURVE keys of its own, on the address of its host."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from minillm.metrics import read_metrics
from minillm.processes import ChildFailedError, log_tail
from tests.hosts.network import Host, HostProcess, Network

HTTP_PORT = 8000
START_TIMEOUT_S = 100.0
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
        await asyncio.gather(*(asyncio.to_thread(server.process.stop) for server in self._servers))

    def keys(self, *names: str) -> None:
        """Make a key pair for each engine, and let all of them talk to one another."""
        for name in names:
            self._keys[name] = self.folder / f"keys-{name}"
            host = next(iter(self.network.hosts.values()))
            host.run([sys.executable, "-m", "kvconnector.cli", "keygen", str(self._keys[name])])
        publics = [(path / "curve.public").read_text().strip() for path in self._keys.values()]
        for path in self._keys.values():
            (path / "authorized_clients").write_text("\n".join(publics) + "\n")

    def engine(
        self,
        host: Host,
        name: str,
        role: str,
        *arguments: str,
        bind: str = "",
        **sections: dict[str, Any],
    ) -> Server:
        """Start an engine; `role` is prefill, decode or mono. `sections` go over `QUICK`."""
        connector: dict[str, Any] = {**QUICK, **sections}
        if role != "mono":
            keys = self._keys[name]
            connector["control"] = {
                "host": bind or host.address,
                "secret_key_file": str(keys / "curve.secret"),
                "authorized_clients_file": str(keys / "authorized_clients"),
                **sections.get("control", {}),
            }
        module = "minillm.server" if role == "mono" else f"minillm.{role}_server"
        options = ["--engine-id", name, "--log-dir", str(self.folder)]
        options += ["--connector", json.dumps(connector), *arguments]
        return self._start(host, name, [sys.executable, "-m", module, *options])

    def router(
        self, host: Host, name: str, prefill: Sequence[Server], decode: Sequence[Server]
    ) -> Server:
        """Start a router."""
        options = [word for server in prefill for word in ("--prefill", server.url)]
        options += [word for server in decode for word in ("--decode", server.url)]
        return self._start(host, name, [sys.executable, "-m", "minillm.router", *options])

    def _start(self, host: Host, name: str, argv: list[str]) -> Server:
        log = self.folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        listen = ["--host", host.address, "--port", str(HTTP_PORT)]
        with log.open("ab") as output:
            process = host.start(
                [*argv, *listen], stdout=output, stderr=output, env=environment, cwd=self.folder
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
            while not await self._is_healthy(server):
                if not server.process.is_running():
                    raise server.failure("ended while starting")
                if time.monotonic() > deadline:
                    raise server.failure("was not healthy in time")
                await asyncio.sleep(0.05)

    async def _is_healthy(self, server: Server) -> bool:
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
