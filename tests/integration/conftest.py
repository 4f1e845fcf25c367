"""Fixtures of tests over several processes."""

import asyncio

import pytest

from minillm import processes

CLUSTER_TIMEOUT_S = 160.0


@pytest.fixture
def start():
    """Starts engines, in this process or `elsewhere`; closed in reverse, so a consumer before the producer that owes
    it answers.
    """
    from tests.integration import runtime_pair as rp

    engines = []

    def make(engine_id, role, *, elsewhere=False, **options):
        kind = rp.RemoteEngine if elsewhere else rp.Engine
        engines.append(kind(engine_id, role, **options))
        return engines[-1]

    yield make
    for engine in reversed(engines):
        engine.close()


@pytest.fixture
def forked(monkeypatch, request):
    """Servers and ranks are forked.

    Ranks on GPUs have interpreters of their own: NCCL does not start in forked ones.
    """
    from tests.support.forked import ForkedChild

    if any(request.node.get_closest_marker(name) for name in ("gpu", "multi_gpu")):
        return
    monkeypatch.setattr(processes.Child, "start", ForkedChild.start)


@pytest.fixture
def run_cluster(tmp_path, monkeypatch, forked):
    """Runs a test's coroutine on a fresh `Cluster`, within a deadline, and stops what it started.

    What a killed process cannot remove goes with the test's own folder.
    """
    from minillm.cluster import Cluster

    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(test):
        async def main():
            async with Cluster(tmp_path) as cluster:
                await test(cluster)

        asyncio.run(asyncio.wait_for(main(), CLUSTER_TIMEOUT_S))

    return run
