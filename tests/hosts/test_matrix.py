"""Engines and ranks over several hosts: the tokens are those of one engine alone, or a worded error says why not."""

import asyncio

import pytest

from kvconnector.errors import ConfigError, PeerLostError
from tests.hosts.engines import Servers
from tests.integration.minillm_engines import answered, prompt_of, wait_all_blocks_free
from tests.support.transport_suite import Ledger
from tests.transport.remote import RemoteTransport

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]

MAX_TOKENS = 4


@pytest.fixture
def run(network, tmp_path):
    """Runs a test's coroutine with servers of its own."""

    def run(test):
        async def main():
            async with Servers(network, tmp_path) as servers:
                await test(servers)

        with network.inside():
            asyncio.run(main())

    return run


async def check_tokens(servers, router, num_requests):
    """So many requests have the tokens that one engine alone computes, from a cache that was sent."""
    for seed in range(num_requests):
        answer = await answered(servers, router, prompt_of(100, seed), MAX_TOKENS)
        assert (answer.kv_transfer_stats or {}).get("bytes", 0) > 0


@pytest.mark.slow
def test_the_ranks_of_a_prefill_engine_are_on_two_hosts(run):
    async def test(servers):
        p0, p1, d = (servers.network.host(name) for name in ("p0", "p1", "d"))
        servers.keys("p", "d")
        producer = servers.spread_engine([p0, p1], "p", "prefill", "--engine", "tp=2,block=16")
        consumer = servers.engine(d, "d", "decode", "--engine", "block=32,prefix=off")
        await servers.wait_healthy(producer, consumer)
        router = servers.router(servers.network.host("r"), "r", [producer], [consumer])
        await servers.wait_healthy(router)
        await check_tokens(servers, router, 2)
        await wait_all_blocks_free(servers, producer, consumer)

    run(test)


def transports(hosts, **options):
    return [RemoteTransport({"options": options}, host.command([])) for host in hosts]


def exchange(a, b):
    """A message each way; the lanes, and what became of the two that were sent."""
    to_b, to_a = a.connect(b.address), b.connect(a.address)
    keys = [(0, a.recv(1, a.allocate(8).buffer)), (1, b.recv(2, b.allocate(1 << 20).buffer))]
    sent = [(0, a.send(to_b, 2, a.allocate(1 << 20).buffer))]
    sent.append((1, b.send(to_a, 1, b.allocate(8).buffer)))
    ledger = Ledger(a, b)
    errors = ledger.wait(*sent)
    if errors == [None, None]:
        ledger.wait(*keys)
    lanes = a.call("lanes", to_b)
    for each in (a, b):
        each.kill()
        each.release()
    return lanes, list(errors)


def test_of_two_interfaces_one_is_dead(network):
    """One that is down is not used. One that looks well is named by the error, and the other is used where it is."""
    hosts = [network.host(name) for name in ("a", "b")]
    for host in hosts:
        host.add_interface(1)
    hosts[1].run(["ip", "link", "set", "eth0", "down"])
    with pytest.raises(ConfigError, match=r"named=\['eth0'\], usable=\['eth1', 'lo'\]"):
        transports(hosts[1:], NET_DEVICES="eth0")
    assert exchange(*transports(hosts)) == ("tcp/eth1", [None, None])
    hosts[1].run(["ip", "link", "set", "eth0", "up"])
    hosts[1].cut()
    lanes, errors = exchange(*transports(hosts))
    assert lanes == "tcp/eth0"
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert "lanes='tcp/eth0'" in str(error)
    assert exchange(*transports(hosts, NET_DEVICES="eth1")) == ("tcp/eth1", [None, None])
