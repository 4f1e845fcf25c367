"""minillm's processes without a connector: real process groups, and no orphan whatever dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from minillm.client import CompletionError, complete
from minillm.cluster import Cluster
from minillm.processes import ChildFailedError

pytestmark = pytest.mark.integration

TIMEOUT_S = 90.0
EXIT_S = 20.0
# three engines and their five ranks
DEMO_PROCESSES = 8


@pytest.fixture(autouse=True)
def _private_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process cannot remove goes with the test's own folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run one test's coroutine with a deadline."""
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found.extend(int(child) for child in task.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    below = children(pid)
    return below + [lower for child in below for lower in descendants(child)]


def is_alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int]) -> list[int]:
    """Wait until none of `pids` runs; returns those that still do at the deadline."""
    deadline = time.monotonic() + EXIT_S
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_ranks_in_processes_compute_what_one_rank_computes(tmp_path: Path) -> None:
    prompts = [[random.Random(n).randrange(1024) for _ in range(n)] for n in (3, 90)]

    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            single = await cluster.start_engine("single", "mono", ["--engine", "block=16"])
            shape = "tp=2,pp=2,layers=5+3,block=7,layout=NHD"
            split = await cluster.start_engine("split", "mono", ["--engine", shape])
            await cluster.wait_healthy(single, split)
            for prompt in prompts:
                expected = await complete(cluster.session, single.url, prompt, 10)
                actual = await complete(cluster.session, split.url, prompt, 10)
                assert actual.token_ids == expected.token_ids
                assert actual.largest_logprob_difference(expected) < 1e-3
            together = await asyncio.gather(
                *(complete(cluster.session, split.url, prompt, 10) for prompt in prompts)
            )
            alone = [await complete(cluster.session, single.url, prompt, 10) for prompt in prompts]
            assert [item.token_ids for item in together] == [item.token_ids for item in alone]

    run(main())


def test_a_dead_rank_fails_requests_and_health_with_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            server = await cluster.start_engine("solo", "mono", ["--engine", "tp=2"])
            await cluster.wait_healthy(server)
            ranks = children(server.child.process.pid)
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            with pytest.raises(CompletionError, match=r"503.*solo-rank1"):
                await complete(cluster.session, server.url, [1, 2, 3], 8)
            async with cluster.session.get(f"{server.url}/health") as response:
                assert response.status == 503
            await cluster.stop(["solo"])
            assert wait_gone(ranks) == []

    run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_ranks_end_with_their_server(tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            server = await cluster.start_engine("solo", "mono", ["--engine", "pp=2"])
            await cluster.wait_healthy(server)
            ranks = children(server.child.process.pid)
            assert len(ranks) == 2
            server.child.process.send_signal(number)
            code = await asyncio.wait_for(server.child.process.wait(), EXIT_S)
            assert code == (0 if number == signal.SIGTERM else -number)
            assert wait_gone(ranks) == []

    run(main())


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster(tmp_path) as cluster:
            arguments = ["--weights", "/nonexistent/model.safetensors"]
            server = await cluster.start_engine("broken", "mono", arguments)
            with pytest.raises(ChildFailedError, match=r"model\.safetensors"):
                await cluster.wait_healthy(server)

    run(main())


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGKILL],
    ids=["int", "term", "kill"],
)
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "minillm.demo", "--prompts", "7"]
    paths = os.pathsep.join(path for path in sys.path if path)
    with (tmp_path / "demo.log").open("wb") as log:
        demo = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": paths},
        )
        deadline = time.monotonic() + EXIT_S
        below: list[int] = []
        while len(below) < DEMO_PROCESSES and time.monotonic() < deadline:
            below = descendants(demo.pid)
            time.sleep(0.05)
        assert len(below) >= DEMO_PROCESSES
        demo.send_signal(number)
        code = demo.wait(EXIT_S)
    assert code == (-number if number == signal.SIGKILL else 130)
    assert wait_gone(below) == []
