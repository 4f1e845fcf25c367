"""Servers as child processes on this host: start them, wait until they are healthy, stop them all."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from minillm.processes import Child

START_TIMEOUT_S = 120.0
STOP_GRACE_S = 12.0
POLL_S = 0.05
REQUEST_TIMEOUT_S = 120.0


class Server:
    """One server process and, once it is healthy, its base URL."""

    def __init__(self, child: Child, port_file: Path | None = None, url: str = "") -> None:
        self.child = child
        self.url = url
        self._port_file = port_file

    async def is_healthy(self, session: aiohttp.ClientSession) -> bool:
        """Returns True if the server answers."""
        try:
            async with session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False  # not listening yet, or gone

    async def metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """Return the engine's gauges by name; a name includes its labels."""
        async with session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def wait_healthy(self, session: aiohttp.ClientSession, deadline: float) -> None:
        """Poll the port file if there is one, then /health.

        Raises:
            ChildFailedError: the process ended or is not healthy at `deadline` (event loop time).
        """
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            if not self.child.is_running:
                raise self.child.failure("ended while starting")
            if self._port_file is not None and self._port_file.exists():
                self.url = f"http://127.0.0.1:{int(self._port_file.read_text())}"
            if self.url and await self.is_healthy(session):
                return
            await asyncio.sleep(POLL_S)
        raise self.child.failure("was not healthy in time")


class Cluster:
    """A set of servers that live as long as this context manager, with one HTTP client session for them.

    Logs are in `log_dir`. If the cluster made the folder, it removes it after a clean end and keeps it after an error.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        self._owns_log_dir = log_dir is None
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="minillm-logs-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.servers: dict[str, Server] = {}

    async def __aenter__(self) -> Cluster:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        self.session = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.session.close()
        await self.stop(list(self.servers))
        if self._owns_log_dir and (error is None or not isinstance(error, Exception)):
            shutil.rmtree(self.log_dir, ignore_errors=True)

    async def start(self, name: str, module: str, arguments: Sequence[str]) -> Server:
        """Start `python -m module arguments...`; it is not healthy yet."""
        port_file = self.log_dir / f"{name}.port"
        port_file.unlink(missing_ok=True)
        child = await Child.start(
            name,
            module,
            [*arguments, "--port-file", str(port_file)],
            self.log_dir / f"{name}.log",
        )
        self.servers[name] = Server(child, port_file)
        return self.servers[name]

    async def start_engine(self, name: str, role: str, arguments: Sequence[str]) -> Server:
        """Start an engine's server; `role` is prefill, decode or mono."""
        module = "minillm.server" if role == "mono" else f"minillm.{role}_server"
        common = ["--engine-id", name, "--log-dir", str(self.log_dir)]
        return await self.start(name, module, [*common, *arguments])

    async def start_router(
        self, name: str, prefill: Server, decode: Server, *more: Server
    ) -> Server:
        """Start a router between healthy engines; `more` are further pairs of them."""
        arguments = ["--prefill", prefill.url, "--decode", decode.url]
        for index, server in enumerate(more):
            arguments += ["--decode" if index % 2 else "--prefill", server.url]
        return await self.start(name, "minillm.router", arguments)

    async def wait_healthy(self, *servers: Server) -> None:
        """Wait for all of `servers`; the first that fails ends the wait.

        Raises:
            ChildFailedError: one of them ended or is late.
        """
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        await asyncio.gather(*(server.wait_healthy(self.session, deadline) for server in servers))

    async def stop(self, names: Sequence[str]) -> None:
        """End these servers, in good order if they can; returns once all are reaped."""
        children = [self.servers.pop(name).child for name in names]
        await asyncio.gather(*(child.stop(grace_s=STOP_GRACE_S) for child in children))
