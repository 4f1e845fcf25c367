"""Fixtures of tests over several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from minillm import processes

if TYPE_CHECKING:
    from tests.integration.minillm_engines import ClusterTest, RunCluster
    from tests.integration.runtime_pair import Engine, RemoteEngine

CLUSTER_TIMEOUT_S = 160.0


@pytest.fixture
def opened() -> Iterator[list[Engine | RemoteEngine]]:
    """Engines that a test appends; closed in reverse, so a consumer before the producer that owes it answers."""
    engines: list[Engine | RemoteEngine] = []
    yield engines
    for engine in reversed(engines):
        engine.close()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Servers and ranks are forked.

    Ranks on GPUs have interpreters of their own: NCCL does not start in forked ones.
    """
    from tests.support.forked import ForkedChild

    if any(request.node.get_closest_marker(name) for name in ("gpu", "multi_gpu")):
        return
    monkeypatch.setattr(processes.Child, "start", ForkedChild.start)


@pytest.fixture
def run_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None) -> RunCluster:
    """Runs a test's coroutine on a fresh `Cluster`, within a deadline, and stops what it started.

    What a killed process cannot remove goes with the test's own folder.
    """
    from minillm.cluster import Cluster

    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(test: ClusterTest) -> None:
        async def main() -> None:
            async with Cluster(tmp_path) as cluster:
                await test(cluster)

        asyncio.run(asyncio.wait_for(main(), CLUSTER_TIMEOUT_S))

    return run
