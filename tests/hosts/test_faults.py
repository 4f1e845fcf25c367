"""Faults between engines on several hosts. FAULTS_TABLE names a file for the table of results."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.hosts import faults
from tests.hosts.engines import Servers
from tests.hosts.network import Network

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(240)]

QUICK = {
    ("link cut for 3 s", "reading"),
    ("producer stopped for 3 s", "after the read"),
    ("consumer rank killed", "reading"),
}
"""Faults that every change is tested with; the others are slow."""
SEEN = []


@pytest.fixture(scope="module")
def running(hosts_available, tmp_path_factory):
    """The cluster and its event loop."""
    with Network() as network, network.inside(), asyncio.Runner() as runner:
        servers = Servers(network, tmp_path_factory.mktemp("faults"))
        runner.run(servers.__aenter__())
        try:
            yield runner, runner.run(faults.Cluster.start(servers))
        finally:
            runner.run(servers.__aexit__(None, None, None))


def test_tokens_are_equal_over_several_hosts(running):
    runner, cluster = running
    for index in (0, 1):
        assert runner.run(faults.ask(cluster, index)) == "right tokens"


@pytest.mark.parametrize(
    "name, phase",
    [
        pytest.param(name, phase, marks=[] if (name, phase) in QUICK else [pytest.mark.slow])
        for name in faults.FAULTS
        for phase in (("reading",) if "60 s" in name else faults.SHARES)
    ],
)
def test_a_fault(running, name, phase):
    runner, cluster = running
    SEEN.append(runner.run(faults.inject(cluster, name, phase)))
    if path := os.environ.get("FAULTS_TABLE"):
        Path(path).write_text(faults.table(SEEN))
