"""Fixtures of tests over several processes."""

import asyncio
from contextlib import ExitStack, closing
from functools import partial

import pytest

from minillm import processes

CLUSTER_TIMEOUT_S = 160.0


@pytest.fixture
def start():
    """Starts engines, in this process or `elsewhere`. They are closed in reverse order, so consumers before their
    producers.
    """
    from tests.integration.runtime_pair import Engine, RemoteEngine

    with ExitStack() as stack:

        def make(engine_id, role, *, elsewhere=False, **options):
            kind = RemoteEngine if elsewhere else Engine
            return stack.enter_context(closing(kind(engine_id, role, **options)))

        yield make


@pytest.fixture
def run_cluster(tmp_path, monkeypatch, request):
    """Runs a test's coroutine on a fresh `Cluster`, within a deadline, and stops what it started.

    Files that a killed process leaves are removed with the test's folder. Servers and ranks are forked, but ranks on
    GPUs have interpreters of their own, since NCCL does not start in forked ones.
    """
    from tests.support.forked import ForkedChild

    if not any(request.node.get_closest_marker(name) for name in ("gpu", "multi_gpu")):
        monkeypatch.setattr(processes.Child, "start", ForkedChild.start)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return partial(_run_on_a_cluster, tmp_path)


def _run_on_a_cluster(folder, test):
    from minillm.cluster import Cluster

    async def main():
        async with Cluster(folder) as cluster:
            await test(cluster)

    asyncio.run(asyncio.wait_for(main(), CLUSTER_TIMEOUT_S))
