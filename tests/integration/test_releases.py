"""This release beside the last one, and engines that are restarted one after the other under load."""

import asyncio
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from kvconnector.config import LeaseConfig
from minillm.cluster import Cluster
from minillm.config import ModelConfig
from tests.integration.minillm_engines import (
    DIRECT,
    PACKED,
    RELEASE_TIMEOUT_S,
    complete_on,
    expected_tokens,
    offer_of,
    prompt_of,
    wait_all_blocks_free,
)
from tests.support.local_engines import token_ids
from tests.support.releases import last_release

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 4
PROMPTS = tuple(prompt_of(length) for length in (17, 64, 150, 333))
CLIENTS = 3
CALM_REQUESTS = 6
"""Requests answered between two restarts."""


@dataclass
class Fleet:
    """Engines of either release, by name: "p..." prefill, "d..." decode."""

    cluster: Cluster
    tree: Path
    monkeypatch: pytest.MonkeyPatch
    restarting: set = field(default_factory=set)
    restarts: dict = field(default_factory=dict)
    answered: int = 0
    lost: list = field(default_factory=list)

    def server(self, name):
        return self.cluster.servers[name]

    async def start(self, name, *, is_last_release, connector=None):
        role = "prefill" if name.startswith("p") else "decode"
        options = ["--connector", str(connector or {}).replace("'", '"')]
        with self.monkeypatch.context() as patch:
            if is_last_release:
                # before this release's: a child imports from its own folder, then by its parent's path
                paths = [str(self.tree / each) for each in ("", "kernels", "examples")]
                patch.setattr(sys, "path", paths + sys.path)
                patch.chdir(self.tree)
            server = await self.cluster.start_engine(name, role, options)
        await self.cluster.wait_healthy(server)

    async def restart(self, name):
        """Kill an engine, and start one of this release under its name; the router sends it nothing meanwhile."""
        self.restarting.add(name)
        self.restarts[name] = self.restarts.get(name, 0) + 1
        server = self.cluster.servers.pop(name)
        os.killpg(server.child.process.pid, signal.SIGKILL)
        await server.child.stop(grace_s=0.1)
        await self.start(name, is_last_release=False)
        self.restarting.discard(name)

    async def ask(self, number):
        """Send a request through the next engines that are up, and count how it ended."""
        pair = [self._next(role, number) for role in "pd"]
        before = [self.restarts.get(name, 0) for name in pair]
        prompt = PROMPTS[number % len(PROMPTS)]
        try:
            salt = {"cache_salt": f"request {number}"}
            offer = await offer_of(self.cluster, self.server(pair[0]), prompt, **salt)
            answer = await complete_on(
                self.cluster,
                self.server(pair[1]),
                prompt,
                max_tokens=MAX_TOKENS,
                kv_transfer_params=offer,
                **salt,
            )
        except (aiohttp.ClientError, ConnectionError, KeyError):
            after = [self.restarts.get(name, 0) for name in pair]
            assert after != before, f"request {number} was lost, and neither {pair} was restarted"
            self.lost.append(number)
            return
        (choice,) = answer["choices"]
        expected = token_ids(expected_tokens(ModelConfig(), prompt, MAX_TOKENS))
        assert choice["token_ids"] == expected, f"request {number} of {pair}"
        self.answered += 1

    def _next(self, role, number):
        names = [name for name in sorted(self.cluster.servers) if name.startswith(role)]
        ready = [name for name in names if name not in self.restarting]
        return ready[number // len(PROMPTS) % len(ready)]


@pytest.fixture(autouse=True)
def _own_temporary_files(tmp_path, monkeypatch):
    """Engines that are killed leave files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize("connector", [DIRECT, PACKED], ids=["direct", "packed"])
@pytest.mark.parametrize("last", ["p", "d"])
def test_this_release_exchanges_blocks_with_the_last(last, connector, monkeypatch):
    async def run():
        async with Cluster() as cluster:
            fleet = Fleet(cluster, last_release(), monkeypatch)
            for name in "pd":
                await fleet.start(name, is_last_release=name == last, connector=connector)
            for number in range(2 * len(PROMPTS)):
                await fleet.ask(number)
            assert (fleet.answered, fleet.lost) == (2 * len(PROMPTS), [])
            await wait_all_blocks_free(cluster, *cluster.servers.values())

    asyncio.run(run())


def test_a_rolling_upgrade_loses_only_what_the_restarted_engine_held(monkeypatch):
    async def run():
        async with Cluster() as cluster:
            fleet = Fleet(cluster, last_release(), monkeypatch)
            for name in ("p0", "p1", "d0", "d1"):
                await fleet.start(name, is_last_release=True)
            is_over = asyncio.Event()

            async def client(number):
                while not is_over.is_set():
                    await fleet.ask(number)
                    number += CLIENTS

            async with asyncio.TaskGroup() as clients:
                for number in range(CLIENTS):
                    clients.create_task(client(number))
                try:
                    for name in ("p0", "d0", "p1", "d1"):
                        await _calm(fleet)
                        await fleet.restart(name)
                    await _calm(fleet)
                finally:
                    is_over.set()
            assert len(fleet.lost) <= CLIENTS * len(fleet.restarts)
            # what a killed decode engine had not begun to read is held until its lease ends
            timeout_s = LeaseConfig().duration_s + RELEASE_TIMEOUT_S
            await wait_all_blocks_free(cluster, *cluster.servers.values(), timeout_s=timeout_s)

    asyncio.run(run())


async def _calm(fleet):
    """Wait until a few more requests are answered."""
    wanted = fleet.answered + CALM_REQUESTS
    while fleet.answered < wanted:
        await asyncio.sleep(0.02)
