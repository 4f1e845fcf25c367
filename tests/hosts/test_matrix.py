"""Engines and ranks on several hosts: the tokens are those of one engine alone, or a worded error says why not."""

import asyncio

import pytest

from kvconnector.errors import ConfigError, PeerLostError
from kvconnector.transport.ucx.library import load_library
from tests.hosts.engines import Servers
from tests.integration.minillm_engines import answered, prompt_of, wait_all_blocks_free
from tests.support.transport_suite import Ledger
from tests.transport.remote import RemoteTransport

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(170)]


@pytest.mark.slow
def test_the_ranks_of_a_prefill_engine_are_on_two_hosts(network, tmp_path):
    async def main():
        p0, p1, d, r = (network.host(name) for name in ("p0", "p1", "d", "r"))
        async with Servers(network, tmp_path) as servers:
            servers.keys("p", "d")
            producer = servers.spread_engine([p0, p1], "p", "prefill", "--engine", "tp=2,block=16")
            consumer = servers.engine(d, "d", "decode", "--engine", "block=32,prefix=off")
            await servers.wait_healthy(producer, consumer)
            router = servers.router(r, "r", [producer], [consumer])
            await servers.wait_healthy(router)
            for seed in range(2):
                await answered(servers, router, prompt_of(100, seed), 4)
            await wait_all_blocks_free(servers, producer, consumer)

    with network.inside():
        asyncio.run(main())


def transports(hosts, **options):
    return [RemoteTransport({"options": options}, host.command([])) for host in hosts]


def exchange(a, b):
    """Send a message each way. Returns the lanes, and the results of both sends."""
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


def test_one_of_two_interfaces_is_dead(network):
    """UCX does not use an interface that is down. The error names one that only seems to work, and the other is used if
    it is named. UCX before 1.20 gives up a peer that has an interface down, unless the other is named.
    """
    named = {"NET_DEVICES": "eth1"}
    hosts = [network.host(name) for name in ("a", "b")]
    for host in hosts:
        host.add_interface(1)
    hosts[1].run(["ip", "link", "set", "eth0", "down"])
    with pytest.raises(ConfigError, match=r"named=\['eth0'\], usable=\['eth1', 'lo'\]"):
        transports(hosts[1:], NET_DEVICES="eth0")
    options = named if load_library().version < (1, 20) else {}
    assert exchange(*transports(hosts, **options)) == ("tcp/eth1", [None, None])
    hosts[1].run(["ip", "link", "set", "eth0", "up"])
    hosts[1].cut()
    lanes, errors = exchange(*transports(hosts))
    assert lanes == "tcp/eth0"
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert "lanes='tcp/eth0'" in str(error)
    assert exchange(*transports(hosts, **named)) == ("tcp/eth1", [None, None])
