"""Engines on two hosts over RDMA, with ports in software: tokens, and a cable that is unplugged for a while."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from tests.hosts.engines import Servers
from tests.hosts.faults import RECOVERY_S, ask
from tests.integration.minillm_engines import wait_all_blocks_free
from tests.support.software_nic import TLS, SoftwareNics

DEVICES = ("soft_0", "soft_1")
SETTINGS = {
    "peer": {"timeout_s": 20, "transfer_timeout_s": 10},
    "lease": {"duration_s": 20, "early_read_s": 1},
}
"""Generous timeouts: UCX fills long receive queues when a port is first used."""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(240),
]


async def start(servers, network):
    """A producer, a consumer and their router, each on a host of its own."""
    p, d, r = (network.host(name) for name in ("p", "d", "r"))
    servers.keys("p", "d")
    producer = servers.engine(p, "p", "prefill", "--engine", "block=16", **SETTINGS)
    options = ["--engine", "block=32,prefix=off", "--failure-policy", "fail"]
    consumer = servers.engine(d, "d", "decode", *options, **SETTINGS)
    await servers.wait_healthy(producer, consumer)
    router = servers.router(r, "r", [producer], [consumer])
    await servers.wait_healthy(router)
    return SimpleNamespace(servers=servers, running={"p": producer, "d": consumer, "r1": router})


def test_tokens_are_equal_over_rdma_before_and_after_a_lost_cable(network, tmp_path, monkeypatch):
    nics = SoftwareNics(tmp_path)
    settings = {"KVCONNECTOR_UCX_TLS": TLS, "KVCONNECTOR_UCX_REQUIRE_RDMA": "true"}
    for name, value in nics.environment(**settings).items():
        monkeypatch.setenv(name, value)

    async def main():
        async with Servers(network, tmp_path) as servers:
            cluster = await start(servers, network)
            for _ in range(2):
                assert await ask(cluster, 0) == "right tokens"
            lanes = "rc_verbs/soft_0:1+rc_verbs/soft_1:1"
            assert lanes in (tmp_path / "p-rank0.log").read_text()
            for device in DEVICES:
                nics.set_link(device, is_up=False)
            assert await ask(cluster, 0) != "right tokens", "nothing went by the ports"
            for device in DEVICES:
                nics.set_link(device, is_up=True)
            repaired_s = time.monotonic()
            while (again := await ask(cluster, 0)) != "right tokens":
                assert time.monotonic() < repaired_s + RECOVERY_S, again
            await wait_all_blocks_free(servers, cluster.running["p"], cluster.running["d"])

    with network.inside():
        asyncio.run(main())
