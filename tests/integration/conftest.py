"""Fixtures of tests over several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minillm import processes

if TYPE_CHECKING:
    from tests.integration.minillm_engines import ClusterTest, RunCluster
    from tests.integration.runtime_pair import Engine

CLUSTER_TIMEOUT_S = 160.0


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Starts engines, in this process or `elsewhere`; closed in reverse, so a consumer before the producer that owes
    it answers.
    """
    from tests.integration import runtime_pair as rp

    engines: list[Any] = []

    def make(engine_id: str, role: str, *, elsewhere: bool = False, **options: Any) -> Any:
        kind = rp.RemoteEngine if elsewhere else rp.Engine
        engines.append(kind(engine_id, role, **options))
        return engines[-1]

    yield make
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
