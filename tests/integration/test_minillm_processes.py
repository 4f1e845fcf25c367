"""minillm's processes without a connector: real process groups, and no orphan whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm.client import CompletionError, complete
from minillm.cluster import Cluster
from minillm.processes import ChildFailedError
from tests.integration.minillm_engines import RunCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

EXIT_S = 20.0
# three engines and their five ranks
DEMO_PROCESSES = 8
SIGTERM = pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.slow)


@pytest.fixture
def forked() -> None:
    """Parents and children are what these tests are about."""


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


def test_an_engine_whose_rank_dies_one_that_is_killed_and_one_that_cannot_start(
    run_cluster: RunCluster,
) -> None:
    """The first says which rank, the last why, and no rank outlives its server."""

    async def main(cluster: Cluster) -> None:
        arguments = ["--weights", "/nonexistent/model.safetensors"]
        broken = await cluster.start_engine("broken", "mono", arguments)
        solo = await cluster.start_engine("solo", "mono", ["--engine", "tp=2"])
        killed = await cluster.start_engine("killed", "mono", ["--engine", "pp=2"])
        with pytest.raises(ChildFailedError, match=r"model\.safetensors"):
            await cluster.wait_healthy(broken)
        await cluster.wait_healthy(solo, killed)
        ranks = {server: children(server.child.process.pid) for server in (solo, killed)}
        assert [len(pids) for pids in ranks.values()] == [2, 2]
        os.kill(ranks[solo][1], signal.SIGKILL)
        killed.child.process.kill()
        with pytest.raises(CompletionError, match=r"503.*solo-rank1"):
            await complete(cluster.session, solo.url, [1, 2, 3], 8)
        async with cluster.session.get(f"{solo.url}/health") as response:
            assert response.status == 503
        assert await asyncio.wait_for(killed.child.process.wait(), EXIT_S) == -signal.SIGKILL
        await cluster.stop(["solo"])
        assert wait_gone([*ranks[solo], *ranks[killed]]) == []

    run_cluster(main)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="int"),
        SIGTERM,
        pytest.param(signal.SIGKILL, id="kill", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "minillm.demo", "--prompts", "7"]
    paths = os.pathsep.join(path for path in sys.path if path)
    with (tmp_path / "demo.log").open("wb") as log:
        demo = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)},
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
